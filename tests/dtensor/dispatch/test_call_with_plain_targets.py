"""Plain tensors as the left operand of operators whose others are DTensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dtensor.op_checks import check_op
from tests.rounding import assert_close
from tilework.dtensor import DTensor, Shard, distribute_tensor, init_device_mesh
from tilework.parallel import ColwiseParallel, parallelize_module
from tilework.testing import run_ranks

IN_PLACE = {
    name: getattr(operator, name)
    for name in (
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "imatmul"),
    )
}
REFLECTED: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name)
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
        *("and_", "or_", "xor", "lshift", "rshift", "eq", "ne", "lt", "le", "gt", "ge"),
    )
}


def operands(name: str) -> tuple[Tensor, Tensor]:
    bits = any(word in name for word in ("and", "or", "shift"))
    values = torch.tensor([[5, 3], [6, 7]]), torch.tensor([[2, 1], [1, 2]])
    return values if bits else (values[0].double(), values[1].double())


@pytest.mark.parametrize("name", IN_PLACE)
def test_augmented_assignment_makes_a_new_tensor(name: str) -> None:
    """Python's fallback where the left operand cannot be written to, as for numbers."""
    assign = IN_PLACE[name]
    left, right = operands(name)
    expected = assign(left.clone(), right)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        plain = left.clone()
        try:
            result = assign(plain, distribute_tensor(right, mesh, [Shard(0)]))
        except TypeError:
            assert name == "imatmul"  # which torch does not have either
        else:
            assert isinstance(result, DTensor)
            assert_close(result.full_tensor(), expected)
        assert_close(plain, left)

    run_ranks(2, program)


@pytest.mark.parametrize("name", REFLECTED)
def test_operators_take_plain_tensors_and_numbers_on_either_side(name: str) -> None:
    call = REFLECTED[name]
    left, right = operands(name)
    numbers = name != "matmul"

    def both(a: Tensor, b: Tensor) -> list[Tensor]:
        found = [call(a, b)]
        return [*found, call(a, 2), call(2, b)] if numbers else found

    grads = left.is_floating_point() and name not in ("eq", "ne", "lt", "le", "gt", "ge")
    check_op(both, left, right, meshes=[(2,)], most=10, plain=True, partial=(), grads=grads)


TARGETS: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda p, x: p.add_(x),
    "addcmul_": lambda p, x: p.addcmul_(x, x),
    "copy_": lambda p, x: p.copy_(x),
    "index_add_": lambda p, x: p.index_add_(0, torch.arange(2), x),
    "index_put_": lambda p, x: p.index_put_((torch.arange(2),), x),
    "masked_fill_": lambda p, x: p.masked_fill_(x > 0, 1.0),
    "lerp_": lambda p, x: p.lerp_(x, 0.5),
    "addmm_": lambda p, x: p.addmm_(x, x),
    "view": lambda p, x: p[0].add_(x[0]),
    "named": lambda p, x: torch.Tensor.add_(p, other=x),
    "setitem": lambda p, x: operator.setitem(p, 0, x[0]),
    "setitem with indices": lambda p, x: operator.setitem(p, x > 0, 1.0),
    "out=": lambda p, x: torch.add(x, 1, out=p),
    "out= of several": lambda p, x: torch.max(x, 0, out=(x[0].clone(), p)),
    "foreach": lambda p, x: torch._foreach_add_([p], [x]),
    "foreach, the second": lambda p, x: torch._foreach_add_([x.clone(), p], [x, x]),
    "foreach, the third list": lambda p, x: torch._foreach_addcmul_([p], [p], [x]),
}


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_written_to_a_plain_tensor(name: str) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        plain = torch.full((2, 2), 3.0)
        x = distribute_tensor(torch.full((2, 2), 2.0), mesh, [Shard(0)])
        with pytest.raises(TypeError, match=r"full_tensor\(\)"):
            TARGETS[name](plain, x)
        assert plain.tolist() == [[3.0, 3.0]] * 2
        assert x.full_tensor().tolist() == [[2.0, 2.0]] * 2

    run_ranks(2, program)


