"""Running plans: by which collective, in how much memory, and what happens if all is not well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import tilework.distributed as dist
from tests.comm.transfer.reference import same
from tests.tables import each
from tilework.comm.operations import collectives
from tilework.comm.transfer import run, run_plan
from tilework.errors import CollectiveMismatchError
from tilework.layout import (
    Box,
    Partial,
    Placement,
    Replicate,
    Shard,
    Tile,
    Tiling,
    mesh_tiling,
    plan,
)
from tilework.testing import run_ranks

LIMIT = timedelta(seconds=120)
Shape = tuple[int, ...]


def tiling(shape: Shape, *placements: Placement, ranks: Sequence[Any] = (0, 1)) -> Tiling:
    return mesh_tiling(shape, ranks, placements)


def on(shape: Shape, *ranks: int) -> Tiling:
    """Everything on each of these ranks."""
    return Tiling.of_tiles(shape, [Tile(Box((0,) * len(shape), shape), ranks)])


def counted(shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def tiles_of(whole: Tensor, layout: Tiling, rank: int) -> list[Tensor]:
    return [whole[box.slices].clone() for box in layout.boxes_of(rank)]


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was written, as far as autograd knows."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def moved(source: Tiling, target: Tiling, whole: Tensor, rank: int, **options: Any) -> list[Tensor]:
    """Run the plan on one term's values, and check what comes of it."""
    tiles = tiles_of(whole, source, rank)
    versions = versions_of(tiles)
    results = run_plan(plan(source, target, rank), tiles, dtype=whole.dtype, **options)
    assert versions_of(tiles) == versions, "autograd takes a source for written"
    expected = tiles_of(whole, target, rank)
    assert all(same(a, b) for a, b in zip(results, expected, strict=True))
    return results


# -- by which collective -------------------------------------------------------------------

