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
from tests.tables import each
from tilework.dtensor import (
    DTensor,
    GatherWarning,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    strict,
)
from tilework.errors import CollectiveMismatchError
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


@pytest.mark.filterwarnings("ignore::tilework.dtensor.GatherWarning")
@each("name", IN_PLACE)
def test_augmented_assignment_writes_to_the_plain_tensor(name: str) -> None:
    """Else what shares its memory would not see what was written."""
    assign = IN_PLACE[name]
    left, right = operands(name)
    expected = assign(left.clone(), right)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        plain = left.clone()
        shows = plain[:]
        result = assign(plain, distribute_tensor(right, mesh, [Shard(0)]))
        if name == "imatmul":  # a new tensor, as torch has it
            assert isinstance(result, DTensor)
            assert_close(result.full_tensor(), expected)
            assert_close(plain, left)
            return
        assert result is plain
        assert_close(shows, expected)

    run_ranks(2, program)


@each("name", REFLECTED)
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
    "masked_fill_": lambda p, x: p.masked_fill_(x > 1, 1.0),
    "masked_scatter_": lambda p, x: p.masked_scatter_(x > 1, x * 2),
    "scatter_add_": lambda p, x: p.scatter_add_(0, (x > 1).long(), x),
    "lerp_": lambda p, x: p.lerp_(x, 0.5),
    "addmm_": lambda p, x: p.addmm_(x, x),
    "view": lambda p, x: p[0].add_(x[0]),
    "named": lambda p, x: torch.Tensor.add_(p, other=x),
    "setitem": lambda p, x: operator.setitem(p, 0, x[0]),
    "setitem with indices": lambda p, x: operator.setitem(p, x > 1, 1.0),
    "setitem with a mask": lambda p, x: operator.setitem(p, torch.tensor([False, True]), x[:1]),
    "augmented setitem": lambda p, x: operator.setitem(p, 1, p[1].__iadd__(x[0])),
    "out=": lambda p, x: torch.add(x, 1, out=p),
    "out= of bools": lambda p, x: torch.gt(x, 1, out=p > 0),
    "out= of several": lambda p, x: torch.sort(x, 0, out=(p, x.long())),
    "out= of another shape": lambda p, x: torch.sum(x, 1, out=p.resize_(0)),
    "foreach": lambda p, x: torch._foreach_add_([p], [x]),
    "foreach, the second": lambda p, x: torch._foreach_add_([x.clone(), p], [x, x]),
    "foreach, the third list": lambda p, x: torch._foreach_addcmul_([p], [p], [x]),
}
PLACES: dict[str, Placement] = {
    "rows": Shard(0),
    "columns": Shard(1),
    "whole": Replicate(),
    "partial": Partial(),
}


@pytest.mark.filterwarnings("ignore::tilework.dtensor.GatherWarning")
@each("name", TARGETS)
def test_values_are_written_to_a_plain_tensor(name: str) -> None:
    values = torch.tensor([[2.0, 1.0], [0.5, 3.0]])
    expected = torch.full((2, 2), 3.0)
    TARGETS[name](expected, values)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement in PLACES.values():
            x = distribute_tensor(values, mesh, [placement])
            plain = torch.full((2, 2), 3.0)
            TARGETS[name](plain, x)
            assert torch.equal(plain, expected)
            assert torch.equal(x.full_tensor(), values)

    run_ranks(2, program)


@pytest.mark.filterwarnings("ignore::tilework.dtensor.GatherWarning")
@each("places", PLACES)
def test_what_is_written_to_a_plain_tensor_has_its_gradient(places: str) -> None:
    """As the outputs of experts are added up in a new tensor."""

    def losses(weight: Any, factor: Any, bias: Any) -> Any:
        summed = torch.zeros(4, 3, dtype=torch.float64)
        for expert in range(2):
            rows = torch.tensor([[0, 2], [2, 3]][expert])
            summed.index_add_(0, rows, weight[rows] * (expert + 2))
        summed[1:3] += weight[:2] * 7
        summed[torch.tensor([True, False, False, True])] = weight[2:] * bias
        # Beside DTensors it is a replicated operand, of which each rank uses a part.
        return (summed * factor).sum() + summed.square().sum()

    generator = torch.Generator().manual_seed(0)
    full = [
        torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2)
    ] + [torch.randn(3, generator=generator, dtype=torch.float64)]  # fmt: skip
    whole = [x.clone().requires_grad_() for x in full]
    losses(*whole).backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        parts = [
            distribute_tensor(x, mesh, [PLACES[places] if x.dim() == 2 else Shard(0)])
            for x in full
        ]  # fmt: skip
        leaves = [part.requires_grad_() for part in parts]
        losses(*leaves).backward()
        for leaf, expected in zip(leaves, whole, strict=True):
            assert leaf.grad is not None
            assert expected.grad is not None
            assert_close(leaf.grad.full_tensor(), expected.grad)

    run_ranks(2, program)


def test_a_write_to_a_plain_tensor_is_warned_of_and_strictly_refused() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        plain = torch.full((2, 2), 3.0)
        x = distribute_tensor(torch.full((2, 2), 2.0), mesh, [Shard(0)])
        for name in ("add_", "setitem with indices", "out=", "foreach"):
            with strict(), pytest.raises(NotImplementedError, match="to a plain tensor"):
                TARGETS[name](plain, x)
        assert plain.tolist() == [[3.0, 3.0]] * 2
        plain.mul_(x.redistribute(placements=[Replicate()]))  # nothing is gathered
        assert plain.tolist() == [[6.0, 6.0]] * 2
        plain.add_(x)
        with strict(), pytest.raises(NotImplementedError, match="to a plain tensor"):
            plain.add_(x)

    with pytest.warns(GatherWarning, match="add_ writes values of DTensors to a plain") as told:
        run_ranks(2, program)
    assert len(told) == 1


@pytest.mark.filterwarnings("ignore::tilework.dtensor.GatherWarning")
@each("name", ["copy_", "index_put_", "setitem", "setitem with a mask", "out="])
def test_plain_tensors_that_are_written_may_hold_anything_before(name: str) -> None:
    """As torch.empty gives them."""

    def program(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (2,))
        plain = torch.full((2, 2), float(rank))
        TARGETS[name](plain, distribute_tensor(torch.full((2, 2), 2.0), mesh, [Shard(0)]))
        return bool((plain > 1).any())

    assert run_ranks(2, program) == [True, True]


def test_plain_tensors_that_differ_are_not_added_to() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        plain = torch.full((2,), float(rank))
        with pytest.raises(CollectiveMismatchError):
            plain.add_(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
        assert plain.tolist() == [rank, rank]

    with pytest.warns(GatherWarning):
        run_ranks(2, program)


def test_draws_that_are_written_to_plain_tensors_are_the_same_on_all_ranks() -> None:
    def program(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2,))
        half = distribute_tensor(torch.full((40,), 0.5), mesh, [Replicate()])
        drawn: list[float] = torch.zeros(40).bernoulli_(half).tolist()
        return drawn

    first, second = run_ranks(2, program)
    assert first == second
    assert 0 < sum(first) < 40


def test_out_takes_what_is_computed_of_plain_tensors() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(3), mesh, [Shard(0)])
        torch.add(torch.ones(3), 1, out=x)
        assert x.full_tensor().tolist() == [2, 2, 2]
        assert x.placements == (Shard(0),)
        empty = distribute_tensor(torch.zeros(0), mesh, [Shard(0)])
        torch.add(x, 1, out=empty)
        assert empty.full_tensor().tolist() == [3, 3, 3]

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


@each("norm_type", [2.0, 1.0, float("inf"), 3.0])
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
