"""CheckpointManager: the checkpoints of one run, keeping the last and the best."""

from __future__ import annotations

import errno
import math
import warnings
from collections.abc import Callable, Mapping
from operator import index as whole_number
from typing import Any

from tilework.checkpoint.api import async_save, load, save
from tilework.checkpoint.asynchronous import raise_pending
from tilework.checkpoint.composing import MapNames
from tilework.checkpoint.format import INDEX_NAME, PREVIOUS_NAME
from tilework.checkpoint.index_text import is_ours
from tilework.checkpoint.loading import LoadReport
from tilework.checkpoint.name_patterns import Names
from tilework.checkpoint.ranks import Ranks
from tilework.checkpoint.saving import SaveOptions
from tilework.checkpoint.showing import FOLDER, KeptCheckpoint, kept_in, run_page
from tilework.checkpoint.storage import LOCK_NAME, Storage
from tilework.checkpoint.url_storage import AnyPath, storage_at
from tilework.checkpoint.values import encode_value
from tilework.comm.world import AnyGroup
from tilework.errors import CheckpointError


class CheckpointManager:
    """The checkpoints of one run, in one folder: ``step-00000100`` and so on.

    Args:
        folder: A folder that all ranks see, a URL, or a :class:`Storage`. The first save makes it.
        keep: The number of latest checkpoints to keep; None: all.
        every: The interval of steps for which :meth:`should_save` is true; None: every step.
        best: A metric: the best checkpoint by it is kept as well. The lowest value is the best;
            with ``"max:"`` before the name, the highest.
        asynchronous: Save in the background, as :func:`~tilework.checkpoint.async_save` does.
        group: The ranks that save; None: all, or this process if there is no group.

    Raises:
        ValueError: ``keep`` or ``every`` is below 1.
    """

    def __init__(
        self,
        folder: AnyPath | Storage,
        *,
        keep: int | None = None,
        every: int | None = None,
        best: str | None = None,
        asynchronous: bool = False,
        group: AnyGroup = None,
    ) -> None:
        for name, number in (("keep", keep), ("every", every)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, or None, got {number}")
        self.folder, self.keep, self.every, self.best = str(folder), keep, every, best
        self._asynchronous, self._group = asynchronous, group
        self._storage = storage_at(folder)
        #: The last saved step, which may be lower than existing ones.
        self._last: int | None = None
        self.report: LoadReport | None = None

    def should_save(self, step: int) -> bool:
        """True if ``step`` is a multiple of ``every``, or there is no ``every``. Local."""
        return self.every is None or step % self.every == 0

    def path_of(self, step: int) -> str:
        """The folder of a step's checkpoint, whether it exists or not."""
        return self._storage.where(_name(step))

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Save a checkpoint, and remove those that should not be kept. Collective.

        Older checkpoints go when the new one is complete; with ``asynchronous``, at the next save.

        Args:
            step: The step's number, usually higher than any before. A checkpoint with a lower
                number is kept at least until the next save. ``latest()`` is the highest number.
            state: As for :func:`~tilework.checkpoint.save`.
            metrics: Numbers that rate the checkpoint; NaN is never the best.

        Raises:
            TypeError: The step is not an integer.
            ValueError: ``best`` names a metric that is not in ``metrics``, or the step is negative.
            CheckpointError: As for :func:`~tilework.checkpoint.save`.
        """
        step = _checked_step(step)
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        if self.best is not None and self._metric not in numbers:
            raise ValueError(
                f"this manager keeps the checkpoint with the best {self._metric!r}, which is not "
                f"among the metrics {sorted(numbers)}: give it to save()"
            )
        self.wait()
        listed = {name: encode_value(number, name) for name, number in numbers.items()}
        options = SaveOptions(meta={"step": step, "metrics": listed})
        path = self._storage.inner(_name(step))
        self._last = step
        if self._asynchronous:
            async_save(state, path, options, group=self._group)
            return
        save(state, path, options, group=self._group)
        self._clean_on_first()

    def wait(self) -> None:
        """Wait for a running save; then remove checkpoints that should not be kept. Collective.

        Raises:
            CheckpointError: The save has failed.
        """
        Ranks(self._group).gather(raise_pending)
        self._clean_on_first()

    def all(self) -> list[KeptCheckpoint]:
        """The complete checkpoints in the folder, the lowest step first. Local."""
        return [each for each in kept_in(self._storage) if isinstance(each, KeptCheckpoint)]

    def latest(self) -> str | None:
        """The folder of the complete checkpoint with the highest step; None without any. Local."""
        kept = self.all()
        return kept[-1].path if kept else None

    def best_one(self) -> KeptCheckpoint | None:
        """The complete checkpoint with the best metric; None if there is none. Local."""
        return self._best_of(self.all())

    def resume(
        self, into: Any, *, names: Names = None, map_names: MapNames = None, strict: bool = True
    ) -> int | None:
        """Fill a state from the latest complete checkpoint, if there is one. Collective; blocks.

        Returns:
            The checkpoint's step; None if there is no checkpoint, and the state is unchanged.
            ``report`` has the names that were left out.

        Warns:
            UserWarning: A later checkpoint was saved, but is damaged or cannot be read.
        """
        ranks = Ranks(self._group)
        ranks.gather(raise_pending)
        # The first rank's answer is used: a folder may look different a moment later.
        latest, damage = ranks.gather(
            lambda: self._latest_step() if ranks.is_first else (None, "")
        )[0]
        if ranks.is_first and damage:
            instead = "nothing" if latest is None else f"step {latest}"
            warnings.warn(f"{damage}; resuming from {instead} instead", stacklevel=2)
        if latest is None:
            return None
        self.report = load(
            self._storage.inner(_name(latest)),
            into,
            names=names,
            map_names=map_names,
            strict=strict,
            group=self._group,
        )
        return latest

    def _repr_html_(self) -> str:
        return run_page(self.all()).html()

    # -- existing checkpoints -------------------------------------------------------------------

    def _latest_step(self) -> tuple[int | None, str]:
        """The highest complete step, if any, and the error of the highest of all, if incomplete."""
        found = kept_in(self._storage)
        latest = next((c.step for c in reversed(found) if isinstance(c, KeptCheckpoint)), None)
        damage = found[-1] if found and isinstance(found[-1], CheckpointError) else ""
        return latest, str(damage)

    @property
    def _metric(self) -> str:
        return (self.best or "").removeprefix("max:").removeprefix("min:")

    def _best_of(self, kept: list[KeptCheckpoint]) -> KeptCheckpoint | None:
        name, sign = self._metric, -1 if (self.best or "").startswith("max:") else 1
        rated = [each for each in kept if not math.isnan(each.metrics.get(name, math.nan))]
        # Of equal ones the latest.
        return min(rated, key=lambda each: (sign * each.metrics[name], -each.step), default=None)

    # -- removal --------------------------------------------------------------------------------

    def _clean_on_first(self) -> None:
        ranks = Ranks(self._group)
        ranks.gather(lambda: self._clean() if ranks.is_first else None)

    def _clean(self) -> None:
        kept = self.all()
        steps = {each.step for each in kept}
        for name in self._storage.names():
            match = FOLDER.fullmatch(name)
            if match is not None and int(match[1]) not in steps:
                remove_if_left(self._storage.inner(name))
        if self.keep is None:
            return
        best = self._best_of(kept) if self.best is not None else None
        for each in kept[: -self.keep]:
            if each != best and each.step != self._last:
                _remove(self._storage.inner(_name(each.step)), lambda names: True)


def _name(step: int) -> str:
    return f"step-{step:08}"


def _checked_step(step: int) -> int:
    try:
        number = whole_number(step)  # also for numpy's integers
    except TypeError:
        raise TypeError(f"step must be an int, got {step!r}") from None
    if number < 0:
        raise ValueError(f"step must be 0 or more, got {number}")
    return number


def remove_if_left(storage: Storage) -> bool:
    """Remove a folder that has only leftovers of an unfinished save; True if it was removed."""
    return _remove(storage, _is_left)


def _remove(storage: Storage, is_due: Callable[[list[str]], bool]) -> bool:
    """Remove a folder if ``is_due`` is true of the file names and nobody holds the lock. Local."""
    names = storage.names()
    if not is_due(names):
        return False
    try:
        release = storage.lock() if names else lambda: None
    except (CheckpointError, FileNotFoundError):
        return False  # somebody is writing to it, or has removed it
    try:
        # The former holder of the lock may have ended the save in the meantime.
        if not is_due(storage.names()):
            return False
        storage.remove_folder()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        return False  # somebody begins to write to it, or it is not a folder
    finally:
        release()
    return True


def _is_left(names: list[str]) -> bool:
    indices = {INDEX_NAME, PREVIOUS_NAME}
    return indices.isdisjoint(names) and all(is_ours(n) or n == LOCK_NAME for n in names)
