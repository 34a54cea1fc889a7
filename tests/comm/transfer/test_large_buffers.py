"""Memory of large results: used again, never while somebody has it, and not kept without bound."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.tables import each
from tilework.comm.transfer import large_buffers as module
from tilework.comm.transfer.large_buffers import KEPT_BYTES, LARGE_BYTES, empty_tensor

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    module._free.clear()
    yield
    module._free.clear()


def megabytes(n: int) -> Tensor:
    return empty_tensor((n, MIB), torch.uint8, CPU)


def kept() -> int:
    return sum(len(block) for block in module._free)


def test_a_tensor_like_any_other() -> None:
    tensor = empty_tensor((3, 2, LARGE_BYTES), torch.bfloat16, CPU)
    assert (tensor.shape, tensor.dtype) == ((3, 2, LARGE_BYTES), torch.bfloat16)
    assert tensor.is_contiguous()
    tensor.fill_(2).requires_grad_().sum().backward()  # type: ignore[no-untyped-call]
    assert tensor.grad is not None
    assert bool((tensor.grad == 1).all())


@each("sizes", [(), (0,), (3, 0, LARGE_BYTES), (7,)])
def test_small_ones_are_torchs_own(sizes: tuple[int, ...]) -> None:
    tensor = empty_tensor(sizes, torch.float32, CPU)
    assert tensor.shape == sizes
    assert tensor.untyped_storage().resizable()
    assert empty_tensor((LARGE_BYTES,), torch.uint8, torch.device("meta")).is_meta


def test_memory_is_used_again_when_nobody_has_it() -> None:
    first = megabytes(8)
    place, view = first.data_ptr(), first[2:4]
    del first
    other = megabytes(8)
    assert other.data_ptr() != place  # a view has it still
    view.fill_(7)
    other.fill_(1)
    assert bool((view == 7).all())
    del view
    again = megabytes(7)
    assert again.data_ptr() == place
    assert kept() == 0


def test_what_does_not_suit_is_dropped() -> None:
    tensors = [megabytes(n) for n in (8, 16)]
    tensors.clear()
    assert kept() > 24 * MIB
    assert megabytes(9).shape == (9, MIB)
    gc.collect()
    assert kept() == 12 * MIB  # the last one, with room to begin and end at huge pages


def test_what_is_kept_is_bounded() -> None:
    tensors = [megabytes(10) for _ in range(20)]
    tensors.clear()
    assert KEPT_BYTES // 2 < kept() <= KEPT_BYTES
    huge = empty_tensor((2, KEPT_BYTES), torch.uint8, CPU)
    del huge
    assert kept() == 0


def test_many_threads() -> None:
    def work(number: int) -> None:
        for _ in range(50):
            tensor = megabytes(4)
            tensor.fill_(number)
            assert bool((tensor == number).all())

    failures: list[object] = []
    hook, threading.excepthook = threading.excepthook, failures.append
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = hook
    assert not failures


def test_a_forked_child_has_its_own() -> None:
    tensor = megabytes(4).fill_(1)
    child = os.fork()
    if not child:
        tensor[0, 0] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert tensor[0, 0] == 1
