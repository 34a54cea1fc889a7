"""Expected times: operators by a roofline, collectives by the prices of messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tilework.comm.per_call.internal import PretendedCall
from tilework.dtensor.internal import tensors_in
from tilework.plan.cluster import Cluster

#: Operators that only look at memory.
_VIEWS = ("view", "_unsafe_view", "t", "transpose", "permute", "expand", "detach", "alias", "split")


@dataclass(frozen=True)
class RankTime:
    """The expected time of a rank.

    Attributes:
        computing: Seconds in operators.
        moving: Seconds in collectives and messages that the rank waits for.
        error: The relative error of the fit; None: an estimate.
    """

    computing: float
    moving: float
    error: float | None

    @property
    def seconds(self) -> float:
        """All seconds."""
        return self.computing + self.moving

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.0%}"
        return f"{_seconds(self.seconds)}{error} ({_seconds(self.moving)} moving)"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


class Workload(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what operators of this thread compute and touch, and the time that it should take."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cluster = cluster
        self.flops = self.nbytes = self.calls = 0
        self.seconds = 0.0
        #: By operator: floating-point operations and bytes, for a fit.
        self.operators: list[tuple[float, float]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would load the compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.name.partition("::")[2] in _VIEWS:
            return result
        flops = 0
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            with contextlib.suppress(Exception):  # an operator in a form that torch cannot count
                flops = count(*args, **kwargs, out_val=result)
        nbytes = sum(tensor.nbytes for tensor in tensors_in((args, kwargs, result)))
        self.flops += flops
        self.nbytes += nbytes
        self.calls += 1
        self.operators.append((flops, nbytes))
        self.seconds += self.cluster.operator_seconds(flops, nbytes)
        return result


def moving_seconds(
    calls: Iterable[PretendedCall], cluster: Cluster, between: Callable[[PretendedCall], bool]
) -> float:
    """The seconds of collectives and messages that a rank waits for, one after the other."""
    return sum(
        cluster.collective_seconds(call.nbytes, len(call.ranks), between(call))
        for call in calls
        if len(call.ranks) > 1
    )
