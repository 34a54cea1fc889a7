"""Verifying a checkpoint, and comparing two: tensor by tensor, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from tilework.checkpoint.flat_state import FlatState, FlatValue, PerRank, dotted
from tilework.checkpoint.format import Index, Part, SavedTensor, stored
from tilework.checkpoint.index_text import RESERVED_KEY, file_keys, read_index, saved_state
from tilework.checkpoint.progress import Progress
from tilework.checkpoint.reading import BOUNCE_BYTES, PartReader, read_region
from tilework.checkpoint.save_planning import cut_box
from tilework.checkpoint.storage import Storage
from tilework.checkpoint.system_errors import checkpoint_errors
from tilework.checkpoint.tensor_bytes import DTYPES, crc32
from tilework.checkpoint.url_storage import AnyPath, storage_at
from tilework.errors import CheckpointError
from tilework.layout.internal import whole_box


@checkpoint_errors()
def verify(path: AnyPath, progress: Callable[[int], None] = lambda nbytes: None) -> list[str]:
    """Read all of a checkpoint, and list the problems. Local; in bounded memory.

    The headers and the elements of all files are compared with the checksums in the index, and the
    headers with the index itself.

    Args:
        progress: Called after each read with the number of bytes that were read.

    Returns:
        A line for each problem, which names the file; empty if every byte is as it was written.

    Raises:
        CheckpointError: There is no checkpoint, or the index is damaged.

    Example: see docs/how-to/checkpoints.md.
    """
    storage = storage_at(path)
    index = read_index(storage)
    problems: list[str] = []
    for name, expected in _headers(index).items():
        try:
            _check_header(storage, index, name, expected)
        except CheckpointError as error:
            problems.append(str(error))
    with closing(PartReader(storage, index)) as reader:
        for tensor in index.tensors.values():
            problems.extend(_damages(reader, tensor, progress))
    try:
        saved_state(index, storage)
    except CheckpointError as error:
        problems.append(str(error))
    return list(dict.fromkeys(problems))


_Header = dict[str, tuple[str, list[int], list[int]]]
#: What to do about a file that cannot be used, for errors.
_REMEDY = "Copy the file again if the checkpoint was copied; else use another checkpoint"


def _headers(index: Index) -> dict[str, _Header]:
    pieces: dict[str, dict[tuple[int, int], tuple[SavedTensor, Part]]] = {}
    for tensor in index.tensors.values():
        for part in tensor.parts:
            place = part.offset, part.offset + part.nbytes
            # The first name counts, if tied weights have several.
            pieces.setdefault(part.file, {}).setdefault(place, (tensor, part))
    headers: dict[str, _Header] = {name: {} for name in index.files}
    for file, own in pieces.items():
        ordered = [(*own[place], list(place)) for place in sorted(own)]
        keys = file_keys((tensor.name, tensor.shape, part.box) for tensor, part, _ in ordered)
        for key, (tensor, part, span) in zip(keys, ordered, strict=True):
            dtype, sizes = stored(tensor.dtype, part.box.sizes)
            headers[file][key] = (dtype, list(sizes), span)
    return headers


def _check_header(storage: Storage, index: Index, name: str, expected: _Header) -> None:
    where, saved = storage.where(name), index.files[name]
    begin = min((span[0] for _, _, span in expected.values()), default=saved.nbytes)
    with closing(storage.open(name)) as reader:
        if reader.nbytes != saved.nbytes:
            raise CheckpointError(
                f"{where} has {reader.nbytes:,} bytes, the index says {saved.nbytes:,}: the file "
                f"is truncated, or of another checkpoint. {_REMEDY}",
                file=where,
            )
        header = bytearray(begin)
        reader.read_into(memoryview(header), 0)
    if crc32(memoryview(header)) != saved.header_crc32:
        raise CheckpointError(
            f"{where}: the header is damaged, and does not fit the CRC-32 in the index. {_REMEDY}",
            file=where,
        )
    try:
        listed = json.loads(header[8:])
        listed.pop(RESERVED_KEY, None)
        found = {
            key: (each["dtype"], each["shape"], [begin + at for at in each["data_offsets"]])
            for key, each in listed.items()
        }
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: the header is invalid as safetensors ({error}). {_REMEDY}", file=where
        ) from None
    if found != expected:
        raise CheckpointError(
            f"{where}: the header lists other names, dtypes, shapes or places than the index. "
            f"{_REMEDY}",
            file=where,
        )


def _damages(
    reader: PartReader, tensor: SavedTensor, progress: Callable[[int], None]
) -> Iterator[str]:
    chunk = reader.index.chunk_bytes
    step = max(1, BOUNCE_BYTES // chunk) * chunk
    longest = max((part.nbytes for part in tensor.parts), default=0)
    memory = memoryview(bytearray(min(step, longest)))
    for part in tensor.parts:
        for start in range(0, part.nbytes, step):
            nbytes = min(step, part.nbytes - start)
            try:
                reader.read_chunks(tensor, part, start, memory[:nbytes])
            except CheckpointError as error:
                yield str(error)
                break
            progress(nbytes)


# -- comparing ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A difference of two checkpoints."""

    name: str
    text: str


