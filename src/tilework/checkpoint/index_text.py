"""The text of an index: JSON that ends with a checksum of itself; checked when it is read."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tilework.checkpoint.flat_state import FlatState, NamedTensor, PerRank, state_of_json
from tilework.checkpoint.format import (
    FORMAT_NAME,
    INDEX_NAME,
    ITEM_BYTES,
    MOST_DEPTH,
    PREVIOUS_NAME,
    VERSION,
    Index,
    Part,
    SavedFile,
    SavedTensor,
    chunk_count,
)
from tilework.checkpoint.no_collections import no_collections
from tilework.checkpoint.storage import UNFINISHED, Storage
from tilework.checkpoint.values import decode_value
from tilework.errors import CheckpointError
from tilework.layout import Box, check_boxes

#: Plain names: no folders, nothing hidden, nothing special in a shell or another system.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_TAIL = re.compile(rb',\n"crc32": ([0-9]{1,10})\n\}\n')
#: What to do about an index that cannot be used, for errors.
_REMEDY = "Use another checkpoint, or save the state again"
#: The key of a safetensors file that does not name a tensor.
RESERVED_KEY = "__metadata__"
#: A tensor has no more dims than torch allows.
_MOST_DIMS = 64
_LARGEST = (1 << 63) - 1
#: The types that JSON nests.
_CONTAINERS = frozenset((dict, list))


def index_text(index: Index) -> bytes:
    """The contents of an index file for an index."""
    body = {
        "format": FORMAT_NAME,
        "version": VERSION,
        "created": index.created,
        "writer": index.writer,
        "world_size": index.world_size,
        "chunk_bytes": index.chunk_bytes,
        "meta": dict(index.meta),
        "files": {
            name: {"bytes": file.nbytes, "header_crc32": file.header_crc32}
            for name, file in index.files.items()
        },
        "tensors": {name: _tensor_json(tensor) for name, tensor in index.tensors.items()},
        "state": index.state,
    }
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False, separators=(',', ':'))}"
        for key, value in body.items()
    ]
    text = ("{\n" + ",\n".join(lines)).encode()
    return text + b',\n"crc32": %d\n}\n' % zlib.crc32(text)


def _tensor_json(tensor: SavedTensor) -> dict[str, Any]:
    listed: dict[str, Any] = {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "parts": [
            {
                "offsets": list(part.box.offsets),
                "sizes": list(part.box.sizes),
                "file": part.file,
                "begin": part.offset,
                "bytes": part.nbytes,
                "crc32": list(part.crc32),
            }
            for part in tensor.parts
        ],
    }
    if tensor.layout:
        listed["layout"] = tensor.layout
    return listed


@no_collections()
def parse_index(text: bytes, where: str) -> Index:
    """The index in a file's text, once it has passed all checks that need no other files."""

    def refused(problem: str, tensor: str = "") -> CheckpointError:
        about = f", tensor {tensor!r}" if tensor else ""
        return CheckpointError(f"{where}{about}: {problem}", file=where, tensor=tensor)

    body = _checked_json(text, refused)
    try:
        return _index_of(body, refused)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise refused(
            f"the index is not as docs/format.md says ({type(error).__name__}: {error}). {_REMEDY}"
        ) from error


Refusal = Callable[..., CheckpointError]


def _checked_json(text: bytes, refused: Refusal) -> Any:
    tail = _TAIL.search(text, max(0, len(text) - 40))
    if tail is None or tail.end() != len(text):
        _loaded(text, refused)  # whose errors say more
        raise refused(
            f"the index does not end with a checksum: the file is truncated or damaged. {_REMEDY}"
        )
    found, expected = zlib.crc32(text[: tail.start()]), int(tail[1])
    if found != expected:
        raise refused(
            f"the index is damaged: the CRC-32 is {found}, and the index says {expected}. {_REMEDY}"
        )
    return _loaded(text, refused)


