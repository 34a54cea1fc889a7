"""Arguments of run_ranks; what it does is used by most other tests."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

import tilework.distributed as dist
from tests.tables import each
from tilework.errors import RankFailedError
from tilework.testing import run_ranks


def nothing(rank: int) -> None:
    pass


@each(
    ("arguments", "error", "message"),
    [
        ((0, nothing), ValueError, "at least one rank, got 0"),
        ((nothing, 2), TypeError, r"as in run_ranks\(2, program\): got <function nothing"),
        (("2", nothing), TypeError, "got '2' and"),
    ],
)
def test_arguments_that_cannot_be(
    arguments: tuple[Any, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_ranks(*arguments)


def test_other_kinds_of_ranks() -> None:
    kind: Any = "process"
    with pytest.raises(ValueError, match="'threads' or 'processes', got 'process'"):
        run_ranks(2, nothing, kind=kind)


def test_threads_of_torch_are_set_from_the_first_product_on() -> None:
    x, weight = torch.randn(6, 8), torch.randn(300, 8)

    def program(rank: int) -> bool:
        first = linear(x, weight)
        torch.get_num_threads()
        return torch.equal(first, linear(x, weight))

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert run_ranks(1, program) == [True]
    finally:
        torch.set_num_threads(before)


def test_garbage_of_the_parent_is_not_freed_in_a_forked_rank() -> None:
    freed_in: list[int] = []

    class Garbage:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            freed_in.append(os.getpid())

    def program(rank: int) -> list[int]:
        gc.collect()
        return freed_in

    gc.disable()
    try:
        Garbage()
        assert run_ranks(1, program, kind="processes") == [[]]
    finally:
        gc.enable()
    gc.collect()
    assert freed_in == [os.getpid()]


def test_a_rank_that_dies_while_it_writes_its_result() -> None:
    def program(rank: int) -> None:
        def begin(pipe: int, mode: str) -> None:
            os.write(pipe, bytes(100))
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, "fdopen", begin)  # noqa: B010 - in the forked process only

    with pytest.raises(RankFailedError, match="rank 0 was killed by SIGKILL"):
        run_ranks(1, program, kind="processes")


def test_modes_of_the_program_do_not_see_the_backend_compute() -> None:
    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kw: Any = None
        ) -> Any:
            seen.append(str(function))
            return function(*args, **(kw or {}))

    def program(rank: int) -> None:
        x, strided, part = torch.ones(2), torch.ones(2, 2).t(), torch.ones(1)
        with Seen():  # type: ignore[no-untyped-call]
            dist.all_reduce(strided)
            dist.reduce_scatter_tensor(part, x)
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0)

    seen: list[str] = []
    run_ranks(2, program)
    assert seen == []