#: What is called when a plan runs, besides the small all_gather by which ranks agree.
_CALLS = (
    "all_to_all",
    "all_gather",
    "gather",
    "scatter",
    "broadcast",
    "all_reduce",
    "reduce_scatter",
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Which collectives ran, as (rank, name)."""
    found: list[tuple[int, str]] = []
    for name in _CALLS:
        monkeypatch.setattr(collectives, name, _noting(found, name, getattr(collectives, name)))
    return found


def _noting(found: list[tuple[int, str]], name: str, call: Callable[..., Any]) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        found.append((dist.get_rank(), name))
        return call(*args, **kwargs)

    return noting


SHAPE = (6, 4)
ROWS, COLUMNS = tiling(SHAPE, Shard(0)), tiling(SHAPE, Shard(1))
EVERYWHERE, PARTIAL = tiling(SHAPE, Replicate()), tiling(SHAPE, Partial())


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (ROWS, EVERYWHERE, "all_gather"),
        (ROWS, on(SHAPE, 1), "gather"),
        (on(SHAPE, 1), ROWS, "scatter"),
        (on(SHAPE, 1), EVERYWHERE, "broadcast"),
        (on(SHAPE, 1), on(SHAPE, 0), None),
        (tiling(SHAPE, Shard(0, (1, 5))), ROWS, "all_to_all"),
        (PARTIAL, EVERYWHERE, "all_reduce"),
        (PARTIAL, ROWS, "reduce_scatter"),
    ],
)
def test_memory_that_fits_takes_one_collective(
    calls: list[tuple[int, str]], source: Tiling, target: Tiling, expected: str | None
) -> None:
    def program(rank: int) -> None:
        factor = len(source.terms)
        tiles = tiles_of(counted(SHAPE), source, rank)
        results = run_plan(plan(source, target, rank), tiles, dtype=torch.float32, buffer_bytes=1)
        for result, part in zip(results, tiles_of(counted(SHAPE), target, rank), strict=True):
            assert result.equal(part * factor)

    run_ranks(2, program)
    # One call a rank, although the buffer has no room for anything.
    assert sorted(calls) == [(rank, calls[0][1]) for rank in range(2)]
    assert expected in (None, calls[0][1])


@pytest.mark.usefixtures("without_core")  # which reads rows where they are
@pytest.mark.parametrize(("target", "expected"), [(ROWS, "all_to_all"), (EVERYWHERE, "all_gather")])
def test_memory_that_does_not_fit_takes_rounds(
    calls: list[tuple[int, str]], target: Tiling, expected: str
) -> None:
    run_ranks(
        2, lambda rank: moved(COLUMNS, target, counted(SHAPE), rank, buffer_bytes=40) and None
    )
    assert {name for _, name in calls} == {expected}
    assert len(calls) >= 2 * 3


def test_backends_that_hold_copies_take_rounds(
    calls: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist.ProcessGroup, "holds_copies", True)
    run_ranks(2, lambda rank: moved(ROWS, EVERYWHERE, counted(SHAPE), rank) and None)
    assert len(calls) == 2  # there is room for them
    run_ranks(
        2, lambda rank: moved(ROWS, EVERYWHERE, counted(SHAPE), rank, buffer_bytes=40) and None
    )
    assert len(calls) >= 2 * 3


def test_no_memory_for_results_raises_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def program(rank: int) -> None:
        steps, tiles = plan(ROWS, COLUMNS, rank), tiles_of(counted(SHAPE), ROWS, rank)
        blank = torch.empty(6, 2) if rank == 0 else None
        with pytest.raises(RuntimeError, match="can't allocate"):
            run_plan(steps, tiles, out=None if blank is None else [blank])
        assert dist.get_default_group().get_sequence_number_for_group() > 0
        run_plan(steps, tiles, out=[torch.empty(6, 2)])

    monkeypatch.setattr(run, "empty_tensor", full)
    run_ranks(2, program)


def test_output_that_does_not_fit_on_one_rank_takes_rounds_on_all(
    calls: list[tuple[int, str]],
) -> None:
    def program(rank: int) -> None:
        out = torch.zeros(4, 6).t() if rank else torch.zeros(6, 4)
        moved(ROWS, EVERYWHERE, counted(SHAPE), rank, out=[out])

    run_ranks(2, program)
    assert calls


def test_groups_of_ranks_that_do_the_same_take_one_exchange(calls: list[tuple[int, str]]) -> None:
    mesh = ((0, 1), (2, 3))
    rows = tiling(SHAPE, Replicate(), Shard(0), ranks=mesh)
    everywhere = tiling(SHAPE, Replicate(), Replicate(), ranks=mesh)
    run_ranks(4, lambda rank: moved(rows, everywhere, counted(SHAPE), rank) and None)
    assert sorted(calls) == [(rank, "all_to_all") for rank in range(4)]


def test_what_moves_nothing_asks_nobody(calls: list[tuple[int, str]]) -> None:
    """One rank runs it while the other does something else."""
    split = tiling((4,), Shard(0))

    def program(rank: int) -> None:
        if rank == 0:
            (result,) = moved(EVERYWHERE, ROWS, counted(SHAPE), rank)
            assert result.is_contiguous()
            moved(split, split, counted((4,)), rank)

    run_ranks(2, program)
    assert not calls


def test_results_are_new_memory() -> None:
    def program(rank: int) -> None:
        (tile,) = tiles_of(counted(SHAPE), ROWS, rank)
        (result,) = run_plan(plan(ROWS, ROWS, rank), [tile])
        assert result.equal(tile)
        assert result.data_ptr() != tile.data_ptr()

    run_ranks(2, program)


# -- what tensors may be ---------------------------------------------------------------------


def test_out_may_be_views_of_one_tensor() -> None:
    def program(rank: int) -> None:
        whole = torch.full((8, 6), -1.0)
        boxes = COLUMNS.boxes_of(rank)
        moved(ROWS, COLUMNS, counted(SHAPE), rank, out=[whole[1:7, 2 * i : 2 * i + 2] for i in [1]])
        assert len(boxes) == 1
        assert whole[1:7, 2:4].equal(counted(SHAPE)[boxes[0].slices])
        assert bool((whole[0] == -1).all() and (whole[1:7, :2] == -1).all())

    run_ranks(2, program)


def test_conjugated_and_negative_views_are_moved_as_what_they_mean() -> None:
    def program(rank: int) -> None:
        whole = torch.complex(counted(SHAPE), counted(SHAPE) + 1)
        tile = whole[ROWS.boxes_of(rank)[0].slices].conj()
        (result,) = run_plan(plan(ROWS, COLUMNS, rank), [tile])
        assert result.equal(whole.conj().resolve_conj()[COLUMNS.boxes_of(rank)[0].slices])
        imaginary = whole.conj()[ROWS.boxes_of(rank)[0].slices].imag
        (result,) = run_plan(plan(ROWS, COLUMNS, rank), [imaginary])
        assert result.equal(-whole.imag[COLUMNS.boxes_of(rank)[0].slices])

    run_ranks(2, program)


def test_autograd_hears_of_what_is_written() -> None:
    def program(rank: int) -> None:
        (tile,) = tiles_of(counted(SHAPE), ROWS, rank)
        out = torch.zeros(COLUMNS.boxes_of(rank)[0].sizes)
        weight = torch.ones_like(out, requires_grad=True)
        product = weight * out
        (result,) = run_plan(plan(ROWS, COLUMNS, rank), [tile.requires_grad_()], out=[out])
        assert not result.requires_grad
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(product.sum())

    run_ranks(2, program)


def test_inference_tensors() -> None:
    def program(rank: int) -> None:
        with torch.inference_mode():
            out = [torch.zeros(COLUMNS.boxes_of(rank)[0].sizes)]
        moved(ROWS, COLUMNS, counted(SHAPE), rank, out=out)
        with torch.inference_mode():
            moved(ROWS, COLUMNS, counted(SHAPE), rank)

    run_ranks(2, program)


def test_a_rank_without_tiles_is_told_the_dtype() -> None:
    def program(rank: int) -> None:
        results = moved(on(SHAPE, 0), on(SHAPE, 1), counted(SHAPE, torch.int16), rank)
        assert len(results) == (rank == 1)

    run_ranks(3, program)


def test_ranks_of_a_plan_are_global() -> None:
    rows, columns = (tiling(SHAPE, Shard(dim), ranks=(3, 1)) for dim in (0, 1))

    def program(rank: int) -> None:
        group = dist.new_group([1, 3])
        if rank in (1, 3):
            moved(rows, columns, counted(SHAPE), rank, group=group)
        else:
            with pytest.warns(UserWarning, match="does not belong"):
                assert run_plan(plan(rows, columns, rank), [], group) == []

    run_ranks(4, program)


# -- terms ---------------------------------------------------------------------------------


@each("placement", [Replicate(), Shard(0), Shard(1)])
def test_terms_of_16_bits_are_added_in_float32(placement: Placement) -> None:
    """Adding 1 to 256 in bfloat16 changes nothing; adding 1 three times in float32 does."""
    source, target = (tiling(SHAPE, p, ranks=(0, 1, 2, 3)) for p in (Partial(), placement))

    def program(rank: int) -> None:
        tile = torch.full(SHAPE, 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        for result in run_plan(plan(source, target, rank), [tile], dtype=tile.dtype):
            assert bool((result == torch.tensor(259.0, dtype=torch.bfloat16)).all())

    run_ranks(4, program)


def test_terms_are_reduced_in_their_order_whoever_holds_them() -> None:
    """Sums of floats tell orders apart: all of a big number, a small one, minus the big one."""
    numbers = [1e8, 1.0, -1e8]
    box = Box((0,), (4,))
    for owners in ([0, 1, 2], [2, 0, 1], [1, 1, 0]):
        source = Tiling((4,), tuple((Tile(box, (owner,)),) for owner in owners), "sum")
        target = tiling((4,), Replicate(), ranks=(0, 1, 2))
        expected = torch.tensor(numbers[0]) + numbers[1] + numbers[2]

        def program(
            rank: int, source: Tiling = source, target: Tiling = target, expected: Any = expected
        ) -> None:
            held = [torch.full((4,), numbers[source.term_of(i)]) for i in source.of(rank)]
            (result,) = run_plan(plan(source, target, rank), held, dtype=torch.float32)
            assert bool((result == expected).all()), (result, expected)

        run_ranks(3, program)


def test_a_reduction_that_the_dtype_lacks_is_refused() -> None:
    def program(rank: int) -> None:
        tile = torch.zeros(SHAPE, dtype=torch.complex64)
        most = tiling(SHAPE, Partial("max"))
        with pytest.raises(ValueError, match="MAX is not defined for"):
            run_plan(plan(most, EVERYWHERE, rank), [tile])

    run_ranks(2, program)


@each(
    ("op", "other"),
    [("sum", 0), ("product", 1), ("max", -(2**31)), ("min", 2**31 - 1), ("band", -1), ("bor", 0)],
)
def test_a_partial_target_gets_the_value_once(op: str, other: int) -> None:
    target = tiling(SHAPE, Partial(op))

    def program(rank: int) -> None:
        whole = counted(SHAPE, torch.int32)
        (result,) = run_plan(plan(ROWS, target, rank), tiles_of(whole, ROWS, rank))
        assert result.equal(torch.full_like(whole, other) if rank else whole)

    run_ranks(2, program)


def test_all_terms_of_an_average_get_the_value() -> None:
    run_ranks(
        2, lambda rank: moved(ROWS, tiling(SHAPE, Partial("avg")), counted(SHAPE), rank) and None
    )


def test_terms_are_averaged() -> None:
    def program(rank: int) -> None:
        (result,) = run_plan(
            plan(tiling(SHAPE, Partial("avg")), COLUMNS, rank), [torch.full(SHAPE, rank + 1.0)]
        )
        assert result.equal(torch.full_like(result, 1.5))

    run_ranks(2, program)


# -- memory --------------------------------------------------------------------------------


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of tensors that were made in this block, on this thread, at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._live: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_key(value) for value in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if _key(tensor) not in known:
                storage = tensor.untyped_storage()
                alive: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._live[_key(tensor)] = alive, storage.nbytes()
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        self.bytes = max(self.bytes, sum(nbytes for _, nbytes in self._live.values()))
        return result


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        return _tensors(list(values.values()))
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


BIG = (48, 256)
#: For lists of views and the numbers that ranks agree on.
SMALL_THINGS = 1024


@pytest.mark.parametrize(
    ("dtype", "buffer_bytes"), [(torch.float32, 3 << 10), (torch.bfloat16, 16 << 10)]
)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(1), Replicate()),
        (Partial(), Shard(1)),
        (Partial(), Replicate()),
    ],
    ids=str,
)
def test_a_run_holds_its_results_and_one_buffer(
    source: Placement, target: Placement, dtype: torch.dtype, buffer_bytes: int
) -> None:
    before, after = (tiling(BIG, p, ranks=(0, 1, 2)) for p in (source, target))

    def program(rank: int) -> None:
        tiles = [torch.ones(box.sizes, dtype=dtype) for box in before.boxes_of(rank)]
        steps = plan(before, after, rank)
        out = [
            torch.empty(box.sizes, dtype=dtype).t().contiguous().t() for box in after.boxes_of(rank)
        ]
        with Peak() as peak:
            results = run_plan(steps, tiles, buffer_bytes=buffer_bytes, out=out)
        assert peak.bytes <= buffer_bytes + SMALL_THINGS
        assert results[0].sum(dtype=torch.float64) == out[0].numel() * len(before.terms)
        assert peak.bytes > 0

    run_ranks(3, program)


def test_the_measure_of_memory_sees_what_is_held() -> None:
    with Peak() as peak:
        held = torch.empty(1000, dtype=torch.uint8)
        torch.empty(500, dtype=torch.uint8)
        torch.empty(600, dtype=torch.uint8)
        held.view(10, 100)
    assert peak.bytes == 1600


# -- what can be wrong -----------------------------------------------------------------------


def goes_on(rank: int) -> None:
    moved(ROWS, COLUMNS, counted(SHAPE), rank)


def test_different_plans_raise_on_all_ranks() -> None:
    ranks = (0, 1, 2)
    rows, columns = (tiling(SHAPE, Shard(dim), ranks=ranks) for dim in (0, 1))
    everywhere = tiling(SHAPE, Replicate(), ranks=ranks)

    def program(rank: int) -> None:
        steps = plan(rows, everywhere if rank == 1 else columns, rank)
        with pytest.raises(CollectiveMismatchError, match="different plans") as caught:
            run_plan(steps, tiles_of(counted(SHAPE), rows, rank))
        assert caught.value.ranks == (0, 1)
        assert f"rank 1: float32 [6, 4] from {rows.tiles[0].box} on [0]" in str(caught.value)
        moved(rows, columns, counted(SHAPE), rank)

    run_ranks(3, program)


def test_different_dtypes_raise_on_all_ranks() -> None:
    def program(rank: int) -> None:
        dtype = torch.float32 if rank else torch.int32
        with pytest.raises(CollectiveMismatchError, match=r"int32 \[6, 4\][^$]*float32 \[6, 4\]"):
            run_plan(plan(ROWS, COLUMNS, rank), tiles_of(counted(SHAPE, dtype), ROWS, rank))
        goes_on(rank)

    run_ranks(2, program)


def test_a_rank_that_does_something_else_is_named() -> None:
    def program(rank: int) -> None:
        calls: list[Callable[[], object]] = [lambda: goes_on(0), dist.barrier]
        with pytest.raises(CollectiveMismatchError, match="barrier"):
            calls[rank]()

    run_ranks(2, program)


WRONG: dict[str, tuple[Callable[[int], object], str]] = {
    "count": (lambda rank: run_plan(plan(ROWS, COLUMNS, rank), []), "know the dtype"),
    "more": (
        lambda rank: run_plan(plan(ROWS, COLUMNS, rank), [torch.ones(3, 4)] * 2),
        "one tensor for each of the 1 tiles",
    ),
    "shape": (
        lambda rank: run_plan(plan(ROWS, COLUMNS, rank), [torch.ones(4, 3)]),
        r"must have shape \[3, 4\], got \[4, 3\]",
    ),
    "dtype": (
        lambda rank: run_plan(
            plan(ROWS, COLUMNS, rank), [torch.ones(3, 4)], out=[torch.ones(6, 2).int()]
        ),
        r"out\[0\] is torch.int32",
    ),
    "said": (
        lambda rank: run_plan(plan(ROWS, COLUMNS, rank), [torch.ones(3, 4)], dtype=torch.int8),
        "dtype=torch.int8 was given",
    ),
    "overlap": (
        lambda rank: run_plan(
            plan(ROWS, COLUMNS, rank), [torch.ones(3, 4)], out=[torch.ones(6, 1).expand(6, 2)]
        ),
        "share memory",
    ),
    "rank": (
        lambda rank: run_plan(plan(ROWS, COLUMNS, 1 - rank), [torch.ones(3, 4)]),
        "was given a plan made for rank",
    ),
    "tiles": (
        lambda rank: run_plan(plan(ROWS, COLUMNS, rank), ["nonsense"]),  # type: ignore[list-item]
        "must be a torch.Tensor",
    ),
    "plan": (lambda rank: run_plan("plan", []), "must be a tilework.layout.Plan"),  # type: ignore[arg-type]
    "outside": (
        lambda rank: run_plan(
            plan(tiling(SHAPE, Shard(0), ranks=(0, 7)), COLUMNS, rank), [torch.ones(3, 4)]
        ),
        r"ranks \[7\], which are not in group",
    ),
}


@each("name", WRONG)
def test_wrong_arguments_of_one_rank_raise_on_all(name: str) -> None:
    call, words = WRONG[name]

    def program(rank: int) -> None:
        with pytest.raises((ValueError, TypeError), match=words) as caught:
            call(rank) if rank == 1 else goes_on(rank)
        assert rank == 1 or str(caught.value).startswith("rank 1: ")
        goes_on(rank)

    run_ranks(2, program, timeout=LIMIT)


@each("name", WRONG)
def test_wrong_arguments_of_all_ranks(name: str) -> None:
    call, words = WRONG[name]

    def program(rank: int) -> None:
        with pytest.raises((ValueError, TypeError), match=words):
            call(rank)
        goes_on(rank)

    run_ranks(2, program, timeout=LIMIT)
