"""Expected times: operators by a roofline, collectives by the prices of messages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import sub
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry

from tilework.comm.per_call.internal import PretendedCall
from tilework.dtensor.internal import tensors_in
from tilework.inspect import MemoryByUse
from tilework.plan.cluster import Cluster, CountedOperator
from tilework.plan.mismatches import Prices, passed_times


@dataclass(frozen=True)
class RankTime:
    """The expected time of a rank.

    Attributes:
        computing: Seconds in operators.
        moving: Seconds of collectives and messages, once all ranks have come.
        waiting: Seconds in which the rank waits for others.
        error: The relative error of the fit; None: an estimate.
    """

    computing: float
    moving: float
    error: float | None
    waiting: float = 0.0

    @property
    def seconds(self) -> float:
        """All seconds."""
        return self.computing + self.moving + self.waiting

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.0%}"
        waiting = f", {_seconds(self.waiting)} waiting" if self.waiting else ""
        return f"{_seconds(self.seconds)}{error} ({_seconds(self.moving)} moving{waiting})"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


class Workload(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what operators of this thread compute and touch, and the time that it should take."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cluster, self._clock = cluster, clock
        self.seconds = 0.0
        #: Before each call of the rank: the seconds so far.
        self.computed: list[float] = []
        #: The place of the first call, and the seconds, from which on time counts.
        self.begun = 0, 0.0
        self.operators: list[CountedOperator] = []
        #: By operator, the seconds that it took here by the clock, which takes time, too.
        self.took: list[float] = []

    def note(self, _: PretendedCall) -> None:
        """Note how far the rank is when it makes a call."""
        self.computed.append(self.seconds)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would load the compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, begun = kwargs or {}, self._clock()
        result = func(*args, **kwargs)
        if _is_view(func):
            return result
        self.took.append(self._clock() - begun)
        flops = 0
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            with contextlib.suppress(Exception):  # in a form that torch cannot count
                flops = count(*args, **kwargs, out_val=result)
        nbytes = sum(tensor.nbytes for tensor in tensors_in((args, kwargs, result)))
        operator = CountedOperator(func._schema.name, flops, nbytes)
        self.operators.append(operator)
        self.seconds += self.cluster.seconds_of([operator])
        return result


def now() -> float:
    """Seconds of this thread where it computes alone, which others on the machine do not add to."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


@cache
def _is_view(func: Any) -> bool:
    """True for operators that only look at memory."""
    of = [each.alias_info for each in func._schema.returns]
    looks = bool(of) and all(each is not None and not each.is_write for each in of)
    return looks or func is torch.ops.aten._unsafe_view.default


def begin_step() -> None:
    """Let the pretended rank's time and peak begin here, without what came before. Local."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Workload):
            mode.begun = len(mode.computed), mode.seconds
        elif isinstance(mode, MemoryByUse):
            mode.begin_peak()


def rank_times(
    calls: Mapping[int, Sequence[PretendedCall]],
    works: Mapping[int, Workload],
    cluster: Cluster,
    between: Callable[[PretendedCall], bool],
) -> dict[int, RankTime]:
    """By rank, the time of all ranks' calls, played in order: a rank waits for the last that comes.

    Without an order in which all ranks go on, the calls of each rank follow each other.
    """

    def seconds(call: PretendedCall) -> float:
        size = len(call.ranks)
        return cluster.collective_seconds(call.nbytes, size, between(call)) if size > 1 else 0.0

    computed = {rank: work.computed for rank, work in works.items()}
    passed = passed_times(calls, computed, Prices(seconds, cluster.device != "cpu"))
    times = {}
    for rank, work in works.items():
        place, before = work.begun
        mine = [call for call in calls[rank][place:] if call.waits_for is None]
        moving = sum(seconds(call) for call in mine if call.kind != "send")
        waiting = 0.0
        if passed is not None:
            spent = [0.0, *map(sub, passed[rank], work.computed)]
            waiting = round(spent[-1] - spent[place] - moving, 9)
        computing = work.seconds - before
        times[rank] = RankTime(computing, moving, cluster.error, max(waiting, 0.0))
    return times
