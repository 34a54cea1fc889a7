"""References to values on other ranks."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from tests.rpc.joined_ranks import Gate, identity, join, only, relay, together, until
from tilework import rpc
from tilework.errors import RpcTimeoutError
from tilework.rpc import RRef, WorkerInfo
from tilework.rpc.rref import current_agent
from tilework.testing import run_ranks
from tilework.testing.ranks import Kind


class Counter:
    """A value with methods."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int, *, times: int = 1) -> int:
        self.value += amount * times
        return self.value

    @rpc.functions.async_execution
    def add_later(self, amount: int) -> torch.futures.Future[int]:
        return rpc.rpc_async("w0", operator.add, args=(self.value, amount))

    @rpc.functions.async_execution
    def add_at_once(self, amount: int) -> int:
        return self.value + amount

    def fail(self) -> None:
        raise ValueError("the counter is broken")


def owned() -> int:
    """How many values of this rank others refer to."""
    return current_agent().references.sizes[0]


def held() -> int:
    """How many values of others this rank refers to."""
    return current_agent().references.sizes[1]


def nothing_is_held() -> bool:
    return (owned(), held()) == (0, 0)


def collected_everywhere(rank: int) -> bool:
    """Wait, together, until no rank refers to anything."""
    gc.collect()
    rpc.barrier()
    until(nothing_is_held)
    rpc.barrier()
    return True


# -- what a reference says ------------------------------------------------------------------------


def test_a_local_value() -> None:
    def act() -> None:
        value = object()
        rref = RRef(value)
        assert rref.is_owner()
        assert rref.confirmed_by_owner()
        assert rref.owner() == WorkerInfo("w0", 0)
        assert rref.owner_name() == "w0"
        assert rref.local_value() is value
        assert rref.to_here() is value
        assert "w0" in repr(rref)

    together(1, only(0, act))


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_remote_value(kind: Kind) -> None:
    def act() -> None:
        rref = rpc.remote("w1", operator.add, args=(torch.ones(2), 1))
        assert not rref.is_owner()
        assert rref.owner() == WorkerInfo("w1", 1)
        assert rref.owner_name() == "w1"
        assert rref.to_here().tolist() == [2.0, 2.0]
        until(rref.confirmed_by_owner)
        with pytest.raises(RuntimeError, match="is on 'w1', not here"):
            rref.local_value()

    together(2, only(0, act), kind)


def test_remote_to_oneself_is_local() -> None:
    def act() -> Any:
        rref = rpc.remote("w0", operator.add, args=(1, 2))
        assert rref.is_owner()
        return rref.to_here(), rref.local_value()

    assert together(1, only(0, act)) == [(3, 3)]


def test_what_a_remote_function_raised_is_raised_where_it_is_wanted() -> None:
    def act() -> None:
        rref = rpc.remote("w1", operator.truediv, args=(1, 0))
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                rref.to_here()
        with pytest.raises(ZeroDivisionError):
            rpc.rpc_sync("w1", _local, args=(rref,))
        with pytest.raises(ZeroDivisionError):
            rpc.remote("w0", operator.truediv, args=(1, 0)).local_value()
        with pytest.raises(TypeError, match="cannot be sent"):
            rpc.remote("w1", identity, args=(threading.Lock(),))
        with pytest.raises(TypeError, match="cannot be sent"):
            rpc.remote("w1", threading.Lock).to_here()

    together(2, only(0, act))


def _local(rref: RRef[Any]) -> Any:
    return rref.local_value()


_gates: dict[str, Gate] = {}


def _gated(name: str, value: Any) -> Any:
    _gates[name].wait()
    return value


def test_to_here_waits_for_the_value_within_its_timeout() -> None:
    gate = _gates["value"] = Gate()

    def act() -> Any:
        rref = rpc.remote("w1", _gated, args=("value", 5))
        with pytest.raises(RpcTimeoutError, match=r"0\.1 s"):
            rref.to_here(timeout=0.1)
        threading.Timer(0.1, gate.open.set).start()
        return rref.to_here(), rpc.rpc_sync("w1", _local, args=(rref,))

    assert together(2, only(0, act))[0] == (5, 5)


def test_methods_are_called_where_the_value_is() -> None:
    def act() -> Any:
        counter = rpc.remote("w1", Counter, args=(10,))
        assert counter.rpc_sync().add(1) == 11
        assert counter.rpc_async().add(1, times=4).wait() == 15
        doubled = counter.remote().add(15)
        assert doubled.owner_name() == "w1"
        assert doubled.to_here() == 30
        assert counter.rpc_sync().add_later(12) == 42
        assert counter.remote().add_later(13).to_here() == 43
        with pytest.raises(ValueError, match="the counter is broken"):
            counter.rpc_sync().fail()
        with pytest.raises(AttributeError, match="no_such_method"):
            counter.rpc_sync().no_such_method()
        here = RRef(Counter(1))
        return here.rpc_sync().add(1), here.local_value().value

    assert together(2, only(0, act))[0] == (2, 2)


