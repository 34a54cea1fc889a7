"""Safetensors: a file, or several with Hugging Face's index."""

from __future__ import annotations

from tilework.checkpoint.flat_state import FlatState, NamedTensor
from tilework.checkpoint.formats.source import IndexedSource, Source
from tilework.checkpoint.memory import byte_view
from tilework.checkpoint.places import AnyPath
from tilework.checkpoint.safetensors_index import (
    HF_INDEX,
    index_json,
    place_of,
    plan_file,
    plan_published,
    safetensors_index,
)
from tilework.checkpoint.storage import UNFINISHED
from tilework.layout.internal import whole_box


def open_safetensors(path: AnyPath) -> Source:
    """The tensors of a file, or of a folder with Hugging Face's index.

    Raises:
        CheckpointError: A file is missing or damaged, or the index is invalid.
    """
    storage, index = safetensors_index(path)
    flat = FlatState({(key,): NamedTensor(key) for key in index.tensors}, {(): "dict"})
    return IndexedSource(storage, index, flat, verify=False)


def write_safetensors(source: Source, path: AnyPath, file_bytes: int) -> None:
    """Write the tensors of a source to a file, or to a folder of files with an index.

    Values that are not tensors are left out, as the format has none.

    Args:
        source: The source.
        path: A file's name that ends with ``.safetensors``, or a folder.
        file_bytes: The maximum of bytes of a file in a folder; a larger tensor has a file alone.

    Raises:
        CheckpointError: A file cannot be written.
    """
    storage, name = place_of(path)
    if name is not None:
        plans = [plan_file(name, source.tensors)]
    else:
        plans = plan_published(source.tensors, file_bytes)
    storage.prepare()
    numbers = {tensor.name: number for number, tensor in enumerate(source.tensors)}
    for plan in plans:
        storage.remove(f"{plan.name}{UNFINISHED}")  # from an unfinished conversion
        with storage.create(plan.name) as file:
            file.write(plan.header)
            for number in (numbers[each] for each in plan.offsets):
                for piece in source.elements(number, whole_box(source.tensors[number].shape)):
                    file.write(byte_view(piece))
            file.finish()
    if len(plans) > 1:
        storage.remove(f"{HF_INDEX}{UNFINISHED}")
        with storage.create(HF_INDEX) as file:
            file.write(index_json(plans).encode())
            file.finish()
    storage.sync()
