"""Pictures and tables of a checkpoint, for a terminal."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterable, Sequence

from tilework.checkpoint.api import AnyPath, storage_at
from tilework.checkpoint.convert.safetensors_files import safetensors_index
from tilework.checkpoint.flat_state import FlatState, PerRank, Value, dotted
from tilework.checkpoint.format import INDEX_NAME, Index, SavedTensor
from tilework.checkpoint.index_file import read_index
from tilework.checkpoint.loading import saved_state
from tilework.checkpoint.manager import CheckpointManager, KeptCheckpoint
from tilework.checkpoint.name_patterns import NamePatterns
from tilework.checkpoint.storage import Storage
from tilework.checkpoint.system_errors import checkpoint_errors
from tilework.checkpoint.values import decode_value
from tilework.tiled.picture import PictureSize, draw
from tilework.tiled.terminal import COLOURS, StyledLine, bytes_text, coloured_picture, print_styled

#: Without names, so many tensors are listed, and so many layouts drawn.
_LISTED, _DRAWN = 200, 4
_RANK = re.compile(r"-rank0*([0-9]+)-")


@checkpoint_errors()
def show(path: AnyPath, names: Sequence[str] | None = None) -> None:
    """Print a checkpoint: its tensors, their layouts, drawn, their sizes and checksums. Local.

    Of the folder of a :class:`CheckpointManager` it prints the steps that are there.

    Args:
        path: A folder, or a URL; also a safetensors file, or a folder of such files.
        names: Patterns: only tensors whose names match one, and all of them.

    Raises:
        CheckpointError: It is none, or its index is damaged; or a pattern matches nothing.

    Example:
        >>> import tempfile, torch
        >>> from tilework import checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> checkpoint.save({"weight": torch.ones(2)}, folder)
        >>> checkpoint.show(folder)  # doctest: +ELLIPSIS
        1 tensor, 8 B in 1 file, saved by 1 rank ...
    """
    storage = storage_at(path)
    found = _names_at(storage)
    if found and INDEX_NAME not in found and (kept := CheckpointManager(path).all()):
        print_styled(lambda width: _steps(kept), rows=True)
        return
    is_foreign = INDEX_NAME not in found and (
        str(path).endswith(".safetensors") or any(n.endswith(".safetensors") for n in found)
    )
    index = safetensors_index(path)[1] if is_foreign else read_index(storage)
    state = FlatState() if names or is_foreign else saved_state(index, storage)
    patterns = NamePatterns(names or None)
    tensors = [t for t in index.tensors.values() if patterns.match(t.name)]
    patterns.check()
    print_styled(lambda width: list(_lines(index, state, tensors, names, width)), rows=True)


def _names_at(storage: Storage) -> list[str]:
    with contextlib.suppress(OSError):
        return list(storage.names())
    return []


def _steps(kept: Sequence[KeptCheckpoint]) -> Iterable[StyledLine]:
    """A line for each step, with its size and its metrics, of which the lowest are marked."""
    indices = [read_index(storage_at(each.path)) for each in kept]
    yield [(f"{len(kept)} checkpoint{'s' * (len(kept) != 1)} of a run", "bold")]
    yield []
    lowest = {
        name: min(each.metrics[name] for each in kept if name in each.metrics)
        for name in {name for each in kept for name in each.metrics}
    }
    for each, index in zip(kept, indices, strict=True):
        metrics = [
            f"{name} {value:g}{' (lowest)' if value == lowest[name] else ''}"
            for name, value in sorted(each.metrics.items())
        ]
        notes = [*metrics, "latest"] if each is kept[-1] else metrics
        size = bytes_text(_bytes_of(index)).rjust(10)
        yield [(f"step {each.step:>8}  {size}  {', '.join(notes)}".rstrip(), "")]
    yield []
    yield [(f"to see one: tilework checkpoint show {kept[-1].path}", "")]


def _lines(
    index: Index,
    state: FlatState,
    tensors: list[SavedTensor],
    names: Sequence[str] | None,
    width: int,
) -> Iterable[StyledLine]:
    yield [(_headline(index), "bold")]
    if index.meta:
        yield [(f"meta: {dict(index.meta)}", "")]
    yield []
    listed = tensors if names else tensors[:_LISTED]
    rows = [("tensor", "dtype", "shape", "bytes", "parts", "checksum"), *map(_row, listed)]
    columns = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        words = [
            word.rjust(size) if at in (3, 4) else word.ljust(size)
            for at, (word, size) in enumerate(zip(row, columns, strict=True))
        ]
        yield [("  ".join(words).rstrip(), "bold" if number == 0 else "")]
    if len(tensors) > len(listed):
        yield [(f"… and {len(tensors) - len(listed):,} more: name them to see them", "")]
    yield from _pictures(tensors, _DRAWN if not names else len(tensors), width)
    yield from _values(state)


def _headline(index: Index) -> str:
    def count(number: int, what: str) -> str:
        return f"{number:,} {what}{'s' * (number != 1)}"

    return (
        f"{count(len(index.tensors), 'tensor')}, {bytes_text(_bytes_of(index))} in "
        f"{count(len(index.files), 'file')}, saved by {count(index.world_size, 'rank')} "
        f"{f'at {index.created}' if index.created else ''}".rstrip()
    )


def _bytes_of(index: Index) -> int:
    parts = {(p.file, p.offset): p.nbytes for t in index.tensors.values() for p in t.parts}
    return sum(parts.values())


def _row(tensor: SavedTensor) -> tuple[str, ...]:
    return (
        tensor.name,
        tensor.dtype,
        str(list(tensor.shape)),
        bytes_text(tensor.nbytes),
        str(len(tensor.parts)),
        checksum(tensor),
    )


def checksum(tensor: SavedTensor) -> str:
    """The CRC-32 of a tensor's checksums: equal for the same elements in the same parts."""
    sums = b"".join(crc.to_bytes(4, "little") for part in tensor.parts for crc in part.crc32)
    return f"{zlib.crc32(sums):08x}"