def test_an_asynchronous_method_without_a_future_is_told() -> None:
    def act() -> None:
        counter = rpc.remote("w1", Counter)
        with pytest.raises(TypeError, match=r"add_at_once is marked .* returned int"):
            counter.rpc_sync(timeout=60).add_at_once(1)
        with pytest.raises(TypeError, match=r"add_at_once is marked .* returned int"):
            counter.remote(timeout=60).add_at_once(1).to_here()

    together(2, only(0, act))


def test_the_proxys_timeout_counts() -> None:
    gate = _gates["proxy"] = Gate()

    def act() -> None:
        rref = rpc.remote("w1", _Sleeper)
        with pytest.raises(RpcTimeoutError, match=r"0\.05 s"):
            rref.rpc_sync(timeout=0.05).sleep()
        gate.open.set()

    together(2, only(0, act))


class _Sleeper:
    def sleep(self) -> None:
        _gates["proxy"].wait()


# -- references in messages ---------------------------------------------------------------------


def _is_mine(rref: RRef[Any]) -> tuple[bool, str]:
    return rref.is_owner(), rref.owner_name()


def test_a_reference_becomes_one_where_it_arrives() -> None:
    def act() -> Any:
        mine, theirs = RRef("mine"), rpc.remote("w1", str, args=("theirs",))
        back = rpc.rpc_sync("w1", identity, args=({"a": [mine, theirs]},))["a"]
        assert back[0].local_value() == "mine"
        assert back[1].to_here() == "theirs"
        return (
            rpc.rpc_sync("w1", _is_mine, args=(mine,)),
            rpc.rpc_sync("w1", _is_mine, args=(theirs,)),
            rpc.rpc_sync("w2", _is_mine, args=(theirs,)),
            rpc.rpc_sync("w2", relay, args=("w0", _to_here, mine)),
            rpc.rpc_sync("w2", _to_here, args=(theirs,)),
        )

    expected = ((False, "w0"), (True, "w1"), (False, "w1"), "mine", "theirs")
    assert together(3, only(0, act))[0] == expected


def _to_here(rref: RRef[Any]) -> Any:
    return rref.to_here()


def test_shards_are_registered_with_all_ranks() -> None:
    """What sharded tensors do: every rank tells every other of its parts."""
    kept: dict[tuple[int, int], list[RRef[Any]]] = {}

    def program(rank: int) -> list[float]:
        mine = [RRef(torch.full((3,), 10.0 * rank + n)) for n in range(2)]
        told = [rpc.rpc_async(to, _register, args=(mine, rank)) for to in range(3)]
        _registered[rank] = kept
        for future in told:
            future.wait()
        rpc.barrier()
        seen = [
            float(rref.to_here()[0])
            for owner in range(3)
            for rref in kept[rank, owner]
            if rref.owner().id == owner
        ]
        rpc.barrier()
        for owner in range(3):
            del kept[rank, owner]
        del told, mine
        collected_everywhere(rank)
        return seen

    for rank in range(3):
        _registered[rank] = kept
    assert together(3, program) == [[0.0, 1.0, 10.0, 11.0, 20.0, 21.0]] * 3


_registered: dict[int, dict[tuple[int, int], list[RRef[Any]]]] = {}


def _register(rrefs: list[RRef[Any]], owner: int) -> None:
    me = rpc.get_worker_info().id
    _registered[me][me, owner] = rrefs


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
def test_a_reference_is_not_copied_behind_rpcs_back(act: Callable[[Any], Any]) -> None:
    def program(rank: int) -> None:
        with pytest.raises(RuntimeError, match="can only be pickled as part of an RPC"):
            act(RRef(1))

    together(1, program)


def test_a_reference_of_an_earlier_rpc_is_refused() -> None:
    def program(rank: int) -> None:
        join(rank)
        rref = RRef(1)
        theirs = rpc.remote(1 - rank, str)
        rpc.shutdown()
        assert rref.local_value() == 1
        with pytest.raises(RuntimeError, match="shut down"):
            theirs.to_here()
        join(rank)
        with pytest.raises(ValueError, match="of an RPC that was shut down"):
            rpc.rpc_sync(1 - rank, identity, args=(rref,))
        rpc.shutdown()

    run_ranks(2, program)


# -- how long values live -----------------------------------------------------------------------


