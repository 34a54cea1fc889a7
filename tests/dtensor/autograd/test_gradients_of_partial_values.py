"""Values that are partial in any reduction: their gradients, and writes to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.dtensor.op_checks import Layout, distributed, skipping_without_derivatives
from tests.fuzz import programs
from tests.rounding import assert_close
from tests.tables import each
from tilework.dtensor import DTensor, Partial, Shard, init_device_mesh
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks

OPS = ("sum", "avg", "max", "min", "product")
REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "prod": lambda x: x.prod(0),
    "prod of all": torch.prod,
    "prod, keepdim": lambda x: x.prod(1, keepdim=True),
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin((0, 1)),
    "max": lambda x: x.max(0).values,
    "min of all": torch.min,
    "aminmax": lambda x: x.aminmax().max,
    "logsumexp": lambda x: x.logsumexp(0),
    "norm": torch.norm,
    "norm of one": lambda x: torch.linalg.vector_norm(x, 1, 0),
    "norm of many": lambda x: torch.linalg.vector_norm(x, float("inf"), 0),
    "norm of three": lambda x: torch.linalg.vector_norm(x, 3, 1),
    "var": lambda x: x.var(0),
    "std": lambda x: x.std(),
    "nansum": lambda x: x.nansum(0),
    "median": lambda x: x.median(0).values,
    "cumprod": lambda x: x.cumprod(0),
    "cumsum": lambda x: x.cumsum(0),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "softmax": lambda x: x.softmax(0),
    "stacked prod": lambda x: torch.stack([row.prod() for row in x]),
    "prod beside sum": lambda x: torch.stack([x.prod(), x.sum()]),
}
WHOLE = torch.tensor([[2.0, 3.0, 6.0], [1.5, 0.5, 4.0]], dtype=torch.float64)


def seen_gradients(x: Any, reduce: Callable[[Any], Any]) -> list[Any]:
    """Gradients of an intermediate result by each way to ask for one, and that of the leaf."""
    hooked: list[Any] = []
    y = reduce(x)
    y.register_hook(lambda grad: hooked.append(grad.clone()))
    scale = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(tuple(y.shape))
    z = (y * scale).square().sum()
    asked = torch.autograd.grad(z, [y, x], retain_graph=True)
    y.retain_grad()
    z.backward()
    assert y.grad is not None
    assert x.grad is not None
    return [*hooked, *asked, y.grad, x.grad]


def _numbered(number: int, message: str) -> str:
    return f"{number}: {message}"


def compare(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for number, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert isinstance(got, DTensor)
        assert_close(got.full_tensor(), want, msg=partial(_numbered, number))


@each("name", REDUCTIONS)
@each("shape", [(2,), (2, 2)])
def test_the_gradient_of_a_reduction_is_that_of_its_value(
    name: str, shape: tuple[int, ...]
) -> None:
    reduce = REDUCTIONS[name]
    with skipping_without_derivatives():
        expected = seen_gradients(WHOLE.clone().requires_grad_(), reduce)
    layouts = [(Shard(0),), (Shard(1),)] if len(shape) == 1 else [(Shard(0), Shard(1))]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)
        for layout in layouts:
            x = distributed(WHOLE.clone().requires_grad_(), mesh, Layout(layout))
            compare(seen_gradients(x, reduce), expected)

    run_ranks(2 ** len(shape), program)


@each("op", OPS)
def test_the_gradient_of_a_partial_tensor_is_that_of_its_value(op: str) -> None:
    expected = seen_gradients(WHOLE.clone().requires_grad_(), lambda x: x.clone().view(-1))

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distributed(WHOLE.clone().requires_grad_(), mesh, Layout((Partial(op),)))
        if op != "product":
            compare(seen_gradients(x, lambda x: x.clone().view(-1)), expected)
            return
        with pytest.raises(NotImplementedError, match="redistribute"):
            seen_gradients(x, lambda x: x.clone().view(-1))

    run_ranks(2, program)


def test_a_hook_may_change_a_gradient() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for op in ("sum", "avg", "max", "min"):
            x: Any = distributed(WHOLE.clone().requires_grad_(), mesh, Layout((Partial(op),)))
            y = x.clone()
            y.register_hook(lambda grad: grad * 2)
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.full_tensor().unique().tolist() == [2]

    run_ranks(2, program)


WRITES: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(2),
    "add_": lambda x: x.add_(1),
    "neg_": lambda x: x.neg_(),
    "sub_ of itself": lambda x: x.sub_(x * 2),
    "exp_": lambda x: x.exp_(),
    "clamp_": lambda x: x.clamp_(1, 3),
    "copy_": lambda x: x.copy_(torch.ones_like(x)),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([0]), torch.full((1, 3), 9.0).double()),
    "index_reduce_": lambda x: x.index_reduce_(
        0, torch.tensor([0]), torch.full((1, 3), 3.0).double(), "amin"
    ),
    "masked_fill_": lambda x: x.masked_fill_(torch.tensor([[True], [False]]), 3.0),
    "scatter_": lambda x: x.scatter_(0, torch.tensor([[0]]), 9.0),
    "put_": lambda x: x.put_(torch.tensor([1]), torch.tensor([9.0]).double()),
    "put_ of nothing": lambda x: x.put_(
        torch.tensor([], dtype=torch.long), torch.zeros(0).double()
    ),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([1]), 3.0),
    "cumsum_": lambda x: x.cumsum_(0),
    "cumprod_": lambda x: x.cumprod_(1),
    "tril_": lambda x: x.tril_(),
    "addcmul_": lambda x: x.addcmul_(x * 1, x * 1),
    "a row": lambda x: x[0].zero_(),
    "a mask": lambda x: x.__setitem__(x > 3, 1.0),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
}


def written(x: Any, write: Callable[[Any], Any]) -> tuple[Any, Any]:
    y = x.clone() if x.requires_grad else x
    write(y)
    if y.requires_grad:
        (y * torch.arange(1.0, 7, dtype=y.dtype).view(tuple(y.shape))).sum().backward()
    return y.detach(), x.grad


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@each("name", WRITES)
def test_writes_to_partial_tensors(name: str) -> None:
    """In place, with and without gradients, whatever the reduction."""
    cases = [
        (op, graded) for op in OPS for graded in (False, True) if not (op == "product" and graded)
    ]
    expected = {
        graded: written(WHOLE.clone().requires_grad_(graded), WRITES[name])
        for graded in (False, True)
    }

    def check(mesh: DeviceMesh, op: str, graded: bool) -> None:
        layout = Layout((Partial(op),) * mesh.ndim)
        x = distributed(WHOLE.clone().requires_grad_(graded), mesh, layout)
        value, grad = written(x, WRITES[name])
        want, want_grad = expected[graded]
        assert_close(value.full_tensor(), want, msg=lambda m: f"{op} {graded}: {m}")
        if want_grad is not None:
            got = torch.zeros_like(want_grad) if grad is None else grad.full_tensor()
            assert_close(got, want_grad, msg=lambda m: f"{op} grad: {m}")

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for op, graded in cases:
            check(mesh, op, graded)

    run_ranks(2, program)


@each(
    "program",
    [
        "v0 = leaf('v0', (5, 3), 43, 'PM')\nv1 = v0.chunk(2, 0)[0]\n"
        "v1.register_hook(lambda grad: grad * 2)",
        "v0 = leaf('v0', (5, 3), 43, 'S0')\nv1 = moved(v0, 'PM')\nv2 = v1 + 1\n"
        "v2.register_hook(lambda grad: grad * 2)",
        "v0 = leaf('v0', (4, 6), 11, 'PA')\nv0.register_hook(lambda grad: grad * 2)\n"
        "v1 = gradient(v0 * v0, v0, create_graph=True)",
        "v0 = leaf('v0', (0, 4), 95, 'PM')\nv1 = torch.cat([v0, v0], -1)\n"
        "with torch.no_grad(): v1.register_hook(lambda grad: grad * 2)\n"
        "v1.masked_fill_(v1.isnan(), 0.0)",
    ],
)
def test_hooks_change_gradients_of_what_is_partial_otherwise_than_as_a_sum(program: str) -> None:
    programs.compare(program)