def test_lists_of_which_none_are_written_before_one_is_refused() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        plain = torch.full((2,), 3.0)
        x = distribute_tensor(torch.full((2,), 2.0), mesh, [Shard(0)])
        first: Any = x.clone()
        with pytest.raises(TypeError, match="Nothing was written"):
            torch._foreach_add_([first, plain], [x, x])
        assert first.full_tensor().tolist() == [2.0, 2.0]

    run_ranks(2, program)


@pytest.mark.filterwarnings("ignore:out= of add has shape")
def test_out_takes_what_is_computed_of_plain_tensors() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(3), mesh, [Shard(0)])
        torch.add(torch.ones(3), 1, out=x)
        assert x.full_tensor().tolist() == [2, 2, 2]
        assert x.placements == (Shard(0),)
        shorter = distribute_tensor(torch.zeros(2), mesh, [Shard(0, (2, 0))])
        torch.add(x, 1, out=shorter)  # of another shape, which its sizes do not fit
        assert shorter.full_tensor().tolist() == [3, 3, 3]

    run_ranks(2, program)


def test_numbers_in_dtensors_are_written_to_plain_tensors() -> None:
    """A norm, a loss: what has no dims is one number on all ranks."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.tensor([1.0, 2.0, 3.0]), mesh, [Shard(0)])
        plain: Any = torch.full((2,), 3.0)
        known = plain
        plain += x.sum()  # partial
        plain.mul_(x[0])  # on one rank
        plain /= x.max()
        assert known is plain
        assert plain.tolist() == [3.0, 3.0]
        torch._foreach_mul_([plain], x[1])
        assert plain.tolist() == [6.0, 6.0]

    run_ranks(2, program)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 3.0])
def test_gradients_of_plain_and_distributed_parameters_are_clipped_together(
    norm_type: float,
) -> None:
    def gradients(model: nn.Module, foreach: bool | None) -> list[Any]:
        model.zero_grad()
        x = torch.linspace(-1, 1, 12).view(3, 4).double()
        model(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type, foreach=foreach)
        clipped = [norm, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        return [*clipped, *[p.grad for p in model.parameters()]]

    def model_of() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    plain = model_of()
    expected = {foreach: gradients(plain, foreach) for foreach in (None, False, True)}
    state = plain.state_dict()

    def program(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        model.load_state_dict(state)
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False)})
        for foreach, wanted in expected.items():
            found = gradients(model, foreach)
            assert sum(isinstance(grad, DTensor) for grad in found) in (4, 5)
            for got, want in zip(found, wanted, strict=True):
                value = got.full_tensor() if isinstance(got, DTensor) else got
                assert_close(value, want)

    run_ranks(2, program)


def test_numbers_are_written_to_items_of_plain_tensors() -> None:
    """As a program keeps the losses of its steps, in the graph or not."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.ones(3), mesh, [Shard(0)]).requires_grad_()
        loss: Any = (weight * 2).sum()
        losses = torch.zeros(3)
        losses[1] = loss.detach()
        losses[loss.detach().long() - 4] = 7.0
        assert losses.tolist() == [0, 6, 7]
        kept = torch.zeros(2)
        kept[0] = loss
        kept.sum().backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        assert weight.grad.full_tensor().tolist() == [2, 2, 2]
        with pytest.raises(TypeError, match="would write to a plain tensor"):
            losses[:] = weight.detach()
        assert losses.tolist() == [0, 6, 7]

    run_ranks(2, program)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_torchs_functions_that_copy_or_ask_for_a_number() -> None:
    values = torch.arange(6.0).view(3, 2)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(values, mesh, [Shard(0)])
        copy: Any = torch.tensor(x, dtype=torch.float64)
        copy.add_(1)
        assert torch.equal(copy.full_tensor(), values.double() + 1)
        assert torch.equal(x.full_tensor(), values)
        row: Any = x.new_tensor(x[1])
        assert row.to_local().tolist() == [2, 3]
        assert torch.full((2,), x[1, 1]).tolist() == [3, 3]  # type: ignore[call-overload]
        assert torch.scalar_tensor(x[2, 0]).item() == 4  # type: ignore[arg-type]

    run_ranks(2, program)
