"""Sources of conversions, read region by region: safetensors, and files of torch.save.

Files of torch.save are read with ``weights_only``: no code in them runs.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilework.checkpoint.describing import describe, merge
from tilework.checkpoint.flat_state import FlatState, NamedTensor, PerRank
from tilework.checkpoint.flattening import flatten, rebuild
from tilework.checkpoint.format import Index
from tilework.checkpoint.reading import PartReader, read_region
from tilework.checkpoint.safetensors_index import (
    HF_INDEX,
    index_json,
    place_of,
    plan_file,
    plan_published,
    safetensors_index,
)
from tilework.checkpoint.save_planning import TensorToSave, cut_box
from tilework.checkpoint.storage import UNFINISHED, Storage, calls
from tilework.checkpoint.tensor_bytes import DTYPES, byte_view, pieces_in_order
from tilework.checkpoint.url_storage import AnyPath
from tilework.errors import CheckpointError
from tilework.layout import Box
from tilework.layout.internal import whole_box

#: The maximum of bytes of a tensor in memory at once.
REGION_BYTES = 32 << 20


class Source(ABC):
    """The contents of a file or folder: tensors, whose tiles are the parts there, and the state."""

    tensors: list[TensorToSave]
    flat: FlatState
    meta: dict[str, object]

    @abstractmethod
    def region(self, number: int, box: Box) -> Tensor:
        """The elements of a box of the tensor with this number in ``tensors``, on the CPU."""

    def elements(self, number: int, box: Box) -> Iterator[Tensor]:
        """The elements of a box in row-major order, as small contiguous tensors."""
        for each in cut_box(box, self.tensors[number].itemsize, REGION_BYTES):
            yield from pieces_in_order(self.region(number, each), 1 << 20)

    def close(self) -> None:
        return None


class IndexedSource(Source):
    """Tensors in files of a folder, with an index that says where."""

    def __init__(self, storage: Storage, index: Index, flat: FlatState, verify: bool) -> None:
        self._reader = PartReader(storage, index, verify)
        self._saved = list(index.tensors.values())
        self.tensors = [
            TensorToSave(t.name, t.dtype, t.shape, tuple((p.box, (0,)) for p in t.parts), t.layout)
            for t in self._saved
        ]
        self.flat, self.meta = flat, dict(index.meta)

    def region(self, number: int, box: Box) -> Tensor:
        saved = self._saved[number]
        target = torch.empty(box.sizes, dtype=DTYPES[saved.dtype])
        read_region(self._reader, saved, box, target)
        return target

    def close(self) -> None:
        self._reader.close()


@contextmanager
def mapped_tensors(beside: Path) -> Iterator[MappedTensors]:
    """A maker of tensors in files beside a path, which are removed at the end."""
    with tempfile.TemporaryDirectory(
        prefix=f".{beside.name}.", dir=beside.absolute().parent
    ) as folder:
        yield MappedTensors(Path(folder))


class MappedTensors:
    """Makes tensors, each in the mapped memory of a separate file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new tensor in a file, with uninitialised elements."""
        tensor = torch.empty(0, dtype=dtype)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes == 0:
            return tensor.new_empty(shape)
        self._count += 1
        path = self._folder / str(self._count)
        _take_room(path, nbytes)
        storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=nbytes)
        # The mapped memory stays; the name is no longer needed.
        path.unlink()
        strides = torch.empty(shape, device="meta").stride()
        return tensor.set_(storage, 0, shape, strides)  # type: ignore[arg-type]

    def filled(self, source: Source, number: int) -> Tensor:
        """A new tensor in a file, with the elements of the source's tensor of this number."""
        tensor = source.tensors[number]
        whole = Box((0,) * len(tensor.shape), tensor.shape)
        dtype = source.region(number, Box((0,) * len(tensor.shape), (0,) * len(tensor.shape))).dtype
        target = self.empty(tensor.shape, dtype)
        for box in cut_box(whole, tensor.itemsize, REGION_BYTES):
            target[box.slices].copy_(source.region(number, box))
        return target


def _take_room(path: Path, nbytes: int) -> None:
    """Make a file with disk space: without that, a write to the mapped file kills the process."""
    with open(path, "xb") as file:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            error.filename = str(path)
            raise


