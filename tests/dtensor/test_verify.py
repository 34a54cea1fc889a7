"""Ranks that do not do the same: an error on all of them, never a number; and what is no fault."""

from __future__ import annotations

import http
import math
import operator
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilework.distributed as dist
from tests.dtensor.sharded_values import cut
from tilework.dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    manual_seed,
    verify,
    verifying,
    zeros,
)
from tilework.dtensor.dispatch import call
from tilework.errors import DistError
from tilework.layout import Placement
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks

Program = Callable[[int, DeviceMesh], Any]
X = torch.arange(12.0).view(4, 3)


def outcomes(
    program: Program, ranks: int = 2, kind: str = "threads", shape: tuple[int, ...] = ()
) -> list[Any]:
    """The error of each rank, or its result."""

    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", shape or (ranks,))
        try:
            return program(rank, mesh)
        except (DistError, ValueError) as error:
            return error

    return run_ranks(ranks, run, kind=kind)  # type: ignore[arg-type]


def all_raise(program: Program, match: str = "", ranks: int = 2, kind: str = "threads") -> None:
    found = outcomes(program, ranks, kind)
    assert all(isinstance(each, DistError) for each in found), found
    assert any(match in str(each) for each in found), str(found[0])


def partial_loss(mesh: DeviceMesh) -> Any:
    return (cut(X, mesh, [Shard(0)]) * 0.5).sum()


# -- one rank alone --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_number_on_one_rank_alone(kind: str) -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        loss = partial_loss(mesh)
        if rank == 0:
            print(loss.item())
        return (loss * 2).full_tensor()

    all_raise(program, "item", kind=kind)
    all_raise(program, "print on one", kind=kind)


LONE: dict[str, Callable[[Any], Any]] = {
    "item": lambda loss: loss.item(),
    "float": float,
    "bool": lambda loss: bool(loss > 0),
    "format": lambda loss: f"{loss:.3f}",
    "tolist": lambda loss: loss.tolist(),
    "full_tensor": lambda loss: loss.full_tensor(),
}
THEN: dict[str, Callable[[Any], Any]] = {
    "another value": lambda loss: (loss * 2).full_tensor(),
    "another layout": lambda loss: (loss * 3).redistribute(placements=[Replicate()]),
    "the same kind of number": lambda loss: (loss * 3).item(),
    "a barrier": lambda loss: dist.barrier(),
    "a collective": lambda loss: dist.all_reduce(torch.zeros(())),
    "a draw": lambda loss: torch.rand_like(loss),
}


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("lone", LONE)
def test_whatever_the_others_do(lone: str, then: str) -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        loss = partial_loss(mesh)
        if rank == 0:
            LONE[lone](loss)
        return THEN[then](loss)

    all_raise(program, "print on one")


def test_others_that_have_ended() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        loss = partial_loss(mesh)
        return loss.item() if rank == 0 else None

    started = time.monotonic()
    lone, _ = outcomes(program)
    assert isinstance(lone, DistError)
    assert "call them on every rank of the mesh" in str(lone)
    assert time.monotonic() - started < 30


def test_local_work_on_one_rank_is_no_fault() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x = cut(X, mesh, [Shard(0)])
        weight: Any = distribute_tensor(torch.ones(3, requires_grad=True), mesh, [Replicate()])
        if rank == 0:
            for _ in range(3):
                (x * weight).relu().sum(0)
                zeros(2, device_mesh=mesh) + x.to_local().sum()
            print(x, x.to_local(), x.shape, weight)
        loss = (x * weight).sum()
        loss.backward()
        return loss.item(), weight.grad.full_tensor().tolist()

    assert outcomes(program) == [(66.0, [18.0, 22.0, 26.0])] * 2


def test_lines_do_not_matter() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x = cut(X, mesh, [Shard(0)])
        if rank == 0:
            y = x * 2 + 1
            y = y.sum(dim=0)
        else:
            y = torch.mul(x, 2)
            y = y.add(1)
            y = torch.sum(y, 0)
        return y.full_tensor().tolist()

    assert outcomes(program) == [[40.0, 48.0, 56.0]] * 2


# -- replicated values that part -------------------------------------------------------------


def model_on(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return distribute_module(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), mesh)


@pytest.mark.parametrize("equal_steps", [0, 1, 6, 11])
def test_weights_that_part(equal_steps: int) -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        model = model_on(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(4, 3))  # a smoke test with what all ranks have
        for step in range(equal_steps + 5):
            own = rank if step >= equal_steps else 0
            batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(step * 10 + own))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach() for param in model.parameters()]

    all_raise(program, "is not the same on all ranks")


