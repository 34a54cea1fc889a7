"""torch.distributed.checkpoint (DCP) in this format: a storage writer and a storage reader.

    import torch.distributed.checkpoint as dcp
    from tilework.checkpoint.dcp import TileworkReader, TileworkWriter

    dcp.save(state_dict, storage_writer=TileworkWriter("run/step-100"))
    dcp.load(state_dict, storage_reader=TileworkReader("run/step-100"))

The program, groups and planners are torch's. The files have the format of docs/format.md, which
``tilework.checkpoint`` reads, too. They contain no pickles.
"""

from __future__ import annotations

import gc
import io
import os
import secrets
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tilework.checkpoint.dtypes import DTYPES, dtype_name
from tilework.checkpoint.flat_state import (
    FlatState,
    FlatValue,
    NamedTensor,
    PerRank,
    dotted,
    state_json,
)
from tilework.checkpoint.flattening import flatten, rebuild
from tilework.checkpoint.format import CHUNK_BYTES, Index
from tilework.checkpoint.index_file import read_index, saved_state
from tilework.checkpoint.memory import pieces_in_order
from tilework.checkpoint.places import AnyPath, storage_at
from tilework.checkpoint.reading import PartReader, read_region
from tilework.checkpoint.save_planning import (
    BoxToWrite,
    PlacedBox,
    TensorToSave,
    plan_files,
)
from tilework.checkpoint.saved import Part, SavedFile, SavedTensor
from tilework.checkpoint.saving import (
    commit_index,
    nothing,
    now_text,
    remove_leftovers,
    write_files,
)
from tilework.checkpoint.storage import Storage
from tilework.errors import CheckpointError
from tilework.layout import Box


