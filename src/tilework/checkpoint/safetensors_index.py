"""The index of safetensors files: of one, or of several with Hugging Face's index."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tilework.checkpoint.composing import UNCHECKED_BYTES
from tilework.checkpoint.dtypes import DTYPES
from tilework.checkpoint.format import INDEX_NAME, Index, Part, SavedFile, SavedTensor, chunk_count
from tilework.checkpoint.index_text import FILE_NAME, RESERVED_KEY, whole_numbers
from tilework.checkpoint.saving import is_ours
from tilework.checkpoint.storage import UNFINISHED, Storage
from tilework.errors import CheckpointError
from tilework.layout.box import whole_box

#: Hugging Face's name of the index of several files, and that of one file.
HF_INDEX = "model.safetensors.index.json"
HF_FILE = "model.safetensors"
_SHARD = re.compile(r"model-[0-9]{5,}-of-([0-9]{5,})\.safetensors")
_MOST_HEADER = 100 << 20


def is_published(names: Sequence[str]) -> bool:
    """True if a folder with files of these names has safetensors files, and none of our saves.

    Example:
        >>> is_published(["config.json", "model.safetensors"]), is_published(["config.json"])
        (True, False)
    """
    return HF_INDEX in names or (
        any(name.endswith(".safetensors") for name in names) and not any(map(is_ours, names))
    )


def published_index(storage: Storage, names: Iterable[str] | None = None) -> Index:
    """The index of files that have none of tilework's, from the heads of the files. Local.

    Args:
        storage: The folder.
        names: The files; None: those that Hugging Face's index names, or all safetensors files.

    Raises:
        CheckpointError: A file is missing or damaged, or the index is not as it must be.
    """
    tensors: dict[str, SavedTensor] = {}
    files: dict[str, SavedFile] = {}
    for name in dict.fromkeys(_listed_files(storage) if names is None else names):
        nbytes, entries = _header_of(storage, name)
        files[name] = SavedFile(nbytes, 0)
        for key, part, dtype in entries:
            if key in tensors:
                raise CheckpointError(f"{storage.where(name)}: {key!r} is in another file, too")
            tensors[key] = SavedTensor(key, dtype, part.box.sizes, (part,))
    return Index(tensors, files, chunk_bytes=UNCHECKED_BYTES)


def _listed_files(storage: Storage) -> list[str]:
    names = storage.names()
    if HF_INDEX not in names:
        names = [name for name in names if name.endswith(".safetensors")]
        _check_complete(storage, names)
        return names
    where = storage.where(HF_INDEX)
    try:
        listed = json.loads(storage.read_all(HF_INDEX))["weight_map"].values()
        files = sorted({str(name) for name in listed})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} is no index of safetensors: {error}", file=where) from None
    for name in files:
        if not FILE_NAME.fullmatch(name) or ".." in name:
            raise CheckpointError(f"{where} names the file {name!r}: only plain ones are allowed")
    return files


def _check_complete(storage: Storage, names: list[str]) -> None:
    """Raise if files without an index are some of several, of which others may be missing."""
    shards = [match for match in map(_SHARD.fullmatch, names) if match]
    unfinished = any(map(is_ours, names))
    if unfinished or any(len(shards) != int(match[1]) for match in shards):
        missing = INDEX_NAME if unfinished else HF_INDEX
        raise CheckpointError(
            f"{storage.location} has files of a checkpoint, but no {missing}: it was not written "
            f"to the end. Use another one",
            file=storage.location,
        )


def _header_of(storage: Storage, name: str) -> tuple[int, list[tuple[str, Part, str]]]:
    """A file's length, and its tensors."""
    where = storage.where(name)
    reader = storage.open(name)
    try:
        start = bytearray(8)
        if reader.read_into(memoryview(start), 0) < len(start):
            raise CheckpointError(
                f"{where} is no safetensors file: it has {reader.nbytes} bytes", file=where
            )
        length = int.from_bytes(start, "little")
        if length > min(_MOST_HEADER, reader.nbytes - 8):
            raise CheckpointError(
                f"{where} is no safetensors file: its header is too long", file=where
            )
        text = bytearray(length)
        reader.read_into(memoryview(text), 8)
        listed = json.loads(text)
        listed.pop(RESERVED_KEY, None)
        entries = [
            (key, _part_of(key, each, name, 8 + length, reader.nbytes), each["dtype"])
            for key, each in listed.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} is no safetensors file: {error}", file=where) from None
    finally:
        reader.close()
    return reader.nbytes, entries


def _part_of(key: str, listed: dict[str, Any], name: str, begin: int, length: int) -> Part:
    dtype, shape = listed["dtype"], whole_numbers(listed["shape"])
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{key!r} has dtype {dtype!r}, which is not known")
    start, stop = whole_numbers(listed["data_offsets"])
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if stop - start != nbytes or not start <= stop <= length - begin:
        raise ValueError(f"{key!r} does not lie in the file as its shape says")
    sums = (0,) * chunk_count(nbytes, UNCHECKED_BYTES)
    return Part(whole_box(shape), name, begin + start, nbytes, sums)


def is_shard(name: str) -> bool:
    """True for the name of a file of several, finished or not.

    Example:
        >>> is_shard("model-00001-of-00002.safetensors.part"), is_shard("model.safetensors")
        (True, False)
    """
    return _SHARD.fullmatch(name.removesuffix(UNFINISHED)) is not None
