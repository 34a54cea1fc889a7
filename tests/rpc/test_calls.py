"""Calling functions on other ranks."""

from __future__ import annotations

import multiprocessing
import operator
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.rpc.joined_ranks import Gate, identity, my_name, nothing, only, relay, together, until
from tilework import rpc
from tilework.errors import CollectiveMismatchError, RemoteError, RpcTimeoutError
from tilework.rpc import WorkerInfo
from tilework.testing.ranks import Kind


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_function_runs_where_it_is_sent(kind: Kind) -> None:
    def program(rank: int) -> list[str]:
        return [rpc.rpc_sync(f"w{to}", my_name) for to in range(3)]

    assert together(3, program, kind) == [["w0", "w1", "w2"]] * 3


@pytest.mark.parametrize("to", ["w1", 1, WorkerInfo("w1", 1)])
def test_a_worker_is_a_name_a_rank_or_its_info(to: Any) -> None:
    assert together(2, only(0, lambda: rpc.rpc_sync(to, my_name)))[0] == "w1"


def test_arguments_by_position_and_by_name() -> None:
    def act() -> Any:
        return rpc.rpc_sync("w1", sorted, args=([1, 3, 2],), kwargs={"reverse": True})

    assert together(2, only(0, act))[0] == [3, 2, 1]


def test_a_call_to_oneself_copies_as_well() -> None:
    def act() -> bool:
        mine = [1]
        got = rpc.rpc_sync("w0", identity, args=(mine,))
        return got == mine and got is not mine

    assert together(1, only(0, act)) == [True]


def test_many_calls_at_once_each_get_their_own_answer() -> None:
    def program(rank: int) -> bool:
        futures = [rpc.rpc_async((rank + n) % 3, operator.add, args=(n, rank)) for n in range(300)]
        return [future.wait() for future in futures] == [n + rank for n in range(300)]

    assert together(3, program) == [True] * 3


def test_calls_may_call_on_and_back() -> None:
    def act() -> Any:
        # w0 -> w1 -> w2 -> w0
        return rpc.rpc_sync("w1", relay, args=("w2", relay, "w0", my_name))

    assert together(3, only(0, act))[0] == "w0"


def test_more_calls_may_block_than_threads_are_kept() -> None:
    gate = Gate()
    _gates["many"] = gate

    def program(rank: int) -> Any:
        if rank:
            return None
        futures = [rpc.rpc_async("w1", _pass, args=("many",)) for _ in range(40)]
        gate.reached.wait(120)
        assert rpc.rpc_sync("w1", my_name) == "w1"  # nobody is held up
        gate.open.set()
        return len([future.wait() for future in futures])

    assert together(2, program)[0] == 40


_gates: dict[str, Gate] = {}


def _pass(gate: str) -> None:
    _gates[gate].wait()


def test_functions_run_in_their_ranks_world() -> None:
    def program(rank: int) -> int:
        return rpc.rpc_sync(1 - rank, dist.get_rank)

    assert together(2, program) == [1, 0]


# -- futures ----------------------------------------------------------------------------------


def test_a_future_is_torchs() -> None:
    def act() -> Any:
        first = rpc.rpc_async("w1", operator.add, args=(1, 2))
        assert isinstance(first, torch.futures.Future)
        doubled = first.then(lambda done: done.value() * 2)
        both = torch.futures.collect_all([first, rpc.rpc_async("w1", my_name)])
        results = [future.wait() for future in both.wait()]
        return first.wait(), first.done(), first.value(), doubled.wait(), results

    assert together(2, only(0, act))[0] == (3, True, 3, 6, [3, "w1"])


def test_callbacks_may_block_and_call() -> None:
    def act() -> Any:
        future = rpc.rpc_async("w1", operator.add, args=(1, 2))
        return future.then(
            lambda done: rpc.rpc_sync("w1", operator.neg, args=(done.value(),))
        ).wait()

    assert together(2, only(0, act))[0] == -3