class Value:
    """Something whose end can be observed."""

    alive: ClassVar[weakref.WeakSet[Value]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.more: Any = None
        Value.alive.add(self)


def test_a_value_lives_as_long_as_a_remote_reference() -> None:
    def act() -> None:
        rref = rpc.remote("w1", Value)
        other = rpc.rpc_sync("w2", identity, args=(rref,))
        until(rref.confirmed_by_owner)
        assert rpc.rpc_sync("w1", owned) == 1
        del rref
        time.sleep(0.05)
        assert rpc.rpc_sync("w1", owned) == 1
        assert len(Value.alive) == 1
        del other
        until(lambda: not len(Value.alive))
        assert rpc.rpc_sync("w1", owned) == 0

    together(3, only(0, act))


_kept: list[Any] = []


def _keep(rref: RRef[Any]) -> None:
    _kept.append(rref)


def test_a_holder_may_be_the_last_and_not_the_one_who_made_it() -> None:
    def act() -> None:
        rref = rpc.remote("w1", Value)
        rpc.rpc_sync("w2", _keep, args=(rref,))
        until(lambda: len(Value.alive) == 1)  # remote() does not wait for the value
        del rref
        time.sleep(0.05)
        assert len(Value.alive) == 1
        assert _kept[0].owner_name() == "w1"
        _kept.clear()
        until(lambda: not len(Value.alive))

    together(3, only(0, act))


def test_the_owners_own_reference_keeps_the_value_too() -> None:
    def act() -> None:
        rref = RRef(Value())
        rpc.rpc_sync("w1", identity, args=(rref,))
        until(nothing_is_held)
        assert len(Value.alive) == 1
        del rref
        until(lambda: not len(Value.alive))

    together(2, only(0, act))


def test_cycles_through_a_reference_are_collected() -> None:
    def act() -> None:
        rref = RRef(Value())
        rref.local_value().more = rref
        rpc.rpc_sync("w1", identity, args=(rref,))
        until(nothing_is_held)
        del rref
        until(lambda: gc.collect() >= 0 and not len(Value.alive))

    together(2, only(0, act))


def test_a_cycle_that_holds_a_remote_reference_is_collected() -> None:
    def act() -> None:
        node: dict[str, Any] = {"there": rpc.remote("w1", Value)}
        node["self"] = node
        node["there"].rpc_sync().__str__()
        del node
        gc.collect()
        until(lambda: not len(Value.alive))

    together(2, only(0, act))


class Talkative:
    """Calls others as it goes."""

    said: ClassVar[list[str]] = []

    def __del__(self) -> None:
        Talkative.said.append(rpc.rpc_sync("w0", str, args=("farewell",)))


def test_values_may_call_others_as_they_go() -> None:
    def act() -> None:
        rref = rpc.remote("w1", Talkative)
        until(rref.confirmed_by_owner)
        del rref
        until(lambda: Talkative.said == ["farewell"])

    together(2, only(0, act))


def test_failed_calls_hold_nothing() -> None:
    gate = _gates["identity"] = Gate()

    def program(rank: int) -> None:
        mine = RRef(Value())
        if rank == 0:
            for arguments in ((mine, threading.Lock()), (mine, _Refuses())):
                with pytest.raises((TypeError, ValueError)):
                    rpc.rpc_sync("w1", _keep, args=(arguments,))
            with pytest.raises(TypeError):
                rpc.rpc_sync("w1", _with_a_lock, args=(mine,))
            with pytest.raises(RpcTimeoutError):
                rpc.rpc_sync("w1", _slow_identity, args=(mine,), timeout=0.05)
            gate.open.set()
        rpc.barrier()
        collected_everywhere(rank)

    together(2, program)


class _Refuses:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("no")


def _with_a_lock(rref: RRef[Any]) -> Any:
    return rref, threading.Lock()


def _slow_identity(rref: RRef[Any]) -> Any:
    _gates["identity"].wait()
    return rref


def test_references_that_wander_are_all_collected() -> None:
    def program(rank: int) -> bool:
        for turn in range(20):
            rref = rpc.remote((rank + turn) % 4, Value)
            wandering = [
                rpc.rpc_async((rank + n) % 4, relay, args=((rank + 2 * n) % 4, identity, rref))
                for n in range(4)
            ]
            if turn % 2:
                del rref
            for future in wandering:
                assert isinstance(future.wait(), RRef)
            del wandering, future
        if not turn % 2:
            del rref
        return collected_everywhere(rank)

    assert together(4, program) == [True] * 4
    gc.collect()
    until(lambda: not len(Value.alive))


def test_shutdown_keeps_nothing() -> None:
    leftovers: list[Any] = []

    def program(rank: int) -> None:
        join(rank)
        leftovers.append(rpc.remote(1 - rank, Value))
        leftovers[-1].rpc_sync().__str__()
        rpc.shutdown()

    run_ranks(2, program)
    gc.collect()
    assert not len(Value.alive)
