"""The fit of a cluster's rates to this machine: a real block of a network, measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from tilework.cores import usable_cores
from tilework.plan.cluster import Cluster
from tilework.plan.timing import Workload, now

#: Widths of the blocks that are measured, the rows of their inputs, and tokens of each row.
_SIZES = ((64, 2, 32), (128, 4, 64), (256, 4, 64), (512, 4, 64))
_REPEATS = 5
#: The largest error of the steps of plans in benchmarks/planning.py: Python of wrappers, which
#: blocks do not have, and waits that ranks on the same cores add.
_OF_PLANS = 0.34


def measured_here(messages: Sequence[Measurement] = ()) -> Cluster:
    """A cluster of ranks like this process, measured. Blocks for some seconds.

    Steps of transformer blocks of several sizes are measured: each operator at the least of several
    times, and whole steps. The rate of an operator is that of the two largest blocks. The error is
    the largest relative error of the steps' times that the rates give, and no less than that of
    plans beside two processes.

    Args:
        messages: Times of collectives of two ranks; none: prices of messages are estimates.
    """
    cases = [_case(*size) for size in _SIZES]
    best = _fitted(cases)
    errors = [abs(best.seconds_of(case.work.operators) / case.seconds - 1) for case in cases]
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
        operators=best.operators,
        error=max(_OF_PLANS, *errors),
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


@dataclass(frozen=True)
class _Case:
    """A block's step: the operators, the least seconds of each, and of a whole step."""

    work: Workload
    least: list[float]
    seconds: float


def _case(width: int, rows: int, tokens: int) -> _Case:
    block = nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    optimizer = torch.optim.AdamW(block.parameters())
    x = torch.randn(rows, tokens, width)

    def step() -> None:
        optimizer.zero_grad()
        block(x).square().mean().backward()
        optimizer.step()

    step()
    runs, seconds = [], float("inf")
    for _ in range(_REPEATS):
        begun = now()
        step()
        seconds = min(seconds, now() - begun)
        with Workload(Cluster(), now) as work:
            step()
        runs.append(work.took)
    least = [min(times) for times in zip(*runs, strict=True)]
    return _Case(work, least, seconds)


def _fitted(cases: Sequence[_Case]) -> Cluster:
    """The rates: of operators in the largest cases, and of a call in all."""
    amounts: dict[str, float] = {}
    times: dict[str, float] = {}
    is_counted: dict[str, bool] = {}
    for case in cases[-2:]:
        for operator, seconds in zip(case.work.operators, case.least, strict=True):
            name = operator.name
            amounts[name] = amounts.get(name, 0.0) + operator.amount
            times[name] = times.get(name, 0.0) + seconds
            is_counted[name] = operator.flops > 0

    def rate(counted: bool) -> float:
        names = [name for name in amounts if is_counted[name] is counted]
        return sum(amounts[name] for name in names) / sum(times[name] for name in names)

    rates = {name: times[name] / amount for name, amount in amounts.items() if amount}
    free = Cluster(flops=rate(True), bandwidth=rate(False), call_seconds=0.0, operators=rates)
    calls = [
        (case.seconds - free.seconds_of(case.work.operators)) / len(case.least) for case in cases
    ]
    return replace(free, call_seconds=max(0.0, min(calls)))