@checkpoint_errors()
def diff(a: AnyPath, b: AnyPath) -> list[Difference]:
    """The differences of two checkpoints: names, shapes, dtypes, elements and values. Local.

    Layouts and files are ignored. Tensors in the same parts with equal checksums count as equal;
    other tensors are read, in bounded memory.

    Raises:
        CheckpointError: One of them is not a checkpoint, or is damaged.

    Example: see docs/how-to/checkpoints.md.
    """
    with (
        closing(_reader(a)) as first,
        closing(_reader(b)) as second,
        Progress(f"comparing {a} and {b}") as progress,
    ):
        first.progress = second.progress = progress
        progress.total = _bytes_to_read(first, second)
        return [*_different_tensors(first, second), *_different_values(first, second)]


def _reader(path: AnyPath) -> PartReader:
    storage = storage_at(path)
    return PartReader(storage, read_index(storage))


def _different_tensors(a: PartReader, b: PartReader) -> Iterator[Difference]:
    first, second = a.index.tensors, b.index.tensors
    for name in dict.fromkeys([*first, *second]):
        if name not in second or name not in first:
            yield Difference(name, f"only in the {'first' if name in first else 'second'}")
            continue
        x, y = first[name], second[name]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            yield Difference(
                name,
                f"{x.dtype}{list(x.shape)} in the first, {y.dtype}{list(y.shape)} in the second",
            )
        elif _may_differ(a, x, b, y):
            text = _different_elements(a, x, b, y)
            if text:
                yield Difference(name, text)


def _may_differ(a: PartReader, x: SavedTensor, b: PartReader, y: SavedTensor) -> bool:
    """True unless checksums show that two tensors of one shape and dtype are equal."""
    return a.index.chunk_bytes != b.index.chunk_bytes or _content(x) != _content(y)


def _bytes_to_read(a: PartReader, b: PartReader) -> int:
    pairs = [(x, b.index.tensors[n]) for n, x in a.index.tensors.items() if n in b.index.tensors]
    alike = [(x, y) for x, y in pairs if (x.shape, x.dtype) == (y.shape, y.dtype)]
    return sum(x.nbytes + y.nbytes for x, y in alike if _may_differ(a, x, b, y))


def _content(tensor: SavedTensor) -> list[Any]:
    return [(part.box, part.crc32) for part in tensor.parts]


def _different_elements(a: PartReader, x: SavedTensor, b: PartReader, y: SavedTensor) -> str:
    count, most = 0, 0.0
    for box in cut_box(whole_box(x.shape), x.itemsize, BOUNCE_BYTES):
        p, q = (torch.empty(box.sizes, dtype=DTYPES[x.dtype]) for _ in range(2))
        read_region(a, x, box, p)
        read_region(b, y, box, q)
        p, q = (_comparable(each) for each in (p, q))
        other = (p != q) & ~((p != p) & (q != q))
        differ = int(other.sum())
        if differ:
            count += differ
            distance = (p[other].double() - q[other].double()).abs()
            most = max(most, float(distance.nan_to_num(0.0).max()))
    of = whole_box(x.shape).volume
    return f"{count:,} of {of:,} elements differ, by at most {most:.4g}" if count else ""


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor


def _different_values(a: PartReader, b: PartReader) -> Iterator[Difference]:
    first, second = (_values(saved_state(each.index, each.storage)) for each in (a, b))
    for name in dict.fromkeys([*first, *second]):
        if name not in second or name not in first:
            yield Difference(name, f"only in the {'first' if name in first else 'second'}")
        elif first[name] != second[name]:
            yield Difference(name, f"{_short(first[name])} and {_short(second[name])}")


def _values(state: FlatState) -> Mapping[str, Any]:
    values = {}
    for path, leaf in state.leaves.items():
        for ranks, each in leaf.variants if isinstance(leaf, PerRank) else [((), leaf)]:
            if isinstance(each, FlatValue):
                at = f"@{ranks[0]}" if ranks else ""
                values[f"{dotted(path)}{at}"] = each.json
    return values


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
