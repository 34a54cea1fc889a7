"""The fit of a cluster's rates to this machine: a real block of a network, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from tilework.cores import usable_cores
from tilework.plan.cluster import Cluster
from tilework.plan.timing import Workload

#: Widths of the blocks that are measured, and rows of their inputs.
_SIZES = ((64, 32), (256, 64), (256, 256), (512, 256), (1024, 128))
_REPEATS = 5


def measured_here(messages: Sequence[Measurement] = ()) -> Cluster:
    """A cluster of ranks like this process, measured. Blocks for some seconds.

    Forward and backward of blocks of several sizes are measured, each as the median of five, and
    the rates are those with the least relative errors. The error is the mean that is left.

    Args:
        messages: Times of collectives of two ranks; none: prices of messages are estimates.
    """
    cases = [_case(width, rows) for width, rows in _SIZES]
    best, error = min(
        ((each, _error(each, cases)) for each in _candidates(cases)), key=lambda pair: pair[1]
    )
    operators = f"operators on {usable_cores()} cores, {torch.get_num_threads()} threads"
    cluster = Cluster()
    if messages:
        latency, per_byte = _message_prices(messages)
        cluster = replace(cluster, latency=latency, seconds_per_byte=per_byte)
    return replace(
        cluster,
        flops=best.flops,
        bandwidth=best.bandwidth,
        call_seconds=best.call_seconds,
        error=error,
        measured=(operators, *(["messages within the host"] if messages else [])),
    )


#: The operation, bytes of each rank, way, and seconds of a collective of two ranks.
Measurement = tuple[str, int, str, float]


def _message_prices(messages: Sequence[Measurement]) -> tuple[float, float]:
    """The seconds of the shortest collective, and those for each byte of long collectives."""
    best: dict[tuple[str, int], float] = {}
    for name, nbytes, _, seconds in messages:
        best[name, nbytes] = min(seconds, best.get((name, nbytes), seconds))
    most = max(nbytes for _, nbytes in best)
    long = [seconds / nbytes for (_, nbytes), seconds in best.items() if 4 * nbytes >= most]
    return min(best.values()), statistics.median(long)


#: The floating-point operations and bytes of each operator, and the seconds of all.
_Case = tuple[Sequence[tuple[float, float]], float]


def _case(width: int, rows: int) -> _Case:
    block = nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )
    x = torch.randn(rows, width)

    def step() -> None:
        block(x).square().mean().backward()

    work = Workload(Cluster())
    step()
    with work:
        step()
    seconds = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return work.operators, statistics.median(seconds)


def _candidates(cases: Sequence[_Case]) -> list[Cluster]:
    """Rates around those of the largest and the smallest case."""
    largest = max(cases, key=lambda case: sum(flops for flops, _ in case[0]))
    smallest = min(cases, key=lambda case: sum(flops for flops, _ in case[0]))
    flops = sum(flops for flops, _ in largest[0]) / largest[1]
    call = smallest[1] / len(smallest[0])
    return [
        Cluster(flops=flops * f, bandwidth=b, call_seconds=call * c)
        for f in (1.0, 1.15, 1.3, 1.6, 2.0)
        for b in (1e9, 2e9, 4e9, 8e9, 1.6e10, 3.2e10)
        for c in (0.4, 0.6, 0.8, 0.9, 1.0)
    ]


def _error(cluster: Cluster, cases: Sequence[_Case]) -> float:
    """The mean relative error of the expected times."""
    errors = [
        abs(sum(cluster.operator_seconds(*each) for each in operators) - seconds) / seconds
        for operators, seconds in cases
    ]
    return statistics.fmean(errors)
