"""Patterns that choose names of a state, such as ``"model.*"``."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final, NoReturn

from tilework.errors import CheckpointError

_LISTED: Final = 5
#: Patterns that choose names; None: all names.
Names = str | Sequence[str] | None


class NamePatterns:
    """Selects the names that match at least one pattern, as in a shell; None: all names."""

    def __init__(self, patterns: Names) -> None:
        if isinstance(patterns, str):
            patterns = [patterns]
        self._patterns = None if patterns is None else list(patterns)
        self._seen: dict[str, None] = {}
        self._idle = set(self._patterns or ())

    @property
    def takes_all(self) -> bool:
        return self._patterns is None

    def match(self, name: str) -> bool:
        if self._patterns is None:
            return True
        self._seen.setdefault(name)
        matching = [pattern for pattern in self._patterns if fnmatchcase(name, pattern)]
        self._idle.difference_update(matching)
        return bool(matching)

    def idle(self) -> list[str]:
        return [pattern for pattern in self._patterns or () if pattern in self._idle]

    def check(self) -> None:
        """Raise if a pattern matches none of the names that were asked for."""
        if idle := self.idle():
            self.refuse(idle[0])

    def refuse(self, pattern: str) -> NoReturn:
        known = list(self._seen)
        close = get_close_matches(pattern, known, 3)
        if close:
            hint = f"did you mean {', '.join(close)}?"
        elif known:
            more = ", …" if len(known) > _LISTED else ""
            hint = f"there are {', '.join(known[:_LISTED])}{more}"
        else:
            hint = "there are none"
        raise CheckpointError(f"no name matches {pattern!r}: {hint}")
