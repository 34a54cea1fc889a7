"""Agreement of ranks before they act together, so that all act or all raise."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.collectives import all_gather_into_tensor
from tilework.comm.operations.objects import (
    Report,
    all_gather_pickled,
    device_of,
    raise_report,
    report_of,
)
from tilework.comm.per_call.call_recorder import unrecorded
from tilework.comm.pretence import current_pretence
from tilework.comm.world import AnyGroup, NonMember, get_process_group_ranks, member, resolve
from tilework.errors import DistBackendError

T = TypeVar("T")
Facts = Mapping[str, Any]


@unrecorded
def agree(make: Callable[[], T], group: AnyGroup = None) -> list[T]:
    """Call ``make()`` on every rank of the group; return all ranks' results, on every rank.

    The results are in the order of group ranks. Collective; blocks. If ``make`` fails on one rank,
    no other rank is left waiting: the failing rank raises the original error, other ranks an error
    of the same builtin class that names the rank.

    Args:
        make: Makes this rank's contribution, without communication. It must be plain data (numbers,
            strings, containers of them); other data is refused. If all ranks contribute equal data,
            the result repeats this rank's object, without copies.
    """
    pg = member(group, "agree")
    if pg is None:
        return []
    own_error: BaseException | None = None
    try:
        report: tuple[Any, Report | None] = (make(), None)
        data = pickle.dumps(report, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        own_error = error
        report = (None, report_of(error))
        data = pickle.dumps(report, pickle.HIGHEST_PROTOCOL)
    reports = [report] * pg.size() if pg.size() == 1 else _gather(report, data, pg)
    if own_error is not None:
        raise own_error
    for rank, (_, failure) in zip(pg.global_ranks, reports, strict=True):
        if failure is not None:
            raise_report(rank, failure)
    return [value for value, _ in reports]


@unrecorded
def are_alike(digest: int, group: AnyGroup = None) -> bool:
    """True if all ranks pass the same ``digest``, of 63 bits; cheaper than :func:`agree`."""
    pg = member(group, "are_alike")
    return pg is None or pg.size() == 1 or _are_alike(digest, pg)


def _are_alike(digest: int, pg: ProcessGroup) -> bool:
    memory = _rows.get(pg)
    if memory is None:
        with torch.inference_mode(False):
            row = torch.zeros(1, dtype=torch.int64, device=device_of(pg))
            memory = _rows[pg] = row, row.new_empty(pg.size())
    row, rows = memory
    all_gather_into_tensor(rows, row.fill_(digest), pg)
    every = rows.tolist() if current_pretence() is None else _pretended("alike", digest, pg)
    return every.count(digest) == len(every)


def _pretended(key: str, own: Any, pg: ProcessGroup) -> list[Any]:
    """The value of each pretended rank, by group rank; this rank's if another's is unknown."""
    pretence = current_pretence()
    assert pretence is not None
    call = key, pg.group_name, pg.global_ranks, pg.get_sequence_number_for_group()
    others = pretence.job.exchange(call, pg.rank(), own)
    return [others.get(rank, own) for rank in range(pg.size())]


#: Of groups that have compared digests: a tensor for this rank's, and for those of all ranks.
_rows: WeakKeyDictionary[ProcessGroup, tuple[torch.Tensor, torch.Tensor]] = WeakKeyDictionary()


@unrecorded
def agree_equal(
    facts: Callable[[], Facts],
    group: AnyGroup = None,
    what: str = "",
    *,
    own: Collection[str] = (),
    hint: str = "",
    error: type[ValueError | DistBackendError] = ValueError,
) -> list[Facts]:
    """Exchange the facts of each rank; raise on every rank unless all ranks have equal facts.

    Returns the facts of all ranks, in the order of group ranks. Collective; blocks. A rank outside
    the group only calls ``facts``, and gets an empty list.

    Args:
        facts: Makes this rank's facts, plain data by name, as ``make`` of :func:`agree` does.
        group: The group; None: the default group.
        what: The start of the error's message, such as "all ranks must make the same mesh:";
            ``{name}`` in it stands for the name of the fact that differs.
        own: Names of facts that may differ between ranks.
        hint: The end of the error's message: the next step.
        error: The class of the error.

    Raises:
        Exception: ``facts`` raised, here or on another rank.
        ValueError: A fact differs between ranks, or a rank lacks a fact. Raised on every rank; the
            class is ``error`` if that is given.

    Example:
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     try:
        ...         agree_equal(lambda: {"seed": rank // 2}, what="ranks need one seed:")
        ...     except ValueError as error:
        ...         return str(error)
        >>> run_ranks(3, program)[0]
        'ranks need one seed: seed=0 on rank 0 does not match with seed=1 on rank 2'
    """
    if isinstance(resolve(group), NonMember):
        facts()
        return []
    by_rank: list[Facts] = agree(lambda: dict(facts()), group)
    check_equal(by_rank, get_process_group_ranks(group), what, own=own, hint=hint, error=error)
    return by_rank


def check_equal(
    facts: Sequence[Facts],
    ranks: Sequence[int],
    what: str = "",
    *,
    own: Collection[str] = (),
    hint: str = "",
    error: type[ValueError | DistBackendError] = ValueError,
) -> None:
    """Raise if the facts of each of ``ranks`` differ, as :func:`agree_equal` does. Local."""
    first = facts[0]
    others = [(rank, theirs) for rank, theirs in zip(ranks, facts, strict=True) if theirs != first]
    for name in dict.fromkeys([*first, *(name for _, theirs in others for name in theirs)]):
        expected = first.get(name, "nothing")
        values = {rank: theirs.get(name, "nothing") for rank, theirs in others}
        odd = [rank for rank, value in values.items() if value != expected]
        if not odd or name in own:
            continue
        expected_here = f"{name}={_short(expected)} on rank {ranks[0]}"
        listed = _listed(name.rpartition(": ")[2], {rank: values[rank] for rank in odd})
        start = f"{what.replace('{name}', name)} " if what else ""
        message = f"{start}{expected_here} does not match with {listed}{hint}"
        if issubclass(error, DistBackendError):
            raise error(message, ranks=odd)
        raise error(message)


def _listed(name: str, values: Mapping[int, Any]) -> str:
    """Text for an error: each different value (at most 8), with the first rank that has it."""
    first_ranks: dict[str, int] = {}
    for rank, value in values.items():
        first_ranks.setdefault(_short(value), rank)
    texts = [f"{name}={value} on rank {rank}" for value, rank in first_ranks.items()]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:8], "…"])


def _short(value: Any) -> str:
    text = str(value)  # the text of a sharding spec may have a thousand placements
    return text if len(text) <= 500 else f"{text[:300]} … {text[-100:]}"


def _gather(report: Any, data: bytes, pg: ProcessGroup) -> list[Any]:
    """The reports of all ranks, by group rank; ``data`` is this rank's, pickled. Collective."""
    digest = int.from_bytes(blake2b(data, digest_size=8).digest(), "big") >> 1
    is_same = _are_alike(digest, pg)
    if current_pretence() is not None:
        return _pretended("agree", report, pg)
    if is_same:
        return [report] * pg.size()  # the usual case
    row = torch.tensor([len(data)], device=device_of(pg))
    rows = row.new_empty(pg.size())
    all_gather_into_tensor(rows, row, pg)
    return all_gather_pickled(data, rows.tolist(), pg, weights_only=True)