def _future(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


class TileworkWriter(StorageWriter):
    """DCP's storage writer for checkpoints of tilework: a checkpoint is whole or absent.

    Args:
        path: A folder that all ranks see, or a URL.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> dcp.save(state, storage_writer=TileworkWriter("run/step-100"))  # doctest: +SKIP
    """

    def __init__(self, path: AnyPath) -> None:
        self._storage = storage_at(path)
        #: Releases the path, at the latest with this writer: torch does not report failed saves.
        self._release: Callable[[], object] = nothing

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._storage = storage_at(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._end()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._storage.location)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._storage.prepare()
        try:
            release = self._storage.lock()
        except CheckpointError:
            gc.collect()  # the writer of a failed save, which the error still references
            release = self._storage.lock()
        self._release = weakref.finalize(self, release)
        remove_leftovers(self._storage)
        token = secrets.token_hex(4)
        return [
            replace(plan, storage_data=f"{token}-rank{rank:05}") for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return _future(self._written(plan, planner))
        except BaseException:
            self._end()
            raise

    def _written(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        items = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        tensors = [_tensor_of(item) for item in items]
        tasks = [
            BoxToWrite(number, box, box.volume * tensor.itemsize)
            for number, tensor in enumerate(tensors)
            for box, _ in tensor.tiles
        ]
        plans = plan_files(tensors, tasks, plan.storage_data)

        def source(placed: PlacedBox) -> Iterator[Tensor]:
            chunk = tensors[placed.tensor].tiles[0][0]
            data: Any = planner.resolve_data(items[placed.tensor])
            return pieces_in_order(data[placed.box.relative_to(chunk).slices], CHUNK_BYTES)

        files = write_files(self._storage, plans, source, lambda _: None)
        parts: list[list[Part]] = [[] for _ in items]
        for file_plan, file in zip(plans, files, strict=True):
            for placed, sums in zip(file_plan.boxes, file.checksums, strict=True):
                parts[placed.tensor].append(
                    Part(placed.box, file.name, placed.offset, placed.nbytes, tuple(sums))
                )
        header = {file.name: SavedFile(file.nbytes, file.header_crc32) for file in files}
        results = [
            WriteResult(item.index, sum(part.nbytes for part in own), (own, header))
            for item, own in zip(items, parts, strict=True)
        ]
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                results.append(WriteResult(item.index, 0, _value_of(item, planner)))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            commit_index(self._storage, _index(metadata, results))
        finally:
            self._end()

    def _end(self) -> None:
        release, self._release = self._release, nothing
        release()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(str(checkpoint_id))


def _tensor_of(item: WriteItem) -> TensorToSave:
    data = item.tensor_data
    assert data is not None
    dtype = dtype_name(data.properties.dtype, f"the tensor {item.index.fqn!r}")
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return TensorToSave(item.index.fqn, dtype, tuple(data.size), ((box, (0,)),))


def _value_of(item: WriteItem, planner: SavePlanner) -> tuple[dict[Any, Any], dict[Any, str]]:
    """The leaves and the kinds of containers, by path, of an item that is not a tensor."""
    data: Any = planner.resolve_data(item)
    data.seek(0)
    try:
        value = torch.load(data, weights_only=True)
        flat = flatten(value)
        if not all(isinstance(leaf, FlatValue) for leaf in flat.leaves.values()):
            raise TypeError("it is an object with tensors")
    except Exception as error:
        raise TypeError(
            f"{item.index.fqn!r} cannot be saved: it is neither a tensor nor a plain value: {error}"
        ) from None
    return flat.leaves, flat.containers


def _index(metadata: Metadata, results: list[list[WriteResult]]) -> Index:
    files: dict[str, SavedFile] = {}
    parts: dict[str, list[Part]] = {}
    paths = metadata.planner_data or {}
    flat = FlatState(containers={(): "dict"})
    for result in (each for own in results for each in own):
        key = result.index.fqn
        path = tuple(paths.get(key, (key,)))
        contents, more = result.storage_data
        if isinstance(contents, dict):
            flat.containers.update({(*path, *below): kind for below, kind in more.items()})
            flat.leaves.update({(*path, *below): leaf for below, leaf in contents.items()})
            continue
        flat.leaves[path] = NamedTensor(key)
        parts.setdefault(key, []).extend(contents)
        files.update(more)
    for path in list(flat.leaves):
        for length in range(len(path)):
            flat.containers.setdefault(path[:length], _kind(path[length]))
    tensors = {}
    for key, own in parts.items():
        item: Any = metadata.state_dict_metadata[key]
        ordered = tuple(sorted(own, key=lambda part: part.box.offsets))
        name = dtype_name(item.properties.dtype)
        tensors[key] = SavedTensor(key, name, tuple(item.size), ordered)
    created, writer = now_text()
    state = state_json(flat)
    return Index(tensors, files, state, len(results), CHUNK_BYTES, {}, created, writer)


def _kind(key: Any) -> str:
    return "list" if type(key) is int else "dict"


class TileworkReader(StorageReader):
    """DCP's storage reader for checkpoints of tilework, no matter what wrote them.

    Args:
        path: A folder, or a URL.
        verify: Compare checksums.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> dcp.load(state, storage_reader=TileworkReader("run/step-100"))  # doctest: +SKIP
    """

    def __init__(self, path: AnyPath, verify: bool = True) -> None:
        self._storage: Storage = storage_at(path)
        self._verify = verify
        self._index: Index | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._index = None
        if checkpoint_id is not None:
            self._storage = storage_at(checkpoint_id)

    def _read(self) -> tuple[Index, dict[str, tuple[Any, Any]]]:
        """The index; and by DCP's key, the path and the leaf (the first if it differs by rank)."""
        if self._index is None:
            self._index = read_index(self._storage)
        flat = saved_state(self._index, self._storage)
        keys: dict[str, tuple[Any, Any]] = {}
        for path, leaf in flat.leaves.items():
            own = leaf.variants[0][1] if isinstance(leaf, PerRank) else leaf
            keys[own.name if isinstance(own, NamedTensor) else dotted(path)] = path, own
        return self._index, keys

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index, keys = self._read()
        listed: dict[str, Any] = {}
        for key, (_, leaf) in keys.items():
            if isinstance(leaf, FlatValue):
                listed[key] = BytesStorageMetadata()
                continue
            tensor = index.tensors[leaf.name]
            chunks = [
                ChunkStorageMetadata(torch.Size(part.box.offsets), torch.Size(part.box.sizes))
                for part in tensor.parts
            ]
            properties = TensorProperties(dtype=DTYPES[tensor.dtype])
            listed[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        paths = {key: path for key, (path, _) in keys.items()}
        return Metadata(listed, paths, {}, StorageMeta(checkpoint_id=self._storage.location))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: there is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        index, keys = self._read()
        reader = PartReader(self._storage, index, self._verify)
        try:
            for item in plan.items:
                key = item.storage_index.fqn
                if item.type is LoadItemType.BYTE_IO:
                    data = io.BytesIO()
                    torch.save(rebuild(FlatState({(): keys[key][1]})), data)
                    data.seek(0)
                    planner.load_bytes(item, data)
                    continue
                start = item.storage_index.offset or torch.Size([0] * len(item.lengths))
                offsets = [a + b for a, b in zip(start, item.storage_offsets, strict=True)]
                box = Box(tuple(offsets), tuple(item.lengths))
                target = planner.resolve_tensor(item).detach()
                read_region(reader, index.tensors[key], box, target)
                planner.commit_tensor(item, target)
        finally:
            reader.close()
        return _future(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(str(checkpoint_id))
