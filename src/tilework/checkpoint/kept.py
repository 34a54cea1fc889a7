"""The checkpoints of one run in a folder: ``step-00000100`` and so on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tilework.checkpoint.format import Index
from tilework.checkpoint.index_file import is_checkpoint, read_index
from tilework.checkpoint.picture import bytes_of
from tilework.checkpoint.storage import Storage
from tilework.checkpoint.values import decode_value
from tilework.errors import CheckpointError
from tilework.show import Page, TextTable, bytes_text, count_text

#: Names of the folders: 8 digits with leading zeros, or more digits.
FOLDER = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint of a run.

    Attributes:
        step: The number of the step.
        path: The folder.
        metrics: The numbers that were saved with the checkpoint.
        nbytes: The number of bytes of all tensors.
    """

    step: int
    path: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    nbytes: int = 0


def kept_in(storage: Storage) -> list[KeptCheckpoint | CheckpointError]:
    """The checkpoints in a folder, the lowest step first. Local.

    A checkpoint that was saved, but is damaged or cannot be read, is an error in the list.
    """
    found = {}
    for name in storage.names():
        match = FOLDER.fullmatch(name)
        checkpoint = None if match is None else _examined(storage, name, int(match[1]))
        if match is not None and checkpoint is not None:
            found[int(match[1])] = checkpoint
    return [found[step] for step in sorted(found)]


def _examined(folder: Storage, name: str, step: int) -> KeptCheckpoint | CheckpointError | None:
    """The checkpoint in the folder ``name``, or an error; None: it has no index."""
    storage = folder.inner(name)
    try:
        if not is_checkpoint(storage.names(), storage):
            return None
        index = read_index(storage)
        for file, saved in index.files.items():
            reader = storage.open(file)
            reader.close()
            if reader.nbytes != saved.nbytes:
                where = storage.where(file)
                told = f"{where} has {reader.nbytes} bytes, not {saved.nbytes} as when it was saved"
                return CheckpointError(told, file=where)
    except CheckpointError as error:
        return error
    except OSError as error:
        where = folder.where(name)
        return CheckpointError(f"{where} cannot be read: {error}", file=where)
    nbytes = bytes_of(index.tensors.values())
    return KeptCheckpoint(step, folder.where(name), _metrics_of(index), nbytes)


def _metrics_of(index: Index) -> dict[str, float]:
    listed = index.meta.get("metrics")
    found = {}
    for name, each in listed.items() if isinstance(listed, dict) else ():
        with suppress(ValueError, OverflowError):
            number = decode_value(each)
            if isinstance(number, int | float):
                found[name] = float(number)
    return found


def run_page(kept: Sequence[KeptCheckpoint]) -> Page:
    """A row for each checkpoint, with size and metrics; each metric's lowest value is marked."""
    headline = (f"{count_text(len(kept), 'checkpoint')} of a run", "bold")
    if not kept:
        return Page(headline)
    lowest = {
        name: min(each.metrics[name] for each in kept if name in each.metrics)
        for name in {name for each in kept for name in each.metrics}
    }
    rows = []
    for each in kept:
        notes = [
            f"{name} {value:g}{' (lowest)' * (value == lowest[name])}"
            for name, value in sorted(each.metrics.items())
        ] + ["latest"] * (each is kept[-1])
        rows.append((str(each.step), bytes_text(each.nbytes), ", ".join(notes)))
    more = f"to see one: tilework checkpoint show {kept[-1].path}"
    return Page(headline, "", TextTable(("step", "bytes", "metrics"), rows, {0, 1}), "", more)