def test_weights_that_part_after_many_quick_steps() -> None:
    """Ranks agree on when they compare, however long each has taken."""

    def program(rank: int, mesh: DeviceMesh) -> Any:
        weight = distribute_tensor(torch.ones(2), mesh, [Replicate()]).requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.grad = distribute_tensor(torch.ones(2), mesh, [Replicate()])
        for step in range(200):
            if step == 70 and rank:
                weight.to_local().data.add_(1)  # behind the DTensor's back
            optimizer.step()
            if step in (63, 64) and rank:
                time.sleep(0.01)
        return step

    all_raise(program, "is not the same on all ranks")


def test_rows_of_its_own_for_a_module_on_a_mesh_of_two_axes() -> None:
    """The error says what plain inputs count as, and of which modules they count as rows."""

    def program(rank: int, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        model = distribute_module(nn.Linear(3, 2), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(X + rank // 2).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()

    found = outcomes(program, ranks=4, shape=(2, 2))
    assert all(isinstance(each, DistError) for each in found), found
    assert any("as replicated along all axes" in str(each) for each in found), found[0]
    assert any("parallelize_module" in str(each) for each in found), found[0]


def test_another_plain_tensor_at_another_line() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x = cut(X, mesh, [Shard(0)])
        a, b = torch.ones(3), torch.full((3,), 1.0 + rank)
        assert (x * a).full_tensor().equal(X)
        return (x * b).full_tensor()

    all_raise(program, "other data in a plain tensor")


def test_another_number() -> None:
    def scaled(rank: int, mesh: DeviceMesh) -> Any:
        return (cut(X, mesh, [Shard(0)]) * (2.0 + rank)).full_tensor()

    def filled(rank: int, mesh: DeviceMesh) -> Any:
        return cut(X, mesh, [Shard(0)]).fill_(2.0 + rank).full_tensor()

    all_raise(scaled)
    all_raise(filled)


def test_what_is_written_to_a_shard() -> None:
    """Nothing communicates: only the weight's own provenance tells."""

    def program(rank: int, mesh: DeviceMesh) -> Any:
        weight: Any = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).requires_grad_()
        optimizer = torch.optim.AdamW([weight])
        loss: Any = nn.functional.linear(torch.ones(2, 3) + rank, weight).square().sum()
        loss.backward()
        with verifying("off"):
            optimizer.step()
        return weight.full_tensor()

    def sampled(rank: int, mesh: DeviceMesh) -> Any:
        weight: Any = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).requires_grad_()
        optimizer = torch.optim.AdamW([weight])
        loss: Any = nn.functional.linear(torch.ones(2, 3) + rank, weight).square().sum()
        loss.backward()
        optimizer.step()

    all_raise(program)
    all_raise(sampled, "came about differently")


def test_labels_of_a_plain_loss() -> None:
    """The loss is plain: what comes back from it is compared."""

    def program(rank: int, mesh: DeviceMesh) -> Any:
        weight: Any = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).requires_grad_()
        logits: Any = nn.functional.linear(torch.ones(2, 3), weight)
        loss = nn.functional.cross_entropy(logits.full_tensor(), torch.tensor([0, rank]))
        torch.autograd.backward(loss)
        return weight.grad.full_tensor()

    all_raise(program)


def test_local_tensors_that_are_to_be_replicas() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x = DTensor.from_local(torch.full((3,), float(rank)), mesh, [Replicate()])
        return (cut(X, mesh, [Shard(0)]) + x).sum().item()

    all_raise(program)


def test_parts_may_differ() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x: Any = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Shard(0)])
        y = DTensor.from_local(torch.full((4,), float(rank)), mesh, [Partial()])
        return (x + y).full_tensor().tolist()

    assert outcomes(program) == [[1.0, 1.0, 2.0, 2.0]] * 2


def test_a_write_through_a_view() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
        x.view(12)[:].add_(rank)
        return x.full_tensor()

    all_raise(program)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
@pytest.mark.parametrize("through", [Tensor.detach, lambda x: x.data])
def test_a_write_to_what_shares_the_memory(placement: Placement, through: Any) -> None:
    def alias(rank: int, mesh: DeviceMesh) -> Any:
        x = cut(X, mesh, [placement])
        other = through(x)
        if rank:
            other.mul_(2)
        return (x * cut(X, mesh, [Shard(1)])).full_tensor()

    def base(rank: int, mesh: DeviceMesh) -> Any:
        x = cut(X, mesh, [placement])
        other = through(x)
        if rank:
            x.mul_(2)
        return (other * cut(X, mesh, [Shard(1)])).full_tensor()

    all_raise(alias, "full_tensor")
    all_raise(base, "full_tensor")


