"""Public operations as objects of the core: the function in all respects but time."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import FunctionType
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.tables import each
from tilework.testing import run_ranks

LIMIT = timedelta(seconds=120)
OPERATIONS: list[Callable[..., Any]] = [
    *(dist.all_reduce, dist.reduce, dist.broadcast, dist.all_gather, dist.all_gather_into_tensor),
    *(dist.gather, dist.scatter, dist.reduce_scatter, dist.reduce_scatter_tensor),
    *(dist.all_to_all, dist.all_to_all_single, dist.barrier, dist.send, dist.recv),
]
needs_core = pytest.mark.skipif(type(dist.barrier) is FunctionType, reason="there is no core")
needs_exchange_table = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this torch has no table by which the core reads tensors",
)


def on_shm(size: int, program: Callable[[int], Any]) -> list[Any]:
    return run_ranks(size, program, kind="threads", backend="shm", timeout=LIMIT)


@each("operation", OPERATIONS)
def test_it_looks_like_the_function(operation: Any) -> None:
    function = inspect.unwrap(operation)
    assert inspect.isfunction(operation)
    assert inspect.isroutine(operation)
    assert type(function) is FunctionType
    assert inspect.signature(operation) == inspect.signature(function)
    assert (operation.__doc__, operation.__name__) == (function.__doc__, function.__name__)
    assert (operation.__module__, repr(operation)) == (function.__module__, repr(function))
    assert inspect.getsource(operation) == inspect.getsource(function)
    assert pickle.loads(pickle.dumps(operation)) is operation
    assert copy.deepcopy(operation) is operation


def test_attributes_are_the_functions() -> None:
    function: Any = dist.barrier
    function.noted = 1
    assert inspect.unwrap(function).noted == 1
    del function.noted
    with pytest.raises(AttributeError, match="noted"):
        _ = function.noted


def test_in_a_class_it_is_a_method() -> None:
    class Holder:
        act = dist.barrier

    holder: Any = Holder()
    assert holder.act.__self__ is holder
    assert Holder.act is dist.barrier


def every_way(rank: int, group: Any) -> list[Any]:
    """Results of all operations, with arguments by position, by name, and by default."""
    x, two = torch.full((2,), rank + 1.0), [torch.full((1,), rank + float(r)) for r in range(2)]
    four, one, both = torch.zeros(4), torch.zeros(1), [torch.zeros(2), torch.zeros(2)]
    y, mine = torch.zeros(2), rank == 1
    results: list[Any] = [dist.barrier(), dist.barrier(group), dist.barrier(group=group)]
    results += [dist.all_reduce(x), dist.all_reduce(x, dist.ReduceOp.MAX, group=group)]
    results += [dist.reduce(x, 1), dist.reduce(x, op=dist.ReduceOp.MIN, dst=0, group=group)]
    results += [dist.reduce(tensor=x, group_dst=1, group=group)]
    results += [dist.broadcast(x, 1), dist.broadcast(x, group_src=0, group=group)]
    results += [dist.all_gather(both, x), dist.all_gather_into_tensor(four, input_tensor=x)]
    results += [dist.gather(x, None if mine else both), dist.scatter(one, two if mine else None, 1)]
    results += [dist.reduce_scatter(one, two), dist.reduce_scatter_tensor(one, x, group=group)]
    results += [dist.all_to_all(two, [one, one + 1], group), dist.all_to_all_single(y, x)]
    results += [dist.all_to_all_single(y, x, [1, 1], input_split_sizes=[1, 1])]
    if rank == 0:
        results += [dist.send(x, 1), dist.send(x, group_dst=1, tag=7, group=group)]
    else:
        results += [dist.recv(y), dist.recv(y, group=group, group_src=0, tag=7)]
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in results] + [
        each.tolist() for each in (x, four, one, y, *both, *two)
    ]


def test_it_does_what_the_function_does() -> None:
    def program(rank: int) -> tuple[list[Any], list[Any]]:
        group = dist.new_group([0, 1])
        fast = every_way(rank, group)
        sys.setprofile(lambda *_: None)  # of this thread: then the functions run
        try:
            return fast, every_way(rank, group)
        finally:
            sys.setprofile(None)

    for fast, slow in on_shm(2, program):
        assert fast == slow


def without_functions(patch: pytest.MonkeyPatch) -> None:
    """Leave nothing of the Python functions: whatever reaches them raises."""
    for operation in OPERATIONS:
        patch.setattr(inspect.unwrap(operation), "__code__", (lambda *_, **__: 1 / 0).__code__)


@needs_exchange_table
def test_the_core_takes_the_usual_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = threading.Barrier(2)

    def program(rank: int) -> int:
        group = dist.new_group([0, 1])
        if ready.wait(120) == 0:
            without_functions(monkeypatch)
        ready.wait(120)
        return len(every_way(rank, group))

    assert min(on_shm(2, program)) > 20


@needs_exchange_table
def test_the_call_site_is_the_programs() -> None:
    def program(rank: int) -> str:
        dist.all_reduce(torch.ones(1))
        return dist.get_default_group().flight_entries()[-1].site

    sites = on_shm(2, program)
    line = inspect.getsourcelines(program)[1] + 1
    assert all(site == f"{__file__}:{line} in program" for site in sites)


@needs_core
def test_the_function_has_the_other_calls() -> None:
    class Sub(torch.Tensor):
        pass

    def program(rank: int) -> None:
        x = torch.ones(2)
        with pytest.raises(TypeError, match=r"all_reduce\(\) got an unexpected keyword"):
            dist.all_reduce(x, colour=1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="multiple values"):
            dist.all_reduce(x, tensor=x)  # type: ignore[misc]
        with pytest.raises(TypeError, match="missing 1 required"):
            dist.all_reduce()  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="positional arguments"):
            dist.barrier(None, False, None, None)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"must be a torch\.Tensor"):
            dist.all_reduce(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="group must be a process group"):
            dist.barrier(5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not both"):
            dist.broadcast(x, 0, group_src=0)
        with pytest.raises(ValueError, match=r"give src \(a global rank\)"):
            dist.broadcast(x)
        with pytest.raises(ValueError, match="not part of"):
            dist.broadcast(x, 2**80)
        with pytest.raises(ValueError, match="is this rank itself"):
            dist.send(x, rank)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        assert work.wait()
        assert x.tolist() == [2, 2]
        dist.all_reduce(sub := torch.ones(1).as_subclass(Sub))
        dist.barrier(None, False, [0])
        with dist.coalescing_manager():
            dist.all_reduce(x)
        assert (sub.item(), x.tolist()) == (2, [4, 4])
        another_string: dict[str, Any] = {"".join(("gr", "oup")): None}
        assert dist.barrier(**another_string) is None

    on_shm(2, program)


def test_without_a_group_it_says_so() -> None:
    with pytest.raises(ValueError, match="has not been initialized"):
        dist.barrier()


def test_outside_the_group_it_warns() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([0])
        if rank == 1:
            with pytest.warns(UserWarning, match="does not belong") as caught:
                dist.barrier(group)
            assert caught[0].filename == __file__

    on_shm(2, program)