def _loaded(text: bytes, refused: Refusal) -> Any:
    try:
        body = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        _check_depth(body)
    except (ValueError, RecursionError) as error:
        raise refused(
            f"this is not the index of a checkpoint ({error or 'nested too deep'}): give the path "
            f"of a folder that checkpoint.save() has written"
        ) from None
    _check_version(body, refused)
    return body


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is there twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"the number {name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.20} is not a finite number")
    return number


def check_meta(meta: Any) -> None:
    """Raise unless an index can hold the program's ``meta`` and read it again."""
    if not isinstance(meta, Mapping):
        raise TypeError(f"meta must be a dict of plain JSON, got {type(meta).__name__}")
    try:
        text = json.dumps(dict(meta), allow_nan=False)
        _check_depth([json.loads(text, object_pairs_hook=_without_duplicates)])
    except RecursionError:
        raise ValueError(f"meta is nested more than {MOST_DEPTH - 1} deep") from None
    except TypeError as error:
        raise TypeError(f"meta must be plain JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"meta must be plain JSON: {error}") from None


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
        inner = [each for each in level if type(each) in _CONTAINERS]
        level = [v for each in inner for v in (each.values() if type(each) is dict else each)]


def _check_version(body: Any, refused: Refusal) -> None:
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        raise refused(
            f"this is not the index of a checkpoint: its format is not {FORMAT_NAME!r}. Give the "
            f"path of a folder that checkpoint.save() has written"
        )
    version = body.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise refused(
            f"the checkpoint has version {version!r} of the format, and this version of tilework "
            f"reads versions up to {VERSION}: read the checkpoint with a later version of tilework"
        )


def _index_of(body: Mapping[str, Any], refused: Refusal) -> Index:
    files = {
        _file_name(name, refused): SavedFile(_number(f["bytes"]), _number(f["header_crc32"]))
        for name, f in body["files"].items()
    }
    chunk_bytes = _number(body["chunk_bytes"])
    if chunk_bytes < 16 or chunk_bytes % 16:
        raise ValueError(f"chunk_bytes is {chunk_bytes}, not a multiple of 16")
    if not isinstance(body["meta"], dict):
        raise TypeError("meta is not an object")
    known = _KnownBoxes()
    tensors = {
        name: _tensor_of(name, listed, (files, chunk_bytes, known), refused)
        for name, listed in body["tensors"].items()
    }
    _check_ranges(tensors, refused)
    return Index(
        tensors,
        files,
        body["state"],
        _number(body["world_size"]),
        chunk_bytes,
        body["meta"],
        str(body["created"]),
        str(body["writer"]),
    )


def _file_name(name: str, refused: Refusal) -> str:
    if not FILE_NAME.fullmatch(name) or ".." in name:
        raise refused(
            f"the index names the file {name!r}: only plain names in its own folder are allowed. "
            f"{_REMEDY}"
        )
    return name


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r} is not an integer from 0 on")
    return value


def number_list(values: Any) -> tuple[int, ...]:
    """A list of JSON that must consist of integers from 0 on, such as a shape, as a tuple."""
    if not isinstance(values, list):
        raise TypeError(f"{values!r} is not a list of integers")
    if values and (set(map(type, values)) != {int} or min(values) < 0 or max(values) > _LARGEST):
        return tuple(map(_number, values))  # raises with the reason
    return tuple(values)


