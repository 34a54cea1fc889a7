"""Small collectives that become one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilework.distributed as dist
from tests.capture.twins import same_bits
from tilework.capture import capture
from tilework.capture.program import merging
from tilework.comm.backends.native import NativeGroup
from tilework.comm.capabilities import Capability
from tilework.testing import run_ranks

# On the core's fast path several calls cost less than one with its copies.
pytestmark = pytest.mark.usefixtures("without_core")


def noise(rank: int, call: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9 * call + rank))


def collectives_of(
    step: Any, *shapes: tuple[int, ...], ranks: int = 2, kind: Any = "threads"
) -> Any:
    """The collectives of a captured step, which gives the same bits as the step."""

    def program(rank: int) -> list[str]:
        fast = capture(step)
        for call in range(5):
            args = [noise(rank, call, *shape) for shape in shapes]
            copies = [each.clone() for each in args]
            results = zip([*step(*args), *args], [*fast(*copies), *copies], strict=True)
            assert all(same_bits(*pair) for pair in results)
        (record,) = fast.records
        names = [each.name for each in record.graph.instructions if each.kind == "collective"]
        return names

    return run_ranks(ranks, program, kind=kind)[0]


def reduces(*tensors: Tensor) -> Any:
    for each in tensors:
        dist.all_reduce(each)
        each.mul_(0.3)
    return [each + 1 for each in tensors]


@pytest.mark.parametrize("ranks", [2, 3])
def test_independent_all_reduces_become_one(ranks: int) -> None:
    assert len(collectives_of(reduces, (3,), (2, 5), (), (0, 2), ranks=ranks)) == 1


def test_a_collective_that_needs_another_stays() -> None:
    def step(x: Tensor, y: Tensor) -> Any:
        dist.all_reduce(x)
        y.add_(x.sum())
        dist.all_reduce(y)
        return x, y

    assert len(collectives_of(step, (3,), (4,))) == 2


def test_tensors_in_one_memory_stay_apart() -> None:
    def step(x: Tensor) -> Any:
        dist.all_reduce(x[:3])
        dist.all_reduce(x[2:])
        return [x * 2]

    assert len(collectives_of(step, (5,))) == 2


def test_other_reductions_and_dtypes_stay_apart() -> None:
    def step(x: Tensor, y: Tensor, z: Tensor) -> Any:
        z = z.double()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.all_reduce(y)
        dist.all_reduce(z)
        return x, y, z

    assert len(collectives_of(step, (3,), (3,), (3,))) == 3


def test_a_collective_on_one_rank_needs_another() -> None:
    """Ranks have unlike local operators; they merge alike."""

    def step(x: Tensor, y: Tensor, z: Tensor) -> Any:
        dist.all_reduce(x)
        if dist.get_rank():
            y.add_(x)
        dist.all_reduce(y)
        dist.all_reduce(z)
        return x, y, z

    assert len(collectives_of(step, (3,), (3,), (3,))) == 2


def test_large_tensors_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "SMALL_BYTES", 40)
    assert len(collectives_of(reduces, (5,), (5,), (5,), (11,))) == 3


def test_a_group_with_a_fast_path_merges_nothing() -> None:
    assert len(collectives_of(reduces, (3,), (4,), kind="processes")) == 2


def test_a_group_whose_bits_depend_on_the_size_merges_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NativeGroup, "lacks", frozenset({Capability.SAME_BITS}), raising=False)
    assert len(collectives_of(reduces, (3,), (4,))) == 2


def test_batches_of_several_sizes_share_a_program() -> None:
    def program(rank: int) -> int:
        fast = capture(reduces)
        for size in (3, 3, 5, 5, 4, 5):
            fast(noise(rank, size, size), noise(rank, size, 2, size))
        return len(fast.records)

    assert run_ranks(2, program) == [1, 1]
