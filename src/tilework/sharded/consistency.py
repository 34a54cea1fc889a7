"""Whether all ranks are about to do the same, before they do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilework.comm.agreement import agree
from tilework.comm.world import AnyGroup, NonMember, get_process_group_ranks, resolve


def check_alike(facts: Callable[[], Mapping[str, Any]], group: AnyGroup) -> None:
    """Check that all ranks of the group tell the same facts.

    Collective; blocks. A rank outside the group only checks itself.

    Args:
        facts: What this rank is about to do, as plain data: ``"what"`` or ``"of what: what"`` to
            a value. May raise what is wrong on this rank.

    Raises:
        Exception: ``facts`` raised, here or on another rank.
        ValueError: A fact differs, or a rank lacks it; on all ranks.
    """
    if isinstance(resolve(group), NonMember):
        facts()
        return
    said, ranks = agree(lambda: dict(facts()), group), get_process_group_ranks(group)
    for rank, others in zip(ranks, said, strict=True):
        if others == said[0]:
            continue
        for fact in [*said[0], *others]:
            one, two = said[0].get(fact, "nothing"), others.get(fact, "nothing")
            if one != two:
                name = fact.rpartition(": ")[2]
                raise ValueError(
                    f"{fact}={_short(one)} on rank {ranks[0]} does not match with "
                    f"{name}={_short(two)} on rank {rank}"
                )


def _short(value: Any) -> str:
    text = str(value)  # that of a spec may go on for a thousand placements
    return text if len(text) <= 500 else f"{text[:300]} … {text[-100:]}"
