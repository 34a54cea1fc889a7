"""Shorter lives that go wrong as a long one did."""

from __future__ import annotations

from dataclasses import replace

from tests.parallel.lives.drawing import Life
from tests.parallel.lives.living import Outcome, run_lives


def minimise(outcome: Outcome) -> Outcome:
    """The outcome of the shortest life found, by leaving out acts."""
    best, size = outcome, max(1, len(outcome.life.acts) // 2)
    while size:
        at = len(best.life.acts) - size
        while at >= 0:
            shorter = _without(best.life, at, size)
            found = next(run_lives([shorter])) if shorter is not None else None
            if found is not None and _alike(found, outcome):
                best = found
            at -= size
            at = min(at, len(best.life.acts) - size)
        size //= 2
    return best


def _without(life: Life, at: int, size: int) -> Life | None:
    acts = life.acts[:at] + life.acts[at + size :]
    other = life.unlike
    if not acts:
        return None
    if other is not None:
        if other.at >= at:
            if other.at < at + size:
                return None
            other = replace(other, at=other.at - size)
        if len(acts) < 2 or acts[-2:] != life.acts[-2:]:
            return None
    return replace(life, acts=acts, unlike=other)


def _alike(found: Outcome, wanted: Outcome) -> bool:
    return found.kind == wanted.kind and _mark(found) == _mark(wanted)


def _mark(outcome: Outcome) -> str:
    """What a failure has in common with a like one: the words of an error, but no numbers."""
    words = outcome.why.split("Error: ")
    text = words[-1] if len(words) > 1 else outcome.why.split(": ")[-1]
    return "".join(c for c in text[:60] if c.isalpha())[:24]
