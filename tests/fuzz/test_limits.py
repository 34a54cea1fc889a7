"""What is not said in random programs."""

from __future__ import annotations

from tests.fuzz.programs import Program, is_said
from tests.tables import each

_LEAF = "v0 = leaf('v0', (4, 4), 1, 'R')\n"


@each(
    ("text", "said"),
    [
        # Data: of leaves and of what requires no gradient.
        ("v1 = v0 * 2\nv0.data = v0.data.t()", True),
        ("v1 = v0.detach()\nv1.data = v1 * 2", True),
        ("v1 = v0[0]\nv1.data = v1.data * 2", False),
        ("v1 = v0 * 2\nv1.data = v1.data * 2", False),
        ("v1 = v0[0]\nv0.data = v0.data * 2", False),
        ("v1 = v0 * v0\nv0.data = v0.data * 2", False),
        ("v1 = v0 * 2\nwith torch.no_grad(): v0.set_(v0.detach() * 2)", True),
        # Memory written to behind autograd's back.
        ("v1 = v0.exp()\nv1.data.mul_(2.0)", False),
        ("v1 = v0.exp()\nv0.data.mul_(2.0)", True),
        ("v1 = v0.exp()\nwith torch.inference_mode(): v1.mul_(2.0)", False),
        # Dims.
        ("with torch.no_grad(): v0.t_()", False),
        ("v1 = v0 * 2\nv1.t_()", False),
        ("v1 = v0.detach() * 2\nwith torch.no_grad(): v1.t_()", True),
        ("v1 = v0 * 2\nwith torch.no_grad(): torch.sum(v0, 0, out=v1)", False),
        # Gradients of a view that may have views of its own.
        ("v1 = v0[0]\nv2 = v1[1:]\nwatch(v1, 'v1')", False),
        ("v1 = v0[0]\nv2 = gradient(v1 * v1, v1)", True),
        # Hooks of views that are written to, which torch forgets.
        ("v1 = v0 * 2\nv2 = v1[0]\nv2.register_hook(lambda grad: grad * 2)\nv2.mul_(3)", False),
        ("v1 = v0 * 2\nv1.register_hook(lambda grad: grad * 2)\nv1.mul_(3)", True),
        ("v1 = v0[0]\nwatch(v1, 'v1')\nv0.requires_grad_(False)", False),
        # What is kept as a copy, on some ranks.
        ("v1 = v0.detach()[:, :1]\nv2 = torch.tensordot(v1, v0[:, :1], dims=2)\nv1.mul_(2)", False),
        ("v1 = v0.detach()[:, :1]\nv2 = v0[:, :1] + v1\nv1.mul_(2)", True),
        ("v1 = v0 * 2\nv2 = v1 + 1\nv1.mul_(2)", True),
        (
            "v1 = recomputed(lambda a: a * 2, v0, reentrant=False)\n"
            "with torch.no_grad(): v0.mul_(2)",
            False,
        ),
        # Whether a gradient of nothing has one itself.
        ("v1 = v0[:0]\nv2 = gradient(v1 * v1, v0, create_graph=True)", False),
        ("v2 = gradient(v0 * v0, v0, create_graph=True)", True),
    ],
)
def test_what_torch_leaves_undefined_is_not_said(text: str, said: bool) -> None:
    assert is_said(Program((_LEAF + text).splitlines(), (2,))) is said