@rpc.functions.async_execution
def _add_through(to: str, a: int, b: int) -> torch.futures.Future[int]:
    return rpc.rpc_async(to, operator.add, args=(a, b)).then(lambda done: done.value() + 100)


@rpc.functions.async_execution
def _no_future() -> int:
    return 1


@rpc.functions.async_execution
def _failing_later() -> torch.futures.Future[int]:
    return rpc.rpc_async("w0", operator.truediv, args=(1, 0))


class Adder:
    @staticmethod
    @rpc.functions.async_execution
    def add(to: str, a: int, b: int) -> torch.futures.Future[int]:
        return _add_through(to, a, b)


def test_async_execution_answers_with_the_futures_value() -> None:
    def act() -> Any:
        return (
            rpc.rpc_sync("w1", _add_through, args=("w0", 1, 2)),
            rpc.rpc_sync("w1", Adder.add, args=("w0", 1, 3)),
            rpc.rpc_async("w1", _add_through, args=("w1", 1, 4)).wait(),
            rpc.remote("w1", _add_through, args=("w0", 1, 5)).to_here(),
        )

    assert together(2, only(0, act))[0] == (103, 104, 105, 106)


def test_async_execution_without_a_future_is_told() -> None:
    def act() -> None:
        with pytest.raises(TypeError, match=r"_no_future is marked .* returned int"):
            rpc.rpc_sync("w1", _no_future)
        with pytest.raises(ZeroDivisionError):
            rpc.rpc_sync("w1", _failing_later)

    together(2, only(0, act))


# -- what goes wrong ----------------------------------------------------------------------------


class Mute(ValueError):
    """An exception without words."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def mute() -> None:
    raise Mute("given")


def test_an_exception_that_has_no_text_crosses() -> None:
    def act() -> Mute:
        with pytest.raises(Mute) as caught:
            rpc.rpc_sync("w1", mute)
        return caught.value

    error = together(2, only(0, act))[0]
    assert error.args == ("given",)
    assert "On worker 'w1'" in str(error.__cause__)


class Awkward(Exception):
    """An exception that pickles and then cannot be built again."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def _fail(make: Callable[..., BaseException], *args: Any) -> None:
    raise make(*args)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, CollectiveMismatchError])
def test_exceptions_come_back_with_their_class_and_traceback(error: type[Exception]) -> None:
    def act() -> None:
        with pytest.raises(error, match="the data is bad") as caught:
            rpc.rpc_sync("w1", _fail, args=(error, "the data is bad"))
        assert type(caught.value) is error
        assert "worker 'w1' (rank 1)" in str(caught.value)
        assert "in _fail" in str(caught.value)
        with pytest.raises(error, match="the data is bad"):
            rpc.rpc_async("w1", _fail, args=(error, "the data is bad")).wait()

    together(2, only(0, act))


def test_exceptions_without_a_message_have_the_traceback_as_their_cause() -> None:
    def act() -> None:
        with pytest.raises(KeyError) as caught:
            rpc.rpc_sync("w1", operator.getitem, args=({}, "x"))
        assert caught.value.args == ("x",)
        assert "worker 'w1'" in str(caught.value.__cause__)

    together(2, only(0, act))


def test_exceptions_that_cannot_be_rebuilt_are_told_in_words() -> None:
    def act() -> None:
        with pytest.raises(RemoteError, match=r"test_calls\.Awkward: 1 and 2"):
            rpc.rpc_sync("w1", _fail, args=(Awkward, 1, 2))

    together(2, only(0, act))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_what_would_end_the_other_rank_ends_neither(error: type[BaseException]) -> None:
    def act() -> Any:
        with pytest.raises(RemoteError, match=error.__name__):
            rpc.rpc_sync("w1", _fail, args=(error, "now"))
        return rpc.rpc_sync("w1", my_name)

    assert together(2, only(0, act))[0] == "w1"