@pytest.mark.parametrize(
    "numbers",
    [
        *(
            (-1, -2),
            (-1.0, -2.0),
            (0.0, -0.0),
            (0.5, 2.0**60),
            (1.0, 2.0**61),
            (math.inf, 314159.0),
        ),
        *((complex(-1, 2), complex(-2, 2)), (2 - 1j, 2 - 2j), (1j, -1j)),
    ],
)
def test_numbers_that_hash_alike(numbers: tuple[complex, complex]) -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x: Any = cut(X, mesh, [Shard(0)])
        return (x * numbers[rank]).full_tensor()

    all_raise(program)


def test_whole_numbers_that_hash_alike() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x: Any = cut(X.long(), mesh, [Shard(0)])
        return (x + rank * (2**61 - 1)).full_tensor()

    all_raise(program)


#: Writes at a place that is a rank's own, of values that are the same on all.
PLACES: dict[str, Callable[[Any, int], Any]] = {
    "item": lambda x, i: operator.setitem(x, i, 5.0),
    "item of two": lambda x, i: operator.setitem(x, (i, 2), 5.0),
    "item after others": lambda x, i: operator.setitem(x, (..., i), 5.0),
    "item of numpy": lambda x, i: operator.setitem(x, numpy.int64(i), 5.0),
    "slice": lambda x, i: operator.setitem(x, slice(i, i + 2), 5.0),
    "tensor": lambda x, i: operator.setitem(x, i, torch.ones(3)),
    "select": lambda x, i: x.select(0, i).fill_(5.0),
    "unbind": lambda x, i: x.unbind()[i].zero_(),
    "chunk": lambda x, i: x.chunk(2)[i].zero_(),
    "narrow": lambda x, i: x.narrow(0, i, 2).copy_(torch.ones(2, 3)),
    "iterated": lambda x, i: list(x)[i].zero_(),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("how", PLACES)
def test_a_write_to_another_place(how: str, placement: Placement) -> None:
    def program(rank: int, mesh: DeviceMesh, places: tuple[int, int] = (0, 1)) -> Any:
        x = cut(X, mesh, [placement])
        PLACES[how](x, places[rank])
        verify([x])
        return (x[0] * 1).redistribute(placements=[Replicate()]).tolist()

    all_raise(program)
    of_one_place = outcomes(lambda rank, mesh: program(rank, mesh, (1, 1)))
    assert of_one_place[0] == of_one_place[1]
    assert isinstance(of_one_place[0], list), of_one_place


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
def test_a_view_of_what_is_written_elsewhere(placement: Placement) -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x = cut(X, mesh, [placement])
        x[rank] = 5.0
        return (x[0] * 1).sum().item()

    all_raise(program)


class Half(float):
    pass


@pytest.mark.parametrize("kind", [numpy.float64, numpy.float32, numpy.int64, Half, http.HTTPStatus])
def test_numbers_of_other_classes(kind: Any) -> None:
    """numpy's, as a learning rate may be, and subclasses: their values count."""

    def program(rank: int, mesh: DeviceMesh) -> Any:
        number = kind((200, 201)[rank] if kind is http.HTTPStatus else rank)
        x = cut(X, mesh, [Shard(0)])
        return (x * number).sum().item()

    def trained(rank: int, mesh: DeviceMesh) -> Any:
        weight: Any = torch.nn.Parameter(cut(X, mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([weight], lr=kind(201 if kind is http.HTTPStatus else 1))
        if rank == 0:
            optimizer.param_groups[0]["lr"] = kind(200 if kind is http.HTTPStatus else 0)
        weight.sum().backward()
        optimizer.step()

    all_raise(program)
    all_raise(trained)


def test_a_write_to_what_a_view_shows() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
        y: Any = x.view(4, 3, 1)
        if rank == 0:
            x.add_(1)
        return y.full_tensor()

    all_raise(program)


def test_a_write_to_what_a_view_of_a_part_shows() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x = distribute_tensor(torch.zeros(4, 3), mesh, [Replicate()])
        y = x[:2, :2].t()
        if rank == 0:
            x.add_(1)
        return (y.sum() * partial_loss(mesh)).item()

    all_raise(program)


def test_another_function_of_elements() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x: Any = cut(X, mesh, [Shard(0)])
        x.apply_((lambda each: each + 1) if rank else (lambda each: each + 2))
        return x.full_tensor()

    all_raise(program)


def test_uninitialised_memory_that_is_overwritten() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x = DTensor.from_local(torch.full((4,), float(rank)), mesh, [Replicate()])
        x.zero_()
        x.add_(cut(torch.ones(4), mesh, [Replicate()]))
        return x.redistribute(placements=[Shard(0)]).full_tensor().tolist()

    assert outcomes(program) == [[1.0] * 4] * 2


def test_draws_of_other_kinds() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x = cut(X, mesh, [Shard(0)])
        drawn: Any = x.clone().normal_() if rank == 0 else x.clone().uniform_()
        return drawn.full_tensor()

    all_raise(program)


def test_a_rank_that_has_forgotten_its_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks communicate alike whatever each of them has cached."""
    monkeypatch.setattr(call, "_MOST_SHARDINGS", 4)

    def program(rank: int, mesh: DeviceMesh) -> Any:
        x, plain = cut(X, mesh, [Shard(0)]), torch.ones(3)
        for number in range(10 * rank):
            x.reshape(-1, 1, *([1] * number))
        first = (x + plain).sum().item()
        if rank == 1:
            mesh.op_shardings.clear()
            mesh.specs.clear()
        return first, (x + plain).sum().item()

    assert outcomes(program) == [(78.0, 78.0)] * 2


# -- comparing, when asked --------------------------------------------------------------------


def test_verify_names_what_has_parted() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        model: Any = model_on(mesh)
        verify(model)
        verify(dict(model.named_parameters()))
        verify(list(model.parameters()))
        with torch.no_grad():
            model[2].bias.to_local().add_(rank)
        verify(model)

    all_raise(program, "'2.bias' is not the same on all ranks")
    error = str(outcomes(program)[0])
    assert "on rank 0 at " in error
    assert "on rank 1 at " in error
    assert error.count(f"{__file__}:") == 2, error
    with pytest.raises(TypeError, match="got int"):
        verify(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_verify_names_what_one_rank_lacks(shape: tuple[int, ...]) -> None:
    def program(rank: int) -> Any:
        mesh = init_device_mesh("cpu", shape)
        model: Any = model_on(mesh)
        model(torch.ones(2, 3)).sum().backward()
        if rank == 1:
            model[2].bias.grad = None
        with pytest.raises(DistError) as told:
            verify(model)
        return str(told.value)

    for text in run_ranks(torch.Size(shape).numel(), program):
        assert text.startswith("'2.bias.grad' is not the same on all ranks: f32[")
        assert "missing on rank 1 at " in text
        assert "look for" in text


@pytest.mark.parametrize("other", ["distribute_tensor", "init_device_mesh", "manual_seed"])
def test_agreements_of_another_kind(other: str) -> None:
    """What one rank alone agrees on pairs with no agreement on something else."""

    def program(rank: int, mesh: DeviceMesh) -> Any:
        if rank == 0:
            DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        elif other == "distribute_tensor":
            distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        elif other == "manual_seed":
            manual_seed(3, mesh)
        else:
            init_device_mesh("cpu", (2,))

    all_raise(program, "from_local")


def test_verify_sees_how_a_shard_came_about() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        x = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
        if rank == 0:
            x.add_(1)
        verify({"x": x})

    all_raise(program, "'x' is not the same on all ranks")


def test_replicas_along_one_axis_of_two() -> None:
    def program(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2))
        x = cut(torch.zeros(2, 1000), mesh, [Shard(0), Replicate()])
        verify(x)
        x.to_local()[0, 789] = rank // 3
        try:
            verify(x)
        except DistError as error:
            return "an element is 0.0 on rank 2 and 1.0 on rank 3" in str(error)

    assert run_ranks(4, program) == [True] * 4


def test_rounding_is_no_difference() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        verify(DTensor.from_local(torch.ones(4) + rank * 1e-7, mesh, [Partial("avg")]))
        x = distribute_tensor(torch.ones(4), mesh, [Replicate()])
        x.to_local().add_(rank * 1e-6)
        verify(x)

    assert outcomes(program) == [None, None]


def test_off_compares_nothing() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        with verifying("off"):
            x = cut(X, mesh, [Shard(0)]) + torch.full((3,), float(rank))
            return x.full_tensor().sum().item()

    assert outcomes(program) == [72.0, 72.0]


def test_full_looks_at_every_element() -> None:
    def program(rank: int, mesh: DeviceMesh) -> Any:
        plain = torch.zeros(1 << 16)
        plain[12345] = rank
        x = zeros(1 << 16, device_mesh=mesh, placements=[Shard(0)])
        sampled = (x + plain).sum().item()
        with verifying("full"):
            (x + plain).sum().item()
        return sampled

    all_raise(program, "full")


def test_modes_have_names() -> None:
    with pytest.raises(ValueError, match="off, sampled, full"), verifying("some"):  # type: ignore[arg-type]
        pass


# -- programs --------------------------------------------------------------------------------


Step = Callable[[list[Any], Tensor, float], None]


def _join(tensors: list[Any], plain: Tensor, number: float) -> None:
    tensors.append(tensors[-1] + tensors[-2])


def _moved(tensor: Any, placement: Placement) -> Any:
    return tensor.redistribute(placements=[placement] * tensor.device_mesh.ndim)


STEPS: dict[str, Step] = {
    "number": lambda t, p, n: t.append(t[-1] * n),
    "plain": lambda t, p, n: t.append(t[-1] + p),
    "join": _join,
    "in place": lambda t, p, n: t[-1].add_(n),
    "write a view": lambda t, p, n: t[-1].t().mul_(n),
    "move": lambda t, p, n: t.append(_moved(t[-1], Shard(1))),
    "gather": lambda t, p, n: t.append(_moved(t[-1], Replicate())),
    "mean": lambda t, p, n: t.append(t[-1] - t[-1].mean()),
    "draw": lambda t, p, n: t.append(torch.rand_like(t[-1]) + t[-1]),
}
DEVIATIONS = (
    *("other data", "other number", "other seed", "other order"),
    *("skip", "twice", "other branch", "look"),
)


def deviate(how: str, name: str, tensors: list[Any], plain: Tensor) -> None:
    """A step of a program as one rank takes it, and no other."""
    if how == "other data":
        STEPS["plain"](tensors, plain + 1, 2.0)
    elif how == "other number":
        STEPS["number"](tensors, plain, 3.5)
    elif how == "twice":
        STEPS[name](tensors, plain, 2.0)
        STEPS[name](tensors, plain, 2.0)
    elif how == "other seed":
        torch.manual_seed(1)
        STEPS["draw"](tensors, plain, 2.0)
    elif how == "other order":
        STEPS["number"](tensors, plain, 2.0)
        STEPS["plain"](tensors, plain, 2.0)
        STEPS[name](tensors, plain, 2.0)
    elif how == "other branch":
        tensors.append(tensors[-1].abs().sqrt())
    elif how == "look":
        tensors[-1].sum().item()
        STEPS[name](tensors, plain, 2.0)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    st.data(),
)
def test_one_rank_that_deviates(names: list[str], data: st.DataObject) -> None:
    """All raise, or what all observe is what they would have without it.

    Seeds are the mesh's first rank's, of whichever it has: another one there is no fault.
    """
    at = data.draw(st.integers(0, len(names) - 1))
    how = data.draw(st.sampled_from(DEVIATIONS))
    shape = data.draw(st.sampled_from([(2,), (2,), (2, 2)]))
    each_axis: Any = st.sampled_from([Shard(0), Replicate()])
    placements = data.draw(st.lists(each_axis, min_size=len(shape), max_size=len(shape)))
    deviant = data.draw(st.integers(0, math.prod(shape) - 1))

    def run(who: Collection[int]) -> list[Any]:
        def program(rank: int, mesh: DeviceMesh) -> Any:
            torch.manual_seed(0)
            plain = torch.ones(3)
            tensors: list[Any] = [
                distribute_tensor(X.clone(), mesh, placements),
                distribute_tensor(X + 1, mesh, placements),
            ]
            for number, name in enumerate(names):
                if number == at and rank in who:
                    deviate(how, name, tensors, plain)
                else:
                    STEPS[name](tensors, plain, 2.0)
            # Each rank's last tensor reaches a collective, along all axes.
            found = tensors[-1].sum(0).redistribute(placements=[Shard(0)] * mesh.ndim).full_tensor()
            dist.barrier()  # and whoever has a value learns that another has none
            return found.tolist()

        return outcomes(program, shape=shape, ranks=math.prod(shape))

    found = run([deviant])
    if not all(isinstance(each, DistError) for each in found):
        alike = how == "other seed" and deviant == 0
        assert found == run(range(math.prod(shape)) if alike else []), (how, names)


def test_the_same_programs_without_deviation() -> None:
    @settings(max_examples=25)
    @given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=7))
    def right(names: list[str]) -> None:
        def program(rank: int, mesh: DeviceMesh) -> Any:
            torch.manual_seed(0)
            tensors: list[Any] = [cut(X, mesh, [Shard(0)]), cut(X + 1, mesh, [Shard(0)])]
            for name in names:
                STEPS[name](tensors, torch.ones(3), 2.0)
            return tensors[-1].sum().item()

        first, second = outcomes(program)
        assert first == second, names

    right()
