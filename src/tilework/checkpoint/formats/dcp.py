"""Folders of torch.distributed.checkpoint (DCP): ``.metadata`` and ``*.distcp`` files.

The metadata is a pickle, read as inert records: no class of a program is made, called or changed.
Each part of a tensor is a file of torch.save, read with ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilework.checkpoint.describing import check_dense
from tilework.checkpoint.flat_state import FlatState, FlatValue, NamedTensor, dotted
from tilework.checkpoint.flattening import flatten
from tilework.checkpoint.format import Path as StatePath
from tilework.checkpoint.formats.source import (
    MappedTensors,
    Source,
    load_weights_only,
    mapped_tensors,
    state_of_source,
)
from tilework.checkpoint.index_text import unique_name
from tilework.checkpoint.no_collections import no_collections
from tilework.checkpoint.save_planning import TensorToSave
from tilework.checkpoint.storage import LocalStorage
from tilework.checkpoint.tensor_bytes import DTYPES, dtype_name
from tilework.errors import CheckpointError
from tilework.layout import Box, check_boxes
from tilework.layout.internal import whole_box

METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint"
#: The classes and functions in DCP's own metadata.
_NAMES = {
    f"{_MODULE}.metadata": {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties"),
        *("ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    f"{_MODULE}.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
}
#: Builtin classes that replace others, as nobody can change them.
_BUILTIN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}


@dataclass(frozen=True)
class DcpPlace:
    """The bytes of a part of a tensor, or of a pickled object, in a file of the folder."""

    file: str
    offset: int
    nbytes: int
    is_transformed: bool


@dataclass(frozen=True)
class DcpTensor:
    """A tensor that the metadata describe, and the boxes that are stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class DcpMetadata:
    """The contents of a folder's ``.metadata`` file, by the flat name of an entry of the state.

    Args:
        items: The shape, dtype and parts of a tensor; None for an object, which DCP pickles.
        paths: The keys that lead to the entry in the nested state, if DCP's planner has them.
        places: By key and offsets of a part (``()`` of an object that is no tensor) the place.
        first_places: The first place: of an object, whatever offsets DCP gave to it.
    """

    items: Mapping[str, DcpTensor | None]
    paths: Mapping[str, tuple[Any, ...]]
    places: Mapping[tuple[str, tuple[int, ...]], DcpPlace]
    first_places: Mapping[str, DcpPlace]


@no_collections()
def read_dcp_metadata(folder: Path) -> DcpMetadata:
    """Read the ``.metadata`` file of a DCP folder; refuse what DCP does not write."""
    where = folder / METADATA
    text = where.read_bytes()
    try:
        return _metadata_of(_Unpickler(io.BytesIO(text)).load())
    except Exception as error:  # of any class: pickle takes any bytes for instructions
        problem = str(error) or type(error).__name__
        raise CheckpointError(f"{where} cannot be read: {problem}", file=str(where)) from None


class _Record:
    __slots__ = ("state",)
    state: Any

    def __new__(cls, *arguments: Any) -> _Record:
        record = object.__new__(cls)
        record.state = None
        return record

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> Mapping[str, Any]:
        if not isinstance(self.state, dict):
            raise ValueError(f"a {type(self).__name__} has no attributes")
        return self.state


def _member_of(kind: Any, name: str) -> _Record:
    """The record of an enum's member, which Python 3.11.0 to 3.11.3 pickle as a getattr."""
    if not (isinstance(kind, type) and issubclass(kind, _Record)):
        raise pickle.UnpicklingError(f"it reads {name!r} of an object that is no DCP enum")
    return kind(name)


