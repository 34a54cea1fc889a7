"""Safetensors files, one or several with Hugging Face's index: existing or planned contents."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilework.checkpoint.composing import UNCHECKED_BYTES
from tilework.checkpoint.format import (
    INDEX_NAME,
    ITEM_BYTES,
    Index,
    Part,
    SavedFile,
    SavedTensor,
    TensorForm,
    chunk_count,
    stored,
)
from tilework.checkpoint.index_text import FILE_NAME, RESERVED_KEY, is_ours, number_list
from tilework.checkpoint.save_planning import packed_file
from tilework.checkpoint.storage import UNFINISHED, LinkedStorage, LocalStorage, Storage, is_url
from tilework.checkpoint.url_storage import AnyPath, storage_at
from tilework.errors import CheckpointError
from tilework.layout.internal import whole_box

#: Hugging Face's name of the index of several files, and of a single file.
HF_INDEX = "model.safetensors.index.json"
HF_FILE = "model.safetensors"
_SHARD = re.compile(r"model-(?:[0-9a-f]{8}-)?[0-9]{5,}-of-([0-9]{5,})\.safetensors")
_MOST_HEADER = 100 << 20
#: What to do about a file that cannot be read, for errors.
_REMEDY = "Download or copy the file again"


def is_published(names: Sequence[str]) -> bool:
    """True if a folder with files of these names has published weights, not tilework's files."""
    return HF_INDEX in names or (
        any(name.endswith(".safetensors") for name in names) and not any(map(is_ours, names))
    )


def with_links(storage: Storage) -> Storage:
    """A storage for the same folder that accepts links as files."""
    return LinkedStorage(storage.folder) if isinstance(storage, LocalStorage) else storage


def published_index(storage: Storage, names: Iterable[str] | None = None) -> Index:
    """Make an index for safetensors files (None: those that the folder lists) from headers."""
    tensors: dict[str, SavedTensor] = {}
    files: dict[str, SavedFile] = {}
    for name in dict.fromkeys(_listed_files(storage) if names is None else names):
        nbytes, entries = _header_of(storage, name)
        files[name] = SavedFile(nbytes, 0)
        for key, part, dtype in entries:
            if key in tensors:
                raise CheckpointError(
                    f"{storage.where(name)}: the tensor {key!r} is in another file of the folder, "
                    f"too: remove the file that does not belong to the model"
                )
            tensors[key] = SavedTensor(key, dtype, part.box.sizes, (part,))
    return Index(tensors, files, chunk_bytes=UNCHECKED_BYTES)


def safetensors_index(path: AnyPath) -> tuple[Storage, Index]:
    """The folder of a safetensors file or of several, and an index made from the headers."""
    place, name = place_of(path)
    storage = with_links(place)
    return storage, published_index(storage, None if name is None else [name])


def place_of(path: AnyPath) -> tuple[Storage, str | None]:
    """The folder and the name of a ``.safetensors`` file; a folder and None for other paths."""
    if not str(path).endswith(".safetensors") or (not is_url(path) and Path(path).is_dir()):
        return storage_at(path), None
    if is_url(path):
        folder, _, name = str(path).rpartition("/")
        return storage_at(folder), name
    return storage_at(Path(path).parent), Path(path).name


def _listed_files(storage: Storage) -> list[str]:
    names = storage.names()
    if HF_FILE in names:  # as in transformers, other files then do not count
        names = [name for name in names if name != HF_INDEX and not is_shard(name)]
    if HF_INDEX not in names:
        names = [name for name in names if name.endswith(".safetensors")]
        _check_complete(storage, names)
        return names
    where = storage.where(HF_INDEX)
    try:
        listed = json.loads(storage.read_all(HF_INDEX))["weight_map"].values()
        files = sorted({str(name) for name in listed})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not an index of safetensors files ({type(error).__name__}: {error}): get "
            f"the file again from where the model was published",
            file=where,
        ) from None
    for name in files:
        if not FILE_NAME.fullmatch(name) or ".." in name:
            raise CheckpointError(
                f"{where} names the file {name!r}: only plain names of files in the same folder "
                f"are allowed. Get the files again from where the model was published"
            )
    return files


