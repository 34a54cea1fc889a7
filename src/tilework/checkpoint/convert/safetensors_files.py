"""Safetensors: a file, or several with Hugging Face's index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from tilework.checkpoint.api import AnyPath, storage_at
from tilework.checkpoint.convert.source import IndexedSource, Source
from tilework.checkpoint.dtypes import stored
from tilework.checkpoint.flat_state import FlatState, NamedTensor
from tilework.checkpoint.format import Index
from tilework.checkpoint.index_text import RESERVED_KEY
from tilework.checkpoint.memory import byte_view
from tilework.checkpoint.safetensors_index import HF_FILE, HF_INDEX, published_index
from tilework.checkpoint.save_planning import TensorToSave, safetensors_header
from tilework.checkpoint.storage import UNFINISHED, Storage, is_url
from tilework.errors import CheckpointError
from tilework.layout.box import whole_box


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
    return storage, published_index(storage, None if name is None else [name])


def _place(path: AnyPath) -> tuple[Storage, str | None]:
    """The folder of a file whose name ends with ``.safetensors``, and the name; else a folder."""
    if not str(path).endswith(".safetensors") or (not is_url(path) and Path(path).is_dir()):
        return storage_at(path), None
    if is_url(path):
        folder, _, name = str(path).rpartition("/")
        return storage_at(folder), name
    return storage_at(Path(path).parent), Path(path).name


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