def _pictures(tensors: list[SavedTensor], most: int, width: int) -> Iterable[StyledLine]:
    """A picture of each layout, with the names of the tensors that have it."""
    layouts: dict[tuple[object, ...], list[SavedTensor]] = {}
    for tensor in tensors:
        if len(tensor.parts) > 1 and tensor.shape:
            key = (tensor.shape, tuple(part.box for part in tensor.parts), tensor.layout)
            layouts.setdefault(key, []).append(tensor)
    for alike in list(layouts.values())[:most]:
        first = alike[0]
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        writers = [_writer(part.file) for part in first.parts]
        yield []
        yield [(f"{first.name}{more}: {list(first.shape)}", "bold")]
        if first.layout:
            yield [(first.layout, "")]
        lines = draw(
            first.shape,
            [part.box for part in first.parts],
            [[f"rank {writer}", writer] for writer in writers],
            PictureSize(width, 14, 12, 4),
        )
        yield from coloured_picture(lines, lambda at, w=writers: _colour(w[at]))  # type: ignore[misc]
    if len(layouts) > most:
        yield []
        yield [(f"… and {len(layouts) - most} more layouts: name tensors to see theirs", "")]


def _writer(file: str) -> str:
    match = _RANK.search(file)
    return match[1] if match else "?"


def _colour(writer: str) -> str:
    return COLOURS[int(writer) % len(COLOURS)] if writer.isdecimal() else COLOURS[0]


def _values(state: FlatState) -> Iterable[StyledLine]:
    values = [
        (dotted(path), leaf)
        for path, leaf in state.leaves.items()
        if isinstance(leaf, Value | PerRank)
    ]
    if values:
        yield []
        yield [("values", "bold")]
    for name, leaf in values[:_LISTED]:
        text = f"{len(leaf.variants)} variants" if isinstance(leaf, PerRank) else _value(leaf)
        yield [(f"{name} = {text if len(text) <= 60 else text[:57] + '…'}", "")]
    if len(values) > _LISTED:
        yield [(f"… and {len(values) - _LISTED:,} more", "")]


def _value(leaf: Value) -> str:
    """The value as Python writes it; of kinds that are not known here, as it is saved."""
    try:
        return repr(decode_value(leaf.json))
    except ValueError:
        return str(leaf.json)