class Stubborn:
    """Pickles, and fails where it arrives."""

    def __reduce__(self) -> Any:
        return _fail, (ValueError, "I stay at home")


def _stubborn() -> Stubborn:
    return Stubborn()


def test_what_cannot_be_pickled_is_told_to_the_caller() -> None:
    def act() -> Any:
        with pytest.raises(TypeError, match="cannot be sent to another rank"):
            rpc.rpc_sync("w1", lambda: 1)
        with pytest.raises(TypeError, match="cannot be sent to another rank"):
            rpc.rpc_async("w1", identity, args=(threading.Lock(),))
        with pytest.raises(TypeError, match="cannot be sent to another rank"):
            rpc.rpc_sync("w1", identity, args=(multiprocessing.Lock(),))
        with pytest.raises(TypeError, match="cannot be sent to another rank"):
            rpc.rpc_sync("w1", threading.Lock)  # the result
        return rpc.rpc_sync("w1", my_name)

    assert together(2, only(0, act))[0] == "w1"


def test_what_cannot_be_unpickled_is_told_to_the_caller() -> None:
    def act() -> Any:
        with pytest.raises(ValueError, match="I stay at home"):
            rpc.rpc_sync("w1", identity, args=(Stubborn(),))
        with pytest.raises(ValueError, match="I stay at home"):
            rpc.rpc_sync("w1", _stubborn)
        with pytest.raises(ValueError, match="I stay at home"):
            rpc.remote("w1", identity, args=(Stubborn(),)).to_here()
        return rpc.rpc_sync("w1", my_name)

    assert together(2, only(0, act))[0] == "w1"


@pytest.mark.parametrize(
    ("to", "error", "text"),
    [
        ("nobody", ValueError, "Invalid worker name 'nobody': the workers are 'w0', 'w1'"),
        (2, ValueError, "Invalid worker rank 2: there are ranks 0 to 1"),
        (-1, ValueError, "Invalid worker rank -1"),
        (WorkerInfo("w1", 0), ValueError, "is not one of the workers"),
        (1.0, TypeError, "a name, a rank or a WorkerInfo"),
    ],
)
def test_unknown_workers(to: Any, error: type[Exception], text: str) -> None:
    def act() -> None:
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(error, match=text):
                call(to, my_name)

    together(2, only(0, act))


def test_what_is_no_function() -> None:
    def act() -> None:
        with pytest.raises(TypeError, match="must be callable, got 'my_name'"):
            rpc.rpc_sync("w1", "my_name")  # type: ignore[arg-type]

    together(2, only(0, act))


# -- time-outs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0.2, timedelta(milliseconds=200)])
def test_a_call_that_takes_too_long_says_what_and_where(timeout: Any) -> None:
    gate = Gate()
    _gates["slow"] = gate

    def act() -> Any:
        calls: list[Callable[[], Any]] = [
            lambda: rpc.rpc_sync("w1", _pass, args=("slow",), timeout=timeout),
            lambda: rpc.rpc_async("w1", _pass, args=("slow",), timeout=timeout).wait(),
            lambda: rpc.remote("w1", _pass, args=("slow",)).to_here(timeout),
        ]
        for call in calls:
            with pytest.raises(RpcTimeoutError, match="RPC ran for more than set timeout") as told:
                call()
            assert "worker 'w1' (rank 1)" in str(told.value)
        gate.open.set()
        return rpc.rpc_sync("w1", my_name)

    assert together(2, only(0, act))[0] == "w1"


def test_the_timeout_names_the_users_line() -> None:
    gate = _gates["line"] = Gate()

    def act() -> str:
        with pytest.raises(RpcTimeoutError) as told:
            rpc.rpc_sync("w1", _pass, args=("line",), timeout=0.05)
        gate.open.set()
        return str(told.value)

    text = together(2, only(0, act))[0]
    assert "_pass on worker 'w1'" in text
    assert "test_calls.py:" in text