class _Unpickler(pickle.Unpickler):
    """Loads the metadata: each object becomes a record, of a class made for this reading.

    Known classes would not be safe: an instruction of pickle sets attributes of any loaded object,
    also of a class, for the rest of the process.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (builtin := _BUILTIN.get((module, name))) is not None:
            return builtin
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)  # nobody can change it, either
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it has {module}.{name}, which DCP does not put there")
        known = self._classes.get((module, name))
        if known is None:
            known = self._classes[module, name] = type(name, (_Record,), {"__slots__": ()})
        return known


def _metadata_of(loaded: Any) -> DcpMetadata:
    fields = _fields(loaded, "Metadata")
    items = {_text(key): _item_of(key, item) for key, item in fields["state_dict_metadata"].items()}
    paths = {_text(key): _path(path) for key, path in (fields.get("planner_data") or {}).items()}
    places: dict[tuple[str, tuple[int, ...]], DcpPlace] = {}
    first: dict[str, DcpPlace] = {}
    for index, info in (fields["storage_data"] or {}).items():
        named = _fields(index, "MetadataIndex")
        key, place = _text(named["fqn"]), _place_of(_fields(info, "_StorageInfo"))
        places.setdefault((key, _numbers(named.get("offset") or ())), place)
        first.setdefault(key, place)
    return DcpMetadata(items, paths, places, first)


def _item_of(key: str, item: Any) -> DcpTensor | None:
    if type(item).__name__ == "BytesStorageMetadata":
        return None
    fields = _fields(item, "TensorStorageMetadata")
    properties: Any = fields["properties"].state
    # A tuple, since torch pickles that class in its own way.
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype of {key!r} is {dtype!r}")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    boxes = tuple([Box(_numbers(c["offsets"]), _numbers(c["sizes"])) for c in chunks])
    return DcpTensor(_numbers(fields["size"]), dtype, boxes)


def _place_of(fields: Mapping[str, Any]) -> DcpPlace:
    offset, nbytes = _numbers((fields["offset"], fields["length"]))
    file = _text(fields["relative_path"])
    if file in ("", ".", "..") or not set("/\\\0").isdisjoint(file):
        raise ValueError(f"it names the file {file!r}: only files in its own folder are read")
    return DcpPlace(file, offset, nbytes, bool(fields.get("transform_descriptors")))


def _fields(record: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise ValueError(f"it has a {type(record).__name__} in the place of a {name}")
    return record.fields


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.60} is not a name")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"{value!r:.60} is not an integer from 0 on")
    return tuple(values)


def _path(keys: Any) -> tuple[Any, ...]:
    if not isinstance(keys, tuple | list) or not all(type(key) in (str, int) for key in keys):
        raise ValueError(f"{keys!r:.60} are not keys of a state")
    return tuple(keys)


def open_dcp(folder: Path) -> DcpSource:
    """The state in a folder of DCP."""
    metadata = read_dcp_metadata(folder)
    try:
        return DcpSource(folder, metadata)
    except (TypeError, ValueError, RecursionError) as error:
        where = str(folder / METADATA)
        raise CheckpointError(f"{where} cannot be read: {error}", file=where) from None


class DcpSource(Source):
    """A folder of DCP. A tensor in several parts is assembled in a temporary file."""

    def __init__(self, folder: Path, metadata: DcpMetadata) -> None:
        self._storage, self._metadata = LocalStorage(folder), metadata
        self._temporary = mapped_tensors(folder)
        self._mapped: MappedTensors | None = None
        self._current: tuple[int, Tensor] | None = None
        self._in_memory: dict[int, Tensor] = {}
        self._names = set(metadata.items)
        self.tensors, self.flat, self.meta = [], FlatState(), {}
        for key, item in metadata.items.items():
            path = metadata.paths.get(key, (key,))
            if item is None:
                self._add_value(key, path)
                continue
            check_boxes(item.shape, item.boxes)
            dtype = dtype_name(item.dtype, f"the tensor {key!r}")
            tiles = tuple((box, (0,)) for box in item.boxes)
            self.tensors.append(TensorToSave(key, dtype, item.shape, tiles))
            self._add_leaf(path, NamedTensor(key))
        _add_containers(self.flat)

    def _add_leaf(self, path: StatePath, leaf: FlatValue | NamedTensor) -> None:
        if path in self.flat.leaves:
            raise ValueError(f"it has two values at {dotted(path)}")
        self.flat.leaves[path] = leaf

    def _add_value(self, key: str, path: StatePath) -> None:
        value = self._load(key, None)
        if isinstance(value, io.BytesIO):
            value = load_weights_only(value, f"{self._storage.where(METADATA)}, {key!r}")
        inner = flatten(value)
        for below, kind in inner.containers.items():
            self.flat.containers[(*path, *below)] = kind
        for below, leaf in inner.leaves.items():
            is_tensor = not isinstance(leaf, FlatValue)
            self._add_leaf((*path, *below), self._held(key, below, leaf) if is_tensor else leaf)

    def _held(self, key: str, below: StatePath, tensor: Tensor) -> NamedTensor:
        """List a tensor within a pickled value, such as a tuple, and return a new name for it."""
        name = unique_name(dotted((key, *below)), self._names)
        shape = tuple(tensor.shape)
        dtype = dtype_name(tensor.dtype, f"the tensor {name!r}")
        check_dense(tensor, f"the tensor {name!r}")
        self._in_memory[len(self.tensors)] = tensor
        self.tensors.append(TensorToSave(name, dtype, shape, ((whole_box(shape), (0,)),)))
        return NamedTensor(name)

    def _load(self, key: str, offset: tuple[int, ...] | None) -> Any:
        """Read and unpickle a tensor's part at ``offset``; None: a value that is no tensor."""
        places = self._metadata
        place = places.first_places.get(key) if offset is None else places.places.get((key, offset))
        if place is None:
            raise CheckpointError(
                f"{self._storage.where(METADATA)} does not say in which file {key!r} lies: the "
                f"metadata are damaged. Use another checkpoint"
            )
        if place.is_transformed:
            raise CheckpointError(
                f"{key!r} is stored compressed, which cannot be read: save it again without "
                f"extensions of the DCP writer"
            )
        where = self._storage.where(place.file)
        with closing(self._storage.open(place.file)) as reader:
            if place.offset + place.nbytes > reader.nbytes:
                raise CheckpointError(
                    f"{where} has {reader.nbytes:,} bytes, and {key!r} ends at byte "
                    f"{place.offset + place.nbytes:,}: the file is truncated. Copy it again, or "
                    f"use another checkpoint",
                    file=where,
                    tensor=key,
                )
            memory = bytearray(place.nbytes)
            reader.read_into(memoryview(memory), place.offset)
        return load_weights_only(io.BytesIO(memory), f"{where}, {key!r}")

    def region(self, number: int, box: Box) -> Tensor:
        if box.empty:
            return torch.empty(box.sizes, dtype=self._dtype(number))
        if self._current is None or self._current[0] != number:
            self._current = None
            self._current = number, self._assembled(number)
        return self._current[1][box.slices]

    def _dtype(self, number: int) -> torch.dtype:
        return DTYPES[self.tensors[number].dtype]

    def _assembled(self, number: int) -> Tensor:
        tensor = self.tensors[number]
        if (known := self._in_memory.get(number)) is not None:
            return known
        if len(tensor.tiles) == 1:
            return self._part(number, tensor.tiles[0][0])
        if self._mapped is None:
            self._mapped = self._temporary.__enter__()
        target = self._mapped.empty(tensor.shape, self._dtype(number))
        for box, _ in tensor.tiles:
            if not box.empty:
                target[box.slices].copy_(self._part(number, box))
        return target

    def _part(self, number: int, box: Box) -> Tensor:
        name, dtype = self.tensors[number].name, self._dtype(number)
        part = self._load(name, box.offsets)
        if not isinstance(part, Tensor) or (tuple(part.shape), part.dtype) != (box.sizes, dtype):
            raise CheckpointError(
                f"{self._storage.where(METADATA)} says that {name!r} {box} has the shape "
                f"{list(box.sizes)} and the dtype {dtype}, and the file has something else there: "
                f"the checkpoint is damaged. Copy it again, or use another",
                file=self._storage.where(METADATA),
                tensor=name,
            )
        return part

    def close(self) -> None:
        self._current = None
        if self._mapped is not None:
            self._mapped = None
            self._temporary.__exit__(None, None, None)


