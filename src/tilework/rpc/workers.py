"""The workers: names and ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tilework.store.internal import first_few

_NAME: Final = re.compile(r"[A-Za-z0-9_:.-]{1,127}")
#: The number of names that an error message spells out.
_NAMES_SHOWN: Final = 16


@dataclass(frozen=True)
class WorkerInfo:
    """A rank that takes part in RPC, as the others know it.

    Example:
        >>> WorkerInfo("trainer", 0)
        WorkerInfo(name='trainer', id=0)
    """

    name: str
    """The name that the worker gave to init_rpc; unique."""
    id: int
    """The worker's rank."""


#: A worker, as a call addresses it: by name, rank or WorkerInfo.
To = str | int | WorkerInfo


class Directory:
    """All workers, by rank and by name.

    Raises:
        ValueError: Two ranks have the same name.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._workers = tuple(WorkerInfo(name, rank) for rank, name in enumerate(names))
        self._by_name = {worker.name: worker for worker in self._workers}
        if len(self._by_name) < len(names):
            twice = sorted({name for name in names if list(names).count(name) > 1})
            ranks = {name: [r for r, other in enumerate(names) if other == name] for name in twice}
            raise ValueError(
                f"worker names must be unique: "
                f"{', '.join(f'ranks {ranks[name]} are all called {name!r}' for name in twice)}"
            )

    def find(self, to: To) -> WorkerInfo:
        """The worker that ``to`` names, by name, rank or WorkerInfo.

        Raises:
            ValueError: There is no such worker.
        """
        if isinstance(to, str):
            worker = self._by_name.get(to)
            if worker is None:
                raise ValueError(f"Invalid worker name {to!r}: the workers are {self._names()}")
            return worker
        if isinstance(to, WorkerInfo):
            if to.id in range(len(self._workers)) and self._workers[to.id] == to:
                return to
            raise ValueError(f"{to!r} is not one of the workers {self._names()}")
        if not isinstance(to, int) or isinstance(to, bool):
            raise TypeError(f"a worker is a name, a rank or a WorkerInfo, got {to!r}")
        if to not in range(len(self._workers)):
            raise ValueError(
                f"Invalid worker rank {to}: there are ranks 0 to {len(self._workers) - 1}"
            )
        return self._workers[to]

    def __iter__(self) -> Iterator[WorkerInfo]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def _names(self) -> str:
        return first_few([repr(worker.name) for worker in self._workers], _NAMES_SHOWN)


def check_name(name: str) -> str:
    """Return ``name`` if it is valid for a worker; else raise TypeError or ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"a worker's name is a str, got {name!r}")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a worker's name has 1 to 127 letters, digits, or one of _ : . -, got {name!r}"
        )
    return name
