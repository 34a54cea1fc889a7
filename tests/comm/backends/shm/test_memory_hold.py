"""Tensors that get other memory while an operation has the address of theirs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilework.distributed as dist
from tests.tables import each
from tilework.comm.backends.shm import memory_hold
from tilework.comm.backends.shm.memory_hold import HeldMemory, find_storage_layout, fits_storage
from tilework.comm.forms import Operation
from tilework.testing import run_ranks

pytestmark = pytest.mark.skipif(
    not dist.is_backend_available("shm"), reason="the core is not built"
)

BACKENDS = ["threads", "shm", *(["gloo"] if dist.is_backend_available("gloo") else [])]


def words_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def test_this_torch_is_known() -> None:
    assert memory_hold.IS_AVAILABLE
    assert find_storage_layout() is not None


@pytest.mark.parametrize("words", [[0] * 9, [1, 1, 1, 1, 1, 1, 1, 1, 1]])
def test_another_torch_is_left_alone(words: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_hold, "_words_of", lambda storage: words)
    assert find_storage_layout() is None
    monkeypatch.setattr(memory_hold, "IS_AVAILABLE", False)
    assert memory_hold.hold_memory([torch.ones(1)], []) is None
    operation = Operation("all_reduce", [torch.ones(1)], [torch.ones(1)])
    assert memory_hold.hold_operation(operation, False, False) is None


def test_memory_stays_until_the_last_hold_ends() -> None:
    tensor = torch.arange(10_000)
    address, expected = tensor.data_ptr(), tensor.tolist()
    first, second = HeldMemory([tensor, tensor[5:]], []), HeldMemory([tensor], [])
    tensor.resize_(1_000_000)
    third = HeldMemory([tensor], [])  # of the new memory
    first.release()
    first.release()
    others = [torch.zeros(10_000, dtype=torch.int64) for _ in range(8)]
    assert words_at(address, 10_000) == expected
    assert address not in [other.data_ptr() for other in others]
    second.release()
    third.release()
    assert tensor[:10_000].tolist() == expected


def test_released_storages_are_torch_s_again() -> None:
    tensor = torch.ones(100)
    before = memory_hold._words_of(tensor.untyped_storage())
    held = HeldMemory([tensor, tensor.view(10, 10)], [])
    assert memory_hold._words_of(tensor.untyped_storage()) != before
    held.release()
    assert memory_hold._words_of(tensor.untyped_storage()) == before


def test_a_hold_that_is_dropped_ends() -> None:
    tensor = torch.ones(100)
    before = memory_hold._words_of(tensor.untyped_storage())
    held = HeldMemory([tensor], [])
    del held
    assert memory_hold._words_of(tensor.untyped_storage()) == before


def test_memory_outlives_its_storage_s_hold_elsewhere() -> None:
    """It went to another storage, which frees it after the hold's end."""
    tensor, other = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    swap = getattr(tensor.untyped_storage(), "_swap_data_ptr_", None)
    if swap is None:
        pytest.skip("this torch cannot exchange storages' memory")
    held = HeldMemory([tensor], [])
    swap(other.untyped_storage())
    held.release()
    assert other.tolist() == list(range(1000))
    del other
    assert tensor.tolist() == [0] * 1000


def test_memory_that_is_not_torch_s_is_left_alone() -> None:
    tensor = torch.frombuffer(bytearray(80), dtype=torch.float32)
    before = memory_hold._words_of(tensor.untyped_storage())
    held = HeldMemory([tensor, torch.empty(0), torch.empty(3, device="meta")], [])
    assert memory_hold._words_of(tensor.untyped_storage()) == before
    held.release()


@each(
    "make",
    [
        lambda: torch.ones(4),
        lambda: torch.ones(4, 6)[1:, ::2],
        lambda: torch.ones(4).expand(3, 4),
        lambda: torch.ones(4, 0),
    ],
)
def test_fits_storage(make: Callable[[], Tensor]) -> None:
    tensor = make()
    before, is_empty = fits_storage(tensor), tensor.numel() == 0
    tensor.untyped_storage().resize_(4)
    after = fits_storage(tensor)
    del tensor  # nobody may look at it any more, not even a report
    assert (before, after) == (True, is_empty)


def grown(tensor: Tensor) -> None:
    tensor.resize_(1000)


def emptied(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def shared(tensor: Tensor) -> None:
    tensor.share_memory_()  # type: ignore[no-untyped-call]


def replaced(tensor: Tensor) -> None:
    tensor.set_(torch.zeros(5))  # type: ignore[call-overload]


def started(rank: int, tensors: list[Tensor]) -> list[dist.Work]:
    """Operations that read and write tensors, under way."""
    reduced, gathered, given, sent, received = tensors
    works = [
        dist.all_reduce(reduced, async_op=True),
        dist.all_gather(list(gathered.chunk(2)), given, async_op=True),
        dist.isend(sent, 1 - rank),
        dist.irecv(received, 1 - rank),
    ]
    return [work for work in works if work is not None]


@each("change", [grown, emptied, shared, replaced])
@each("backend", BACKENDS)
def test_operations_under_way(backend: str, change: Callable[[Tensor], None]) -> None:
    def program(rank: int) -> list[list[float]]:
        store = dist.get_default_store()
        tensors = [torch.full((n,), rank + 1.0) for n in (100, 200, 100, 100, 100)]
        tensors[4].zero_()
        if rank == 1:
            store.wait(["changed"])
            works = started(rank, tensors)
        else:
            works = started(rank, tensors)
            for tensor in tensors:
                change(tensor)
            store.set("changed", "")
        for work in works:
            work.wait()
        if rank == 0 and change in (emptied, replaced):
            return []  # there is nothing to look at
        reduced, gathered, _, _, received = tensors
        ends = reduced[:100], gathered[:100], gathered[100:200], received[:100]
        return [sorted(set(end.tolist())) for end in ends]

    changed, other = run_ranks(2, program, backend=backend)
    assert other == [[3.0], [1.0], [2.0], [1.0]]
    assert changed in ([], [[3.0], [1.0], [2.0], [2.0]])
