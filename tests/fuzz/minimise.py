"""Programs that go wrong, made short: statements are left out so long as it goes wrong."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.fuzz.programs import Outcome, Program, expect, is_said, run_programs

_PLACEMENTS = re.compile(r"'(?:(?:S\d(?:\([\d,]*\))?|R|PM|PA|P)(?: |(?=')))+'")


def minimise(outcome: Outcome, tries: int = 200) -> Outcome:
    """The shortest program found that goes wrong in the same way."""
    left = tries
    shorter = True
    while shorter and left > 0:
        shorter = False
        for candidate in _shorter(outcome.program):
            left -= 1
            if left <= 0:
                break
            found = _outcome(candidate)
            if found is not None and found.kind == outcome.kind:
                outcome, shorter = found, True
                break
    return outcome


def _outcome(program: Program) -> Outcome | None:
    if not (program.statements and is_said(program) and expect(program)):
        return None
    return next(iter(run_programs([program])))


def _shorter(program: Program) -> list[Program]:
    """Programs without a statement, with a plainer one, or on a smaller mesh."""
    statements = list(program.statements)
    found = [
        replace(program, statements=[*statements[:at], *statements[at + 1 :]], expected={})
        for at in reversed(range(len(statements)))
    ]
    for at, text in enumerate(statements):
        for plainer in _plainer(text):
            changed = [*statements[:at], plainer, *statements[at + 1 :]]
            found.append(replace(program, statements=changed, expected={}))
    if len(program.mesh) == 1 and program.mesh[0] > 2:
        found.append(replace(program, mesh=(2,), expected={}))
    if len(program.mesh) == 2:
        flat = [_PLACEMENTS.sub(_first_axis, text) for text in statements]
        found.append(replace(program, statements=flat, mesh=(2,), expected={}))
        if program.mesh != (2, 2):
            found.append(replace(program, mesh=(2, 2), expected={}))
    return found


def _first_axis(match: re.Match[str]) -> str:
    return match[0].split(" ")[0].rstrip("'") + "'"


def _plainer(text: str) -> list[str]:
    found = []
    if text.startswith("with "):
        found.append(text.partition(": ")[2])
    match = _PLACEMENTS.search(text)
    if match is not None:
        words = match[0].strip("'").split()
        for at, word in enumerate(words):
            for plain in {"R", word.partition("(")[0]} - {word}:
                changed = " ".join([*words[:at], plain, *words[at + 1 :]])
                found.append(text[: match.start()] + f"'{changed}'" + text[match.end() :])
    return found