class _KnownBoxes:
    """A cache of boxes, and of the shapes that lists of boxes cover: layers repeat them."""

    def __init__(self) -> None:
        self._boxes: dict[object, tuple[Box, int]] = {}
        self._covered: set[object] = set()

    def box(self, offsets: Any, sizes: Any) -> tuple[Box, int]:
        """The box with these offsets and sizes, and the number of elements."""
        known = self._boxes.get((tuple(offsets), tuple(sizes)))
        if known is None:
            box = Box(number_list(offsets), number_list(sizes))
            known = self._boxes[box.offsets, box.sizes] = box, box.volume
        return known

    def check_cover(self, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
        key = shape, tuple(map(id, boxes))  # the boxes are kept
        if key not in self._covered:
            check_boxes(shape, boxes)
            self._covered.add(key)


def _tensor_of(
    name: str,
    listed: Mapping[str, Any],
    about: tuple[Mapping[str, SavedFile], int, _KnownBoxes],
    refused: Refusal,
) -> SavedTensor:
    try:
        dtype, shape = listed["dtype"], number_list(listed["shape"])
        if dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {dtype!r} is not known")
        itemsize = ITEM_BYTES[dtype]
        if len(shape) > _MOST_DIMS or math.prod(max(n, 1) for n in shape) * itemsize > _LARGEST:
            raise ValueError(f"the shape {list(shape)} is too large")
        parts = tuple([_part_of(part, itemsize, *about) for part in listed["parts"]])
        about[2].check_cover(shape, [part.box for part in parts])
        layout = listed.get("layout", "")
        if not isinstance(layout, str):
            raise TypeError("layout is not a string")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise refused(f"the index describes the tensor wrongly: {error}. {_REMEDY}", name) from None
    return SavedTensor(name, dtype, shape, parts, layout)


def _part_of(
    listed: Mapping[str, Any],
    itemsize: int,
    files: Mapping[str, SavedFile],
    chunk_bytes: int,
    known: _KnownBoxes,
) -> Part:
    box, volume = known.box(listed["offsets"], listed["sizes"])
    file, begin, nbytes = listed["file"], _number(listed["begin"]), _number(listed["bytes"])
    if file not in files:
        raise ValueError(f"the part {box} is in {file!r}, which is not among the files")
    if nbytes != volume * itemsize:
        raise ValueError(f"the part {box} has {nbytes} bytes instead of {volume * itemsize}")
    if begin + nbytes > files[file].nbytes:
        raise ValueError(
            f"the part {box} ends at byte {begin + nbytes} of {file}, which has "
            f"{files[file].nbytes}"
        )
    checksums = number_list(listed["crc32"])
    if len(checksums) != chunk_count(nbytes, chunk_bytes):
        raise ValueError(
            f"the part {box} has {len(checksums)} checksums instead of "
            f"{chunk_count(nbytes, chunk_bytes)}"
        )
    if max(checksums, default=0) >> 32:
        raise ValueError(f"the part {box} has a checksum of more than 32 bits")
    return Part(box, file, begin, nbytes, checksums)


def _check_ranges(tensors: Mapping[str, SavedTensor], refused: Refusal) -> None:
    """Raise if parts overlap in a file, unless they are the same bytes, as of tied weights."""
    spans = sorted(
        (part.file, part.offset, part.offset + part.nbytes, name)
        for name, tensor in tensors.items()
        for part in tensor.parts
        if part.nbytes
    )
    last = ("", 0, 0, "")
    for span in spans:
        if span[0] == last[0] and span[1] < last[2] and span[1:3] != last[1:3]:
            raise refused(
                f"the tensor shares bytes of {span[0]} with the tensor {last[3]!r}, and begins "
                f"or ends elsewhere. {_REMEDY}",
                span[3],
            )
        last = span


def file_keys(pieces: Iterable[tuple[str, tuple[int, ...], Box]]) -> list[str]:
    """The unique key of each box in a safetensors file, from names and shapes of tensors: the name,
    followed by the box if it is not the whole tensor, and by a number if the key is used already.
    """
    taken = {RESERVED_KEY}
    keys = []
    for name, shape, box in pieces:
        key = name if box.sizes == shape else f"{name}{box}"
        # Some strings of Python have no counterpart in UTF-8.
        plain = key if key.isascii() else key.encode(errors="replace").decode()
        keys.append(unique_name(plain, taken))
    return keys


def unique_name(name: str, taken: set[str]) -> str:
    """The name, with a number appended if ``taken`` has the name; adds the result to ``taken``."""
    number, unique = 2, name
    while unique in taken:
        unique, number = f"{name}~{number}", number + 1
    taken.add(unique)
    return unique


# If renames replace files, a rename does this. Elsewhere, as at URLs, a file that is rewritten may
# be torn for a while, or for ever. There the old index is first written to a second file, and
# removed afterwards: a reader that finds the first file torn or missing reads the second.

DATA_FILE = re.compile(r"[0-9a-f]{8}-rank[0-9]{5,}-[0-9]{5,}\.safetensors")


def is_checkpoint(names: list[str], storage: Storage) -> bool:
    """True if a folder with files of these names has an index file, which may be damaged."""
    return INDEX_NAME in names or (storage.writes_in_place and PREVIOUS_NAME in names)


def is_ours(name: str) -> bool:
    """True for the names that saves give to files, except the index and the lock."""
    finished = name.removesuffix(UNFINISHED)
    if finished == INDEX_NAME:
        return finished != name
    return finished == PREVIOUS_NAME or DATA_FILE.fullmatch(finished) is not None


def read_index(storage: Storage) -> Index:
    """The index of a checkpoint; a CheckpointError if there is none, or it is damaged. Local."""
    return read_counting(storage)[1]


def saved_state(
    index: Index, storage: Storage, check: Callable[[Any], object] = decode_value
) -> FlatState:
    """The state in an index. ``check`` may refuse the JSON of a value."""
    where = storage.where(INDEX_NAME)
    try:
        state = state_of_json(index.state, check)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: the state in the index cannot be read: {error}. Use another checkpoint, or "
            f"save the state again",
            file=where,
        ) from None
    for name in (name for leaf in state.leaves.values() for name in names_of(leaf)):
        if name not in index.tensors:
            raise CheckpointError(
                f"{where} is damaged: the state in the index names the tensor {name!r}, and the "
                f"index lists no such tensor. Use another checkpoint, or save the state again",
                file=where,
            )
    return state