def _check_complete(storage: Storage, names: list[str]) -> None:
    shards = [match for match in map(_SHARD.fullmatch, names) if match]
    unfinished = any(map(is_ours, names))
    if unfinished or any(len(shards) != int(match[1]) for match in shards):
        missing = INDEX_NAME if unfinished else HF_INDEX
        raise CheckpointError(
            f"{storage.location} has files of a checkpoint, but no {missing}: it was not written "
            f"to the end. Use another checkpoint, or get the missing files",
            file=storage.location,
        )


def _header_of(storage: Storage, name: str) -> tuple[int, list[tuple[str, Part, str]]]:
    """The length of a file; and each tensor's name, part and dtype, from the header."""
    where = storage.where(name)
    reader = storage.open(name)
    try:
        start = bytearray(8)
        if reader.read_into(memoryview(start), 0) < len(start):
            raise CheckpointError(
                f"{where} is not a safetensors file: it has {reader.nbytes} bytes, and the length "
                f"of the header takes 8. {_REMEDY}",
                file=where,
            )
        length = int.from_bytes(start, "little")
        if length > min(_MOST_HEADER, reader.nbytes - 8):
            raise CheckpointError(
                f"{where} is not a safetensors file: its header is too long ({length:,} bytes). "
                f"{_REMEDY}",
                file=where,
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
        raise CheckpointError(
            f"{where} is not a safetensors file ({type(error).__name__}: {error}). {_REMEDY}",
            file=where,
        ) from None
    finally:
        reader.close()
    return reader.nbytes, entries


def _part_of(key: str, listed: dict[str, Any], name: str, begin: int, length: int) -> Part:
    dtype, shape = listed["dtype"], number_list(listed["shape"])
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{key!r} has dtype {dtype!r}, which is not known")
    start, stop = number_list(listed["data_offsets"])
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if stop - start != nbytes or not start <= stop <= length - begin:
        raise ValueError(f"{key!r} has data_offsets that do not fit the shape or the file")
    sums = (0,) * chunk_count(nbytes, UNCHECKED_BYTES)
    return Part(whole_box(shape), name, begin + start, nbytes, sums)


# -- to be written ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedFile:
    """A file to write: a header, then tensors, with the positions of their first bytes."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    nbytes: int


def plan_published(
    tensors: Sequence[TensorForm], file_bytes: int, mark: str = ""
) -> list[PlannedFile]:
    """Plan one file for tensors if they fit, else several, with ``mark`` in their names."""
    groups: list[list[TensorForm]] = [[]]
    used = 0
    for tensor in tensors:
        nbytes = tensor.nbytes
        if groups[-1] and used + nbytes > file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += nbytes
    if len(groups) == 1:
        return [plan_file(HF_FILE, groups[0])]
    start = f"model-{mark}-" if mark else "model-"
    return [
        plan_file(f"{start}{at:05}-of-{len(groups):05}.safetensors", group)
        for at, group in enumerate(groups, 1)
    ]


def plan_file(name: str, tensors: Sequence[TensorForm]) -> PlannedFile:
    """Plan one file for tensors, sorted by size of an element, so that all are aligned."""
    ordered = sorted(tensors, key=lambda each: -each.itemsize)
    for tensor in ordered:
        _check_name(tensor.name)
    header, offsets = packed_file(
        (each.name, *stored(each.dtype, each.shape), each.nbytes) for each in ordered
    )
    begins = {each.name: begin for each, begin in zip(ordered, offsets, strict=False)}
    return PlannedFile(name, header, begins, offsets[-1])


def _check_name(name: str) -> None:
    is_text = name.isascii() or name == name.encode(errors="replace").decode()
    if name == RESERVED_KEY or not is_text:
        raise CheckpointError(
            f"a safetensors file cannot hold a tensor of the name {name!r}: rename it with a "
            f"prefix, or leave it out (names)",
            tensor=name,
        )


def index_json(plans: Sequence[PlannedFile]) -> str:
    """The text of Hugging Face's index file for several files."""
    total = sum(plan.nbytes - len(plan.header) for plan in plans)
    weight_map = {name: plan.name for plan in plans for name in plan.offsets}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2)


def is_shard(name: str) -> bool:
    """True for the name of a file of a model in several files, finished or not."""
    return _SHARD.fullmatch(name.removesuffix(UNFINISHED)) is not None
