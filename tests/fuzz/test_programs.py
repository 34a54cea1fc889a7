"""Parts of the random programs of all kinds, and those that went wrong once."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.fuzz import outside, views
from tests.fuzz.minimise import minimise
from tests.fuzz.programs import MESHES, Outcome, Program, compare, expect, made, run_programs
from tests.tables import each

#: Programs of each mesh.
COUNT = 30


def check(programs: Sequence[Program]) -> None:
    wrong = [each for each in run_programs(programs) if each.kind not in ("right", "refused")]
    assert not wrong, f"{wrong[0].kind}: {wrong[0].why}\n{wrong[0].program}"


@each("mesh", MESHES)
def test_programs_give_what_plain_tensors_give(mesh: tuple[int, ...]) -> None:
    programs = [program for n in range(COUNT) if expect(program := made(1000 + n, mesh))]
    assert len(programs) > COUNT * 0.9
    check(programs)


@each("mesh", MESHES)
def test_views_go_where_torch_derives_them_from(mesh: tuple[int, ...]) -> None:
    check([views.made(number, mesh) for number in range(7000, 7000 + COUNT // 2)])


@each("mesh", [(2,), (3,), (2, 2)])
def test_all_ranks_raise_or_have_torchs_values(mesh: tuple[int, ...]) -> None:
    programs = [outside.made(number, mesh) for number in range(3000, 3000 + COUNT)]
    wrong = list(outside.wrong(programs))
    assert not wrong, wrong[0]


def test_what_goes_wrong_is_made_short() -> None:
    lines = ["v0 = data((4, 4), 1, 'S0')", "v1 = v0 * 2", "v2 = v1.sin()", "v3 = v0.data_ptr()"]
    program = Program(lines, (2,))
    assert expect(program)
    (outcome,) = run_programs([program])
    assert outcome.kind == "raised"
    shortest: Outcome = minimise(outcome)
    assert list(shortest.program.statements) == [lines[0].replace("S0", "R"), lines[3]]


STEP = "descend(v0 * v0)\ntorch.optim.SGD([v0], 0.1, momentum=0.5).step()\n"


@each(
    "program",
    [
        "v0 = leaf('v0', (2, 0, 4), 24, 'R')\nv1 = module('v1', 'buffers', v0, 70, 'S0')\n"
        "v2 = functional.batch_norm(v0, None, None, training=True)\nv3 = v0 * 2",
        "v0 = leaf('v0', (7, 2), 83, 'S1')\nv1 = v0.squeeze()\nwith torch.no_grad(): v1.mul_(0.5)\n"
        "v4 = v1.ravel()\nv5 = torch.cat([v4, v4], 0)\nv0.requires_grad_(False)\nv6 = v4 * 2",
        # A gradient that is partial, of a leaf that is frozen by then.
        "v1 = data((), 97, 'P')\nv2 = leaf('v2', (), 76, 'R')\nv1.addcmul_(v2, v2, value=0.5)\n"
        "v2.requires_grad_(False)\nv3 = v1 * 2",
        # Attention of nothing, which may be written to.
        "v0 = leaf('v0', (2, 3, 4), 46, 'R')\nv1 = v0[:, 1:1] * 1\n"
        "v2 = functional.scaled_dot_product_attention(v1, v1, v1, is_causal=True)\nv1.mul_(2.0)",
        # torch keeps nothing of an input without elements, which may then be written to.
        "v0 = leaf('v0', (0, 4), 64, 'S0')\nv1 = v0 + -1.5\n"
        "v2 = functional.batch_norm(v1, None, None, training=True)\nv1[v1 > 0.3] = 0.0",
        "v0 = data((1,), 3, 'R')\nv0[v0 > 0.3] = v0",
        "v0 = leaf('v0', (2, 2, 2), 57, 'S2')\nv1 = v0[-2, 1, 0]\n"
        "with torch.inference_mode(): write_local(v1, 0.0)",
        "v0 = leaf('v0', (4, 4), 83, 'S0')\nv2 = torch.nn.functional.layer_norm(v0.t(), (4,))",
        "v0 = data((1,), 99, 'S0')\nv0[:] += 2.0\nv3 = v0.unfold(-1, 1, 2)",
        # Writes in inference mode to what only a copy shows.
        "v0 = data((3, 1), 11, 'S1')\nwith torch.inference_mode(): write_local(v0[2:3, -1], 0.25)",
        "v0 = data((4, 4), 78, 'S0')\n"
        "with torch.inference_mode(): write_local(v0[-1, 2:4].data, -1.5)",
        "v0 = leaf('v0', (2, 3, 4), 60, 'S1')\nv1 = v0[-1, 0]\nv2 = v1[1:3, None]\n"
        "with torch.no_grad(): write_local(v2, 0.25)",
        # What torch takes for images, and values of leading dims of size 1.
        "v0 = data((2, 3, 4), 16, 'R')\nv1 = v0.unsqueeze(-3).permute([0, 3, 2, 1])\n"
        "v2 = torch.cat([v1, v1], 1)",
        "v0 = data((1, 6), 15, 'S0')\nv1 = v0 + 1\nv1[:1] = 0.5\nv1[v1 > 0.3] = v0",
        # Gradients of intermediates that a view was written to.
        "v0 = leaf('v0', (5, 3), 79, 'S0')\nv1 = v0 + v0\nv2 = v1[0]\nv2.clamp_(-1.0, 1.0)\n"
        "watch(v1, 'v1')\nv3 = gradient(v2, v1)",
        "v0 = data((4, 3), 9, 'S1')\nv1 = v0[:0][:, [9]]",
        "v0 = leaf('v0', (4, 6), 96, 'PA')\nv1 = v0.unfold(0, 1, 2)\n"
        "v2 = recomputed(lambda a: (a * 2).sin() + a, v1, reentrant=True)",
        "v0 = leaf('v0', (4, 4), 93, 'PM')\nv1 = recomputed(lambda a: a.sin(), v0, reentrant=True)",
        # Leaves and results of Functions where gradients are off.
        "v0 = leaf('v0', (), 50, 'R')\nv1 = recomputed(lambda a: a.sin(), v0, reentrant=True)\n"
        "with torch.no_grad(): watch(v1, 'v1')",
        # Views that stay in the graph which their base has left.
        "v0 = leaf('v0', (4, 4), 5, 'S0')\nv1 = v0 * 2\nv2 = v1[0]\nv1.detach_()\nv3 = v2 * 3",
        # Partial products of what lies otherwise.
        "v0 = leaf('v0', (6,), 68, 'PA')\nv1 = v0.prod()\nv2 = gradient(v1, v1)",
        "v0 = leaf('v0', (1, 6), 99, 'R')\nv1 = torch.cat([v0, v0], 0)\n"
        "v2 = recomputed(lambda a: (a * 2).sin() + a, v1, reentrant=True)\nv1.detach_()",
        # What one rank has no part of, and what does nothing.
        "v0 = leaf('v0', (2, 1, 2), 56, 'S1')\n"
        "v1 = torch.nn.functional.batch_norm(v0, None, None, training=True)",
        "v0 = leaf('v0', (6,), 49, 'S0')\nv1 = v0.unbind(-1)[0]\n"
        "torch.nn.functional.dropout(v0, 0.5, training=False, inplace=True)\n"
        "torch.nn.functional.dropout(v1, 0.5, training=False, inplace=True)",
        "v0 = data((0, 4), 59, 'S1')\nv1 = v0.scatter(1, torch.tensor([]), -1.5)",
        "v0 = leaf('v0', (4, 4), 38, 'S1')\nv1 = leaf('v1', (), 44, 'PM')\n"
        "v2 = torch.broadcast_tensors(v0, v1)[0]",
        "v0 = leaf('v0', (1, 6), 50, 'PM')\n"
        "with torch.no_grad(): v1 = torch.einsum('...ij->...ji', v0)\n"
        "write_local(v0[:].detach(), 0.25)",
        "v0 = data((4, 6), 41, 'S1')\nv1 = torch.nn.functional.group_norm(v0, 1)\nv1.detach_()",
        "v0 = leaf('v0', (1,), 52, 'PA')\nv0.register_hook(lambda grad: grad.clamp(-1, 1))",
        "v0 = leaf('v0', (3,), 58, 'S0')\nv1 = v0.expand([2, 3])\nv0.data = v0.data * 2\n"
        "v2 = v1.swapaxes(0, 1) * 3",
        # What has no elements, and what is its first argument itself.
        "v0 = leaf('v0', (0, 4), 50, 'S0')\nv1 = v0.diff(dim=-2)",
        "v0 = leaf('v0', (0, 4), 75, 'S0')\nv1 = data((3, 0), 1, 'S0')\n"
        "v1.masked_scatter_(v1 > 0.3, v0)",
        "v0 = leaf('v0', (4,), 1, 'S0')\nv1 = leaf('v1', (3,), 2, 'P')\nv2 = v0 * 2\n"
        "torch.meshgrid(v2, v1[:1], indexing='xy')[0].mul_(0.5)",
        # A leaf with data that were made in inference mode.
        "v0 = leaf('v0', (1,), 6, 'P')\nwith torch.inference_mode(): v0.data = v0.data.clone()\n"
        "watch(v0, 'v0')\nv0.data = v0.data",
        # Writes through a sibling of what was handed out; strides of stacked images.
        "v0 = leaf('v0', (2, 2, 2), 94, 'S2')\nv1 = v0[..., 0]\nv2 = v1.squeeze()\n"
        "write_local(v2[:0, ..., 0].detach(), 0.5)\nv2[0, :].detach().clamp_(-1.0, 1.0)",
        "v0 = data((1, 2, 3), 75, 'S2')\nv1 = v0.mT.unsqueeze(2)\nv2 = torch.stack([v1, v1], -4)",
        # Gradients, partial along one axis, of what became a mean along another: see MESHES.
        "v0 = leaf('v0', (1,), 36, 'R S0')\nv1 = data((4, 2), 48, 'S1 PA')\nv1.add_(v0)",
        # Parameters and gradients that are views of one buffer; copies of both.
        "v0 = leaf('v0', (4, 6), 1, 'S0')\nv1 = data((36,), 3, 'S0')\n"
        f"v0.data = v1[:24].view(4, 6)\n{STEP}v2 = v1 * 2",
        "v0 = leaf('v0', (4, 6), 1, 'R')\nv9 = leaf('v9', (4, 3), 1, 'R')\n"
        "v1 = data((36,), 0, 'R')\nv1.zero_()\nv0.grad = v1[:24].view(4, 6)\n"
        "v9.grad = v1[24:].view(4, 3)\ndescend(v0, v9 * v9)\nv1.mul_(0.5)\nv3 = v0.grad * 1\n"
        f"v4 = v9.grad * 1\nv5 = v1 * 2\n{STEP}",
        "v0 = leaf('v0', (4, 6), 1, 'R')\nv1 = data((6, 4), 3, 'R')\nv0.grad = v1.t()\n"
        "v2 = v1[1:]\nv2.mul_(2)\ntorch.nn.utils.clip_grad_norm_([v0], 0.5)\nv3 = v1 * 2",
        "v0 = leaf('v0', (4, 6), 1, 'S0')\nv1 = data((6, 4), 3, 'S0')\nv0.data = v1.t()[:, 1:]\n"
        "v3, v4 = copied([v0, v1])\nwith torch.no_grad(): v3.mul_(2)\nv5 = v4 * 2\nv6 = v1 * 2",
        "v0 = leaf('v0', (4, 6), 1, 'S0')\nv1 = v0.detach()\nv2 = v1.flatten()\n"
        "v1.requires_grad_()\nv3 = v1 * v1\nv4 = v2 * 2",
        "v0 = leaf('v0', (4, 6), 1, 'S0')\nv1 = own(v0)\nv0.requires_grad_(False)\nv2 = v1 * 2",
    ],
)
def test_programs_that_went_wrong_once(program: str) -> None:
    axes = max(len(text.split()) for text in re.findall(r"'([SRP][^']*)'", program))
    compare(program, (2,) * axes)


_COMPUTED = "v9 = leaf('v9', (4, 6), 1, {layout})\nv0 = v9 * 2\n"


@each("layout", ["R", "P", "S0", "S1"])
@each(
    "program",
    [
        # A hook on a view stays where a write is not counted.
        "v1 = v0[None].expand(2, 4, 6).reshape(1, 2, 4, 6)\nv2 = v1.mean()\n"
        "v1[..., 0].data[:, :1].mul_(2)\nwatch(v1, 'v1')",
        "v1 = v0.flatten()\nkeep(v1, 'v1')\nv2 = v1 * 3\nv1.data.detach()[:2].mul_(2)\nv3 = v1 * 2",
        # Counted writes move what keeps its gradient along.
        "v1 = v0.flatten()\nkeep(v1, 'v1')\nwith torch.no_grad(): v1.mul_(3)\nv2 = v1 * 2",
        # Writes through a view of a view that was written to.
        "v1 = v0.view(8, 3)[:, 1:3]\nv1.mul_(2)\nv1[..., 0] = 5.0\nv2 = v1 * v1",
        "v1 = v0.view(2, 12)[1].view(3, 4)[:, 1:3]\nv1.mul_(2)\nv1[..., 0] = 5.0\nv2 = v1 * v1",
    ],
)
def test_views_that_went_wrong_once(program: str, layout: str) -> None:
    compare(_COMPUTED.format(layout=repr(layout)) + program, refused=layout == "S1")


@each("layout", ["R", "S0", "S1"])
def test_views_that_were_left_by_their_base_are_not_written_in_the_graph(layout: str) -> None:
    lines = [f"v0 = leaf('v0', (4, 4), 0, '{layout}')", "v1 = v0 * 2", "v2 = v1.flatten()"]
    program = Program([*lines, "v1.data = v1.detach().clone()", "v2.mul_(3.0)"], (2,))
    assert expect(program)
    (outcome,) = run_programs([program])
    assert outcome.kind == "raised"
    assert "given other data" in outcome.why


@each(
    "text",
    [
        "v0[1:].t_()",
        "v0[1].detach_()",
        "v1[1].detach_()",
        "v0.detach()[0].detach_()",
        "v2.index_select(0, torch.tensor([-1]))",
        "v2[[4]]",
        "v2[:, [9]]",
        "v2[:0][[0]]",
        "v2[0].H",
        "v2.expand([2, 4, 3]).add_(1.0)",
        "v2.narrow(0, 3, 2)",
        "v2.add_(v2[0])",
        "v2[1:] = v2[:-1]",
        "v2[-1:, :1] = v2[2:]",
        "torch._foreach_add_([v2[1:]], [v2[:-1]])",
        "torch.mul(v2[1:], 2.0, out=v2[:-1])",
        "torch.cat([v2[:1], v2[1:2]], out=v2[1:3])",
        "v2.index_copy_(0, torch.tensor([1]), v2[:1])",
        "v1.split(1)[0].add_(1.0)",
        "v1.chunk(2, 1)[0].t_()",
        "v1.unbind(1)[0].mul_(2.0)",
        "next(iter(v1))[0].fill_(2.0)",
        "torch._foreach_mul_([v1.split(1)[0]], 2.0)",
        "v2.split(1)[0].add_(v1[:1])",
        "torch.clamp(v2, -1, 1, out=v2[0])",
        "v2[0].rot90(3, (-1, 0))",
        "v2[0].renorm_(2, 0, 1.0)",
        "v4.mul_(2.0)",
        "torch._foreach_mul_([v4[:2]], 2.0)",
        "v4.t_()",
        "v2.renorm_(2, 2, 1.0)",
        "torch.meshgrid(v0.flatten(), v1[0, :1], indexing='ij')[0][:1].mul_(2.0)",
        "torch.meshgrid(v1.t(), v1[0], indexing='ij')",
        "torch.meshgrid(v1[0], v1[0].float(), indexing='ij')",
    ],
)
def test_what_torch_refuses_is_refused_on_all_ranks(text: str) -> None:
    lines = ["v0 = leaf('v0', (4, 3), 1, 'S0')", "v1 = v0 * 2", "v2 = data((4, 3), 2, 'S0')"]
    lines += ["v3 = leaf('v3', (4, 3), 3, 'S1')", "v4 = v3[:, 1]", "v3.detach_()"]
    program = Program(lines, (3,), refused=text)
    assert expect(program)
    assert program.refused
    (outcome,) = run_programs([program])
    assert outcome.kind == "right", outcome.why
