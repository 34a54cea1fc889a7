"""Folders of torch.distributed.checkpoint (DCP): ``.metadata`` and ``*.distcp`` files.

The metadata is a pickle: only the classes that DCP itself puts there are let in. Elements are files
of torch.save, one for each part, read with ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilework.checkpoint.convert.source import MappedTensors, Source, mapped_tensors
from tilework.checkpoint.convert.torch_file import load_weights_only, state_of
from tilework.checkpoint.dtypes import DTYPES, dtype_name
from tilework.checkpoint.flat_state import FlatState, NamedTensor, Value, dotted, flatten
from tilework.checkpoint.format import Path as StatePath
from tilework.checkpoint.index_text import unique_name
from tilework.checkpoint.save_planning import TensorToSave
from tilework.checkpoint.storage import LocalStorage
from tilework.errors import CheckpointError
from tilework.layout import Box, check_boxes
from tilework.layout.box import whole_box

METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint"
_CLASSES = {
    f"{_MODULE}.metadata": {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties"),
        *("ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    f"{_MODULE}.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Lets in the classes of DCP's metadata, and nothing that could do anything."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it has {module}.{name}, which DCP does not put there")


def open_dcp(folder: Path) -> DcpSource:
    """The state in a folder of DCP.

    Raises:
        CheckpointError: Its metadata or files are damaged, or have what DCP does not put there.
    """
    where = folder / METADATA
    try:
        metadata = _MetadataUnpickler(io.BytesIO(where.read_bytes())).load()
        return DcpSource(folder, metadata)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # of any class: what is no pickle is taken for instructions
        problem = str(error) or type(error).__name__
        raise CheckpointError(f"{where} cannot be read: {problem}", file=str(where)) from None


class DcpSource(Source):
    """A folder of DCP. A tensor is assembled in a file when it is first asked for.

    Args:
        folder: The folder.
        metadata: DCP's.
    """

    def __init__(self, folder: Path, metadata: Any) -> None:
        self._storage = LocalStorage(folder)
        self._places = metadata.storage_data
        self._temporary = mapped_tensors(folder)
        self._mapped: MappedTensors | None = None
        self._current: tuple[int, Tensor] | None = None
        self._in_memory: dict[int, Tensor] = {}
        self._names = set(metadata.state_dict_metadata)
        self.tensors, self.flat, self.meta = [], FlatState(), {}
        paths = metadata.planner_data or {}
        for key, item in metadata.state_dict_metadata.items():
            path: StatePath = tuple(paths.get(key, (key,)))
            if hasattr(item, "chunks"):
                self._add_tensor(key, path, item)
            else:
                self._add_value(key, path)
        _add_containers(self.flat)

    def _add_tensor(self, key: str, path: StatePath, item: Any) -> None:
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in item.chunks]
        shape = tuple(item.size)
        check_boxes(shape, boxes)
        dtype = dtype_name(item.properties.dtype, f"the tensor {key!r}")
        tiles = tuple((box, (0,)) for box in boxes)
        self.tensors.append(TensorToSave(key, dtype, shape, tiles))
        self.flat.leaves[path] = NamedTensor(key)

    def _add_value(self, key: str, path: StatePath) -> None:
        value = self._load(key, None)
        if isinstance(value, io.BytesIO):
            value = load_weights_only(value, f"{self._storage.where(METADATA)}, {key!r}")
        inner = flatten(value)
        for below, kind in inner.containers.items():
            self.flat.containers[(*path, *below)] = kind
        for below, leaf in inner.leaves.items():
            is_tensor = not isinstance(leaf, Value)
            self.flat.leaves[(*path, *below)] = self._held(key, below, leaf) if is_tensor else leaf

    def _held(self, key: str, below: StatePath, tensor: Tensor) -> NamedTensor:
        """The name of a tensor that DCP keeps within a value, such as a tuple: it is in memory."""
        name = unique_name(dotted((key, *below)), self._names)
        shape = tuple(tensor.shape)
        dtype = dtype_name(tensor.dtype, f"the tensor {name!r}")
        self._in_memory[len(self.tensors)] = tensor
        self.tensors.append(TensorToSave(name, dtype, shape, ((whole_box(shape), (0,)),)))
        return NamedTensor(name)

    def _load(self, key: str, offset: Any) -> Any:
        """The contents of one part of the folder's files."""
        info = next(
            (
                place
                for index, place in self._places.items()
                if index.fqn == key and (offset is None or tuple(index.offset or ()) == offset)
            ),
            None,
        )
        if info is None:
            raise CheckpointError(
                f"{self._storage.where(METADATA)} does not say where {key!r} lies"
            )
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{key!r} is compressed, which cannot be read")
        reader = self._storage.open(str(info.relative_path))
        try:
            if info.offset + info.length > reader.nbytes:
                where = self._storage.where(str(info.relative_path))
                raise CheckpointError(f"{where} ends before {key!r} does", file=where, tensor=key)
            memory = bytearray(info.length)
            reader.read_into(memoryview(memory), info.offset)
        finally:
            reader.close()
        where = f"{self._storage.where(str(info.relative_path))}, {key!r}"
        return load_weights_only(io.BytesIO(memory), where)

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
        """The elements of a box, as a file has them."""
        name, dtype = self.tensors[number].name, self._dtype(number)
        part = self._load(name, box.offsets)
        if not isinstance(part, Tensor) or (tuple(part.shape), part.dtype) != (box.sizes, dtype):
            raise CheckpointError(
                f"{self._storage.where(METADATA)} says that {name!r} {box} has {list(box.sizes)} "
                f"elements of {dtype}, and its file has others: it is damaged",
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
    """The containers that paths lead through: lists where all keys count from 0."""
    children: dict[StatePath, set[Any]] = {(): set()}
    for path in (*flat.leaves, *flat.containers):
        for length in range(len(path)):
            children.setdefault(path[:length], set()).add(path[length])
    for path, keys in children.items():
        is_list = bool(keys) and keys == set(range(len(keys))) and bool(path)
        flat.containers.setdefault(path, "list" if is_list else "dict")


def write_dcp(source: Source, folder: Path) -> None:
    """Write a source as torch.distributed.checkpoint does; tensors lie in files meanwhile.

    Raises:
        CheckpointError: The folder is another checkpoint's.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty: give another folder", file=str(folder))
    with mapped_tensors(folder) as mapped:
        state = state_of(source, mapped.filled)
        state = state if isinstance(state, dict) else {"state": state}
        writer = FileSystemWriter(folder, single_file_per_rank=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            # Before torch 2.9 it finds out by itself that there is no group.
            alone = {"no_dist": True} if "no_dist" in signature(save).parameters else {}
            try:
                save(state, storage_writer=writer, **alone)
            except CheckpointException as error:
                shutil.rmtree(folder, ignore_errors=True)
                problem = "; ".join(str(each[0]) for each in error.failures.values())
                raise CheckpointError(
                    f"{folder} cannot be written by DCP: {problem}", file=str(folder)
                ) from None