def open_safetensors(path: AnyPath) -> Source:
    """The tensors of a file, or of a folder with Hugging Face's index."""
    storage, index = safetensors_index(path)
    flat = FlatState({(key,): NamedTensor(key) for key in index.tensors}, {(): "dict"})
    return IndexedSource(storage, index, flat, verify=False)


def write_safetensors(source: Source, path: AnyPath, file_bytes: int) -> None:
    """Write the tensors of a source to a file, or to a folder of files with an index."""
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


#: The text before the cause in messages of torch.
_MARK = "WeightsUnpickler error:"


class StateSource(Source):
    """A state whose tensors are in memory, or in a mapped file."""

    def __init__(self, state: Any) -> None:
        flat = flatten(state)
        merged = merge([describe(flat, [0])], [0])
        self._aliases = merged.aliases
        self._leaves = [flat.leaves[path] for path, _ in merged.sources]
        self.tensors, self.flat, self.meta = merged.tensors, merged.flat, {}
        # If the format has no aliases, one of several names is enough.
        for path, leaf in self.flat.leaves.items():
            if isinstance(leaf, NamedTensor) and leaf.name in self._aliases:
                self.flat.leaves[path] = NamedTensor(self._aliases[leaf.name])

    def region(self, number: int, box: Box) -> Tensor:
        tensor: Tensor = self._leaves[number]
        return tensor.detach()[box.slices]


def open_torch_file(path: Path) -> Source:
    """The state in a file of torch.save, mapped instead of read where torch can."""
    try:
        state = load_weights_only(path, str(path), mmap=True)
    except CheckpointError:  # a file of torch before 1.6, or not a file of torch
        state = load_weights_only(path, str(path))
    try:
        return StateSource(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}", file=str(path)) from None


def load_weights_only(file: Any, where: str, **settings: Any) -> Any:
    """The contents of a file of torch.save: tensors, and plain containers and values."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, **settings)
    except Exception as error:  # of any class: torch takes other files for instructions
        if isinstance(error, OSError) and error.filename is not None:
            raise  # it cannot be opened
        raise CheckpointError(
            f"{where} cannot be read with weights_only: {_problem(error)}. It is damaged, or has "
            f"objects that are code: save its state dict again, with tensors and plain containers "
            f"only",
            file=where,
        ) from None


def _problem(error: Exception) -> str:
    """The reason in torch's error, without torch's advice to load with ``weights_only=False``."""
    lines = [line.strip() for line in str(error).splitlines()]
    marked = [line.partition(_MARK)[2] for line in lines if _MARK in line]
    plain = [line for line in lines if line and "weights" not in line.lower()]
    told = [*filter(None, marked), *plain, type(error).__name__]
    return told[0].partition(". Please")[0].strip().removesuffix(".")


def write_torch_file(source: Source, path: Path) -> None:
    """Write a source to a file of torch.save. Tensors lie in temporary files meanwhile."""
    with mapped_tensors(path) as mapped:
        state = state_of_source(source, mapped.filled)
        unfinished = path.with_name(f"{path.name}.part")
        try:
            _save(state, unfinished)
            fd = calls.open(unfinished, 0)
            calls.fsync(fd)
            calls.close(fd)
            calls.rename(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def _save(state: Any, path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:  # from torch's writer, which does not give the reason
        raise CheckpointError(
            f"{path} cannot be written: {str(error).splitlines()[0]}. Is the disk full?",
            file=str(path),
        ) from None


def state_of_source(source: Source, tensor_of: Any) -> Any:
    """The state of a source, with tensors made by ``tensor_of(source, number)``."""
    numbers = {tensor.name: number for number, tensor in enumerate(source.tensors)}
    made: dict[str, Tensor] = {}

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, PerRank):
            # Other formats have no values per rank: the first rank's value stands for all.
            return value_of(leaf.variants[0][1])
        if not isinstance(leaf, NamedTensor):
            return leaf
        if leaf.name not in made:
            made[leaf.name] = tensor_of(source, numbers[leaf.name])
        return made[leaf.name]

    containers = source.flat.containers
    leaves = {
        path[:-1] if containers.get(path[:-1]) == "numpy" else path: value_of(leaf)
        for path, leaf in source.flat.leaves.items()
    }
    kept = {path: kind for path, kind in containers.items() if kind != "numpy"}
    return rebuild(FlatState(leaves, kept))
