"""TiledTensor: the base of both tensors, a torch.Tensor that stands for all tiles."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor

from tilework.layout import Box, Tiling

TiledT = TypeVar("TiledT", bound="TiledTensor")


def is_called_within(package: str) -> bool:
    """True if a package of torch, such as "export", has called this. For errors."""
    frame: FrameType | None = sys._getframe(1)
    part = os.path.join("torch", package, "")
    while frame is not None:
        if part in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class TiledTensor(Tensor):
    """A tensor of a global shape; this rank holds the tiles that the tiling assigns to it.

    The tiles are plain tensors with memory and autograd graphs; the TiledTensor itself is a wrapper
    without memory. ``__torch_function__`` intercepts the operators on it, before autograd does.
    """

    @classmethod
    def _wrap(
        cls: type[TiledT],
        size: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
    ) -> TiledT:
        tensor: TiledT = Tensor._make_wrapper_subclass(
            cls, torch.Size(size), dtype=dtype, device=device, requires_grad=requires_grad
        )
        return tensor

    @property
    @abstractmethod
    def tiling(self) -> Tiling:
        """The boxes of the tensor and the global ranks that hold them. Local; not collective."""

    @abstractmethod
    def local_tiles(self) -> list[Tensor]:
        """This rank's tiles, in the order of ``tiling.of(rank)``."""

    def local_memory(self) -> list[Tensor]:
        """The plain tensors in which this rank's tiles lie: the tiles, unless they are views."""
        return self.local_tiles()

    @property
    def is_snapshot(self) -> bool:
        """True if the tiles are copies of elements of a base, which had to move to this rank."""
        return False

    @abstractmethod
    def local_boxes(self) -> list[Box]:
        """The boxes of this rank's tiles, in the order of :meth:`local_tiles`. Local."""

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *vars(self)})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Only calls that bypass the interception come here; they must not lose a gradient or read
        # memory that does not exist.
        if is_called_within("_functorch"):
            raise RuntimeError(
                f"torch.func's transforms (vmap, grad, vjp, jacrev, functionalize) take no "
                f"{cls.__name__}, as {func} was given within one: gradients come by backward() or "
                f"torch.autograd.grad(), and operators take batches; or transform a function of "
                f"plain tensors, from to_local() or full_tensor()"
            )
        instead = (
            "torch's DistributedDataParallel takes no sharded tensors; tilework.parallel's does"
        )
        raise RuntimeError(
            f"A tilework {cls.__name__} is used from inside torch's C++ by {func}, which "
            f"takes plain tensors only: pass the local tensors, or the plain tensor of "
            f"full_tensor(){f'. {instead}' * is_called_within(os.path.join('nn', 'parallel'))}"
        )

    # -- torch.distributed.checkpoint (DCP): it saves and fills each rank's tiles ------------------

    def __create_write_items__(self, fqn: str, value: Tensor) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        owners = {rank for tile in self.tiling.tiles for rank in tile.owners}
        if len(owners) > 1 and not torch_dist.is_initialized():
            raise TypeError(
                f"torch.distributed.checkpoint got {fqn!r}, {value!r}, of {len(owners)} ranks, but "
                f"torch.distributed has no group, so each rank would save alone: call "
                f"tilework.checkpoint.save(state, path) instead"
            )
        items = []
        for chunk, (_, tile) in zip(self.__create_chunk_list__(), self._parts(), strict=True):
            properties = TensorProperties.create_from_tensor(tile)
            data = TensorWriteData(chunk, properties, torch.Size(value.shape))
            index = MetadataIndex(fqn, chunk.offsets)  # copies of a tile are saved once
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box, _ in self._parts()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for box, tile in self._parts():
            if tuple(index.offset) == box.offsets:
                return tile
        raise ValueError(f"this rank holds no tile of {self!r} at {list(index.offset)}")

    def _parts(self) -> Iterator[tuple[Box, Tensor]]:
        """The boxes and tiles with elements; all of them if the tensor has none."""
        is_empty = all(tile.box.empty for tile in self.tiling.tiles)
        for box, tile in zip(self.local_boxes(), self.local_tiles(), strict=True):
            if is_empty or not box.empty:
                yield box, tile