def names_of(leaf: Any) -> list[str]:
    """The names of the tensors that a leaf stands for, one for each variant that is a tensor."""
    if isinstance(leaf, PerRank):
        return [name for _, each in leaf.variants for name in names_of(each)]
    return [leaf.name] if isinstance(leaf, NamedTensor) else []


def read_counting(storage: Storage) -> tuple[str, Index]:
    """The name of the index file that counts (the first that is valid), and the index. Local."""
    try:
        return INDEX_NAME, _read(storage, INDEX_NAME)
    except CheckpointError as error:
        names = storage.names()
        if storage.writes_in_place:
            if PREVIOUS_NAME in names:
                with suppress(CheckpointError):
                    return PREVIOUS_NAME, _read(storage, PREVIOUS_NAME)
            if INDEX_NAME in names:
                return INDEX_NAME, _read(storage, INDEX_NAME)  # it may have been replaced meanwhile
        if INDEX_NAME not in names:
            nothing = "" if names else "; there is no such folder, or nothing in it"
            raise CheckpointError(
                f"{storage.location} is not a checkpoint: it has no {INDEX_NAME}, which a "
                f"save writes last{nothing}",
                file=storage.location,
            ) from None
        raise error


def write_index(storage: Storage, index: Index) -> None:
    """Write the index of a folder; the old index stays valid if that fails. Local."""
    before = _kept(storage) if storage.writes_in_place else None
    try:
        _write(storage, INDEX_NAME, index_text(index))
    except BaseException:
        if before is not None:
            with suppress(OSError, CheckpointError):
                _write(storage, INDEX_NAME, before)
                storage.remove(PREVIOUS_NAME)
        raise
    storage.sync()
    if before is not None:
        storage.remove(PREVIOUS_NAME)


def _read(storage: Storage, name: str) -> Index:
    return parse_index(storage.read_all(name), storage.where(name))


def _kept(storage: Storage) -> bytes | None:
    """Keep the valid index in a second file, and return its text; None without a valid index."""
    names = storage.names()
    for name in (INDEX_NAME, PREVIOUS_NAME):
        if name not in names:
            continue
        with suppress(CheckpointError):
            text = storage.read_all(name)
            parse_index(text, storage.where(name))
            break
    else:
        return None
    if name == INDEX_NAME:
        _write(storage, PREVIOUS_NAME, text)
    return text


def _write(storage: Storage, name: str, text: bytes) -> None:
    with storage.create(name) as file:
        file.write(text)
        file.finish()