def test_the_default_timeout_is_the_options() -> None:
    gate = _gates["default"] = Gate()

    def act() -> float:
        with pytest.raises(RpcTimeoutError, match=r"0\.2 s"):
            rpc.rpc_sync("w1", _pass, args=("default",))
        gate.open.set()
        rpc.rpc_sync("w1", time.sleep, args=(0.3,), timeout=0)  # no limit
        return rpc.get_rpc_timeout()

    def program(rank: int) -> Any:
        return act() if rank == 0 else time.sleep(1)

    assert together(2, program, timeout=0.2)[0] == 0.2


@pytest.mark.parametrize("timeout", [-3, float("nan"), "5", None, True])
def test_what_is_no_timeout(timeout: Any) -> None:
    def act() -> None:
        with pytest.raises((TypeError, ValueError), match="a timeout"):
            rpc.rpc_sync("w1", nothing, timeout=timeout)

    together(2, only(0, act))


def test_a_late_answer_disturbs_nobody() -> None:
    gate = _gates["late"] = Gate()

    def act() -> Any:
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("w1", _pass, args=("late",), timeout=0.02)
        seen = [rpc.rpc_sync("w1", operator.add, args=(n, 1)) for n in range(20)]
        gate.open.set()
        time.sleep(0.05)  # for the answer to come
        return seen + [rpc.rpc_sync("w1", operator.add, args=(n, 1)) for n in range(20)]

    assert together(2, only(0, act))[0] == list(range(1, 21)) * 2


# -- gathering ----------------------------------------------------------------------------------


def test_all_gather_and_barrier() -> None:
    def program(rank: int) -> Any:
        rounds = [rpc.all_gather((rank, n)) for n in range(5)]
        part = rpc.all_gather(torch.tensor(rank), {"w2", "w0"}) if rank != 1 else {}
        rpc.barrier()
        return rounds, {name: int(value) for name, value in part.items()}

    for rank, (rounds, part) in enumerate(together(3, program)):
        assert rounds == [{f"w{r}": (r, n) for r in range(3)} for n in range(5)]
        assert part == ({"w0": 0, "w2": 2} if rank != 1 else {})


def test_a_barrier_waits_for_all() -> None:
    came = []

    def program(rank: int) -> int:
        if rank == 1:
            time.sleep(0.2)
            came.append(rank)
        rpc.barrier()
        return len(came)

    assert together(3, program) == [1, 1, 1]


def test_all_gather_says_who_takes_part() -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match="this worker is not among worker_names"):
            rpc.all_gather(1, {f"w{1 - rank}"})
        with pytest.raises(ValueError, match="Invalid worker name 'x'"):
            rpc.all_gather(1, {"x"})

    together(2, program)


def test_an_object_that_cannot_be_sent_leaves_workers_in_step() -> None:
    def program(rank: int) -> Any:
        if rank == 1:
            with pytest.raises(TypeError, match="cannot be sent"):
                rpc.all_gather(threading.Lock(), timeout=120)
        return [rpc.all_gather((rank, n), timeout=120) for n in range(2)]

    for rounds in together(2, program):
        assert rounds == [{f"w{r}": (r, n) for r in range(2)} for n in range(2)]


def test_who_there_is() -> None:
    def program(rank: int) -> Any:
        assert rpc.get_worker_info() == WorkerInfo(f"w{rank}", rank)
        assert rpc.get_worker_info("w1").id == 1
        return rpc.get_worker_infos(), pickle.loads(pickle.dumps(rpc.get_worker_info()))

    infos = [WorkerInfo("w0", 0), WorkerInfo("w1", 1)]
    assert together(2, program) == [(infos, infos[0]), (infos, infos[1])]


def test_calls_leave_no_threads_behind() -> None:
    before = {thread for thread in threading.enumerate() if thread.name.startswith("rpc ")}
    together(3, lambda rank: [rpc.rpc_sync(to, my_name) for to in range(3)])
    until(lambda: {t for t in threading.enumerate() if t.name.startswith("rpc ")} <= before)
