"""Pictures and tables of a checkpoint, for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tilework.checkpoint.flat_state import FlatState, FlatValue, PerRank, dotted
from tilework.checkpoint.format import DRAWN, INDEX_NAME, LISTED, Index, bytes_of, checkpoint_parts
from tilework.checkpoint.index_text import is_checkpoint, read_index, saved_state
from tilework.checkpoint.name_patterns import NamePatterns
from tilework.checkpoint.safetensors_index import safetensors_index
from tilework.checkpoint.storage import Storage
from tilework.checkpoint.system_errors import checkpoint_errors
from tilework.checkpoint.url_storage import AnyPath, storage_at
from tilework.checkpoint.values import decode_value, value_text
from tilework.errors import CheckpointError
from tilework.show import Page, Styled, TextTable, bytes_text, count_text

#: Names of the folders: 8 digits with leading zeros, or more digits.
FOLDER = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint of a run."""

    step: int
    path: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    nbytes: int = 0


def kept_in(storage: Storage) -> list[KeptCheckpoint | CheckpointError]:
    """The checkpoints in a folder, the lowest step first; errors in place of damaged ones."""
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


@checkpoint_errors()
def show(path: AnyPath, names: Sequence[str] | None = None) -> None:
    """Print a checkpoint: tensors, pictures of their layouts, sizes and checksums. Local.

    For the folder of a :class:`CheckpointManager` it prints the existing steps.

    Args:
        path: A folder, or a URL; also a safetensors file, or a folder of such files.
        names: Patterns: only tensors whose names match a pattern are shown, however many.

    Raises:
        CheckpointError: It is not a checkpoint, or the index is damaged; or a pattern matches
            nothing.

    Example: see docs/how-to/checkpoints.md.
    """
    storage = storage_at(path)
    found: list[str] = []
    with suppress(OSError):
        found = list(storage.names())
    if found and INDEX_NAME not in found:
        kept = [each for each in kept_in(storage) if isinstance(each, KeptCheckpoint)]
        if kept:
            run_page(kept).print()
            return
    is_foreign = INDEX_NAME not in found and (
        str(path).endswith(".safetensors") or any(n.endswith(".safetensors") for n in found)
    )
    index = safetensors_index(path)[1] if is_foreign else read_index(storage)
    state = FlatState() if names or is_foreign else saved_state(index, storage, value_text)
    patterns = NamePatterns(names or None)
    tensors = [t for t in index.tensors.values() if patterns.match(t.name)]
    patterns.check()
    most = (len(tensors), len(tensors)) if names else (LISTED, DRAWN)
    listed = checkpoint_parts(str(index), index.meta, tensors, *most)
    Page(*listed, *_values(state)).print()


def _values(state: FlatState) -> Iterator[str | Styled]:
    values = [
        (dotted(path), leaf)
        for path, leaf in state.leaves.items()
        if isinstance(leaf, FlatValue | PerRank)
    ]
    if values:
        yield ""
        yield "values", "bold"
    for name, leaf in values[:LISTED]:
        text = f"{len(leaf.variants)} variants" if isinstance(leaf, PerRank) else _value(leaf)
        yield f"{name} = {text if len(text) <= 60 else text[:57] + '…'}"
    if len(values) > LISTED:
        yield f"… and {len(values) - LISTED:,} more"


def _value(leaf: FlatValue) -> str:
    """The value as Python writes it; the saved JSON if the kind of value is unknown."""
    try:
        return value_text(leaf.json)
    except ValueError:
        return str(leaf.json)
