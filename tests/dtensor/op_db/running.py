"""Running cases on ranks as threads, so that what goes wrong in one stops no other."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.dtensor.op_checks import describe, noting_gatherings, run_on
from tests.dtensor.op_db.calls import Case, samples_of, spread
from tilework.comm.world import current_world
from tilework.dtensor import CollectiveEvent, Shard, distribute_tensor, explain
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.testing import run_ranks

#: How long a rank waits for another that went astray.
_TIMEOUT = timedelta(seconds=120)
#: Tolerances, relative and absolute: sums in another order differ more than single operators do.
_TOLERANCE = {
    torch.float64: (1e-6, 1e-7),
    torch.complex128: (1e-6, 1e-7),
    torch.float32: (1e-4, 1e-4),
    torch.complex64: (1e-4, 1e-4),
    torch.bfloat16: (5e-2, 1.0),
    torch.float16: (1e-2, 1e-1),
}


#: Changes of dims in place, and strides of memory, that DTensor refuses.
_REFUSED = re.compile(
    "would change the dims of|would have to move elements between ranks: write|for the memory of"
)


@dataclass
class Result:
    """How one case went on one rank."""

    case: Case
    #: "right", "wrong" (another result than torch's), "refused" (see docs/concepts/limits.md) or
    #: "raised".
    outcome: str
    why: str = ""
    gathered: Sequence[str] = ()

    def __str__(self) -> str:
        case = self.case
        return (
            f"{case.operator} ({case.form}, {str(case.dtype)[6:]}, mesh {case.mesh}, "
            f"{describe(case.layouts)}; shapes {[list(t.shape) for t in case.call.tensors]}): "
            f"{self.outcome}: {self.why}"
        )


class _Lost(Exception):
    """Ranks are no longer at the same place."""


def run_cases(cases: Sequence[Case]) -> list[Result]:
    """Run cases of one mesh shape, and tell how each went: the worst of all ranks."""
    found: list[Result] = []
    while len(found) < len(cases):
        found += _run_some(cases[len(found) :])
    return found


def _run_some(cases: Sequence[Case]) -> list[Result]:
    """Run cases until one leaves ranks at different places; at least one."""
    size = math.prod(cases[0].mesh)
    meeting = threading.Barrier(size)
    done: list[list[Result]] = [[] for _ in range(size)]

    def program(rank: int) -> None:
        torch.set_num_threads(1)
        mesh = init_device_mesh("cpu", cases[0].mesh)
        for group in current_world().records:
            group.set_timeout(_TIMEOUT)
        for case in cases:
            done[rank].append(run_case(case, mesh))
            try:
                meeting.wait(180)
            except threading.BrokenBarrierError:
                raise _Lost from None
            last = [its[len(done[rank]) - 1] for its in done]
            if len({one.outcome for one in last}) > 1 or any(
                "CollectiveTimeoutError" in one.why or "PeerLostError" in one.why for one in last
            ):
                raise _Lost

    with noting_gatherings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(size, program, timeout=timedelta(seconds=500), return_exceptions=True)
    count = max(1, min(map(len, done)))
    results = []
    for number in range(count):
        its = [one[number] for one in done if len(one) > number]
        worst = next((one for one in its if one.outcome == "wrong"), None)
        worst = worst or next((one for one in its if one.outcome == "raised"), None)
        if worst is None:
            worst = its[0] if len(its) == size else Result(cases[number], "raised", "ranks hang")
        results.append(worst)
    return results


def moves_a_dim_whole(info: Any, dtype: torch.dtype, most: int) -> list[bool]:
    """Whether calls of which only the first tensor is cut, in one dim, move all of that dim."""
    calls = spread(samples_of(info, dtype, 60), most)

    def program(rank: int) -> list[bool]:
        mesh = init_device_mesh("cpu", (2,))
        return [found for sample in calls for found in _moves(info, sample, mesh)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run_ranks(2, program, timeout=timedelta(seconds=100), return_exceptions=True)
    return found[0] if isinstance(found[0], list) else []


def _moves(info: Any, sample: Any, mesh: DeviceMesh) -> Iterator[bool]:
    """For each dim of the first tensor that is cut, whether a call moves all of it."""
    flat, structure = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    first = next((i for i, x in enumerate(flat) if _is_dense(x)), 0)
    for dim in range(flat[first].dim()) if _is_dense(flat[first]) else ():
        whole = flat[first].detach().clone()
        given = [x.clone() if _is_dense(x) else x for x in flat]
        given[first] = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
        input, args, kwargs = tree_unflatten(given, structure)
        torch.manual_seed(0)
        with explain() as log, contextlib.suppress(Exception):
            info.op(input, *args, **kwargs)
        if whole.shape[dim] > 1:
            yield any(map(_unshards, log.events))


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _unshards(event: CollectiveEvent) -> bool:
    """True if a dim of several elements is sharded before a collective, but not afterwards."""
    before, after = (
        {place for place, dim in enumerate(text.split(",")) if "@" in dim}
        for text in (event.tensor.split("]")[0], event.target.split("]")[0])
    )
    return not event.gathered and not event.gradient and not before <= after


def run_case(case: Case, mesh: DeviceMesh) -> Result:
    """Run a case on this rank. Collective."""
    rtol, atol = _TOLERANCE.get(case.dtype, (None, None))
    try:
        seen = run_on(case.call, mesh, case.layouts, compare=case.compare, rtol=rtol, atol=atol)
    except AssertionError as error:
        return Result(case, "wrong", f"{_first(error)} {_place(error)}")
    except Exception as error:
        if _REFUSED.search(str(error)):
            return Result(case, "refused")
        return Result(case, "raised", f"{type(error).__name__}: {_first(error)} {_place(error)}")
    return Result(case, "right", gathered=seen.gathered)


def _first(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " / ".join(lines[:4])[:600]


def _place(error: Exception) -> str:
    frames: list[Any] = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "tilework" in f.filename] or frames
    return f"[{ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno}]" if ours else ""
