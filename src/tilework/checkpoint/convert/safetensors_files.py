"""Safetensors: a file, or several with Hugging Face's index."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tilework.checkpoint.api import AnyPath, storage_at
from tilework.checkpoint.convert.source import IndexedSource, Source
from tilework.checkpoint.dtypes import DTYPES, stored
from tilework.checkpoint.flat_state import FlatState, NamedTensor
from tilework.checkpoint.format import INDEX_NAME, Index, Part, SavedFile, SavedTensor, chunk_count
from tilework.checkpoint.index_text import FILE_NAME, RESERVED_KEY, whole_numbers
from tilework.checkpoint.memory import byte_view
from tilework.checkpoint.save_planning import TensorToSave, safetensors_header
from tilework.checkpoint.saving import is_ours
from tilework.checkpoint.storage import UNFINISHED, Storage, is_url
from tilework.errors import CheckpointError
from tilework.layout.box import whole_box

#: Hugging Face's name of the index of several files, and that of one file.
HF_INDEX = "model.safetensors.index.json"
HF_FILE = "model.safetensors"
_SHARD = re.compile(r"model-[0-9]{5,}-of-([0-9]{5,})\.safetensors")
_MOST_HEADER = 100 << 20


def open_safetensors(path: AnyPath) -> Source:
    """The tensors of a file, or of a folder with Hugging Face's index.

    Raises:
        CheckpointError: A file is missing or damaged, or the index is not as it must be.
    """
    storage, index = safetensors_index(path)
    flat = FlatState({(key,): NamedTensor(key) for key in index.tensors}, {(): "dict"})
    return IndexedSource(storage, index, flat, verify=False)


def safetensors_index(path: AnyPath) -> tuple[Storage, Index]:
    """The places of the tensors of :func:`open_safetensors`, from the headers of the files.

    Raises:
        CheckpointError: A file is missing or damaged, or the index is not as it must be.
    """
    storage, name = _place(path)
    names = dict.fromkeys(_listed_files(storage) if name is None else [name])
    tensors: dict[str, SavedTensor] = {}
    files: dict[str, SavedFile] = {}
    for name in names:
        nbytes, entries = _header_of(storage, name)
        files[name] = SavedFile(nbytes, 0)
        for key, part, dtype in entries:
            if key in tensors:
                raise CheckpointError(f"{storage.where(name)}: {key!r} is in another file, too")
            tensors[key] = SavedTensor(key, dtype, part.box.sizes, (part,))
    return storage, Index(tensors, files)


def _place(path: AnyPath) -> tuple[Storage, str | None]:
    """The folder of a file whose name ends with ``.safetensors``, and the name; else a folder."""
    if not str(path).endswith(".safetensors") or (not is_url(path) and Path(path).is_dir()):
        return storage_at(path), None
    if is_url(path):
        folder, _, name = str(path).rpartition("/")
        return storage_at(folder), name
    return storage_at(Path(path).parent), Path(path).name


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
    sums = (0,) * chunk_count(nbytes, 1 << 20)
    return Part(whole_box(shape), name, begin + start, nbytes, sums)


def write_safetensors(source: Source, path: AnyPath, file_bytes: int) -> None:
    """Write the tensors of a source: a file, or a folder of several with an index.

    Values are left out: the format has none.

    Args:
        source: The source.
        path: A file's name that ends with ``.safetensors``, or a folder.
        file_bytes: The most bytes of a file in a folder; a larger tensor has one of its own.

    Raises:
        CheckpointError: A file cannot be written.
    """
    numbers = list(range(len(source.tensors)))
    _check_names(tensor.name for tensor in source.tensors)
    storage, name = _place(path)
    storage.prepare()
    if name is not None:
        _write_file(storage, name, source, numbers)
        return
    groups = list(_grouped(source.tensors, file_bytes))
    weight_map: dict[str, str] = {}
    for at, group in enumerate(groups, 1):
        several = f"model-{at:05}-of-{len(groups):05}.safetensors"
        file_name = several if len(groups) > 1 else HF_FILE
        _write_file(storage, file_name, source, group)
        weight_map.update({source.tensors[number].name: file_name for number in group})
    if len(groups) > 1:
        total = sum(math.prod(t.shape) * t.itemsize for t in source.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        storage.remove(f"{HF_INDEX}{UNFINISHED}")
        with storage.create(HF_INDEX) as file:
            file.write(json.dumps(index, indent=2).encode())
            file.finish()
    storage.sync()


def _check_names(names: Iterable[str]) -> None:
    """Raise CheckpointError for a name that no safetensors file can have."""
    for name in names:
        is_text = name.isascii() or name == name.encode(errors="replace").decode()
        if name == RESERVED_KEY or not is_text:
            raise CheckpointError(
                f"safetensors has no tensors of the name {name!r}: give others by a prefix, or "
                f"leave it out (names)",
                tensor=name,
            )


def is_shard(name: str) -> bool:
    """True for the name of a file of several, finished or not.

    Example:
        >>> is_shard("model-00001-of-00002.safetensors.part"), is_shard("model.safetensors")
        (True, False)
    """
    return _SHARD.fullmatch(name.removesuffix(UNFINISHED)) is not None


def _grouped(tensors: list[TensorToSave], most_bytes: int) -> Iterator[list[int]]:
    group: list[int] = []
    used = 0
    for number, tensor in enumerate(tensors):
        nbytes = math.prod(tensor.shape) * tensor.itemsize
        if group and used + nbytes > most_bytes:
            yield group
            group, used = [], 0
        group.append(number)
        used += nbytes
    yield group


def _write_file(storage: Storage, name: str, source: Source, numbers: list[int]) -> None:
    ordered = sorted(numbers, key=lambda n: -source.tensors[n].itemsize)
    entries: dict[str, dict[str, object]] = {}
    begin = 0
    for number in ordered:
        tensor = source.tensors[number]
        dtype, shape = stored(tensor.dtype, tensor.shape)
        end = begin + math.prod(tensor.shape) * tensor.itemsize
        entries[tensor.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    storage.remove(f"{name}{UNFINISHED}")  # of a conversion that did not end
    with storage.create(name) as file:
        file.write(safetensors_header(entries))
        for number in ordered:
            for piece in source.elements(number, whole_box(source.tensors[number].shape)):
                file.write(byte_view(piece))
        file.finish()