def _add_containers(flat: FlatState) -> None:
    """Add the containers that paths lead through: lists if the keys are 0, 1, 2…, else dicts."""
    children: dict[StatePath, set[Any]] = {(): set()}
    for path in (*flat.leaves, *flat.containers):
        for length in range(len(path)):
            children.setdefault(path[:length], set()).add(path[length])
    for path, keys in children.items():
        if path in flat.leaves:
            raise ValueError(f"it has a value at {dotted(path)}, and others below it")
        is_list = bool(keys) and keys == set(range(len(keys))) and bool(path)
        flat.containers.setdefault(path, "list" if is_list else "dict")


def write_dcp(source: Source, folder: Path) -> None:
    """Write a source into an empty folder in DCP's format, by way of temporary files."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty: give another folder", file=str(folder))
    with mapped_tensors(folder) as mapped:
        state = state_of_source(source, mapped.filled)
        state = state if isinstance(state, dict) else {"state": state}
        writer = FileSystemWriter(folder, single_file_per_rank=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            # Before torch 2.9, DCP itself finds that there is no group.
            alone = {"no_dist": True} if "no_dist" in signature(save).parameters else {}
            try:
                save(state, storage_writer=writer, **alone)
            except CheckpointException as error:
                shutil.rmtree(folder, ignore_errors=True)
                problem = "; ".join(str(each[0]) for each in error.failures.values())
                raise CheckpointError(
                    f"{folder} cannot be written by DCP: {problem}", file=str(folder)
                ) from None
