"""Sources of conversions: tensors that are read region by region, and other values."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tilework.checkpoint.flat_state import FlatState, NamedTensor
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
from tilework.checkpoint.storage import UNFINISHED, Storage
from tilework.checkpoint.tensor_bytes import DTYPES, byte_view, pieces_in_order
from tilework.checkpoint.url_storage import AnyPath
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
        """Close open files. Idempotent."""
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
