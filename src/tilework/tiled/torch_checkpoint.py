"""InTorchCheckpoints: tensors that torch.distributed.checkpoint (DCP) asks for their parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from tilework.layout import Box, Tiling


class InTorchCheckpoints:
    """Base class of sharded tensors that DCP saves and fills by the tiles of each rank.

    The methods with underscores are those that DCP's planners call.
    """

    @property
    @abstractmethod
    def tiling(self) -> Tiling:
        """The boxes of the tensor and the global ranks that hold them. Local; not collective."""

    @abstractmethod
    def local_tiles(self) -> list[Tensor]:
        """This rank's tiles, in the order of ``tiling.of(rank)``."""

    @property
    def is_snapshot(self) -> bool:
        """True if the tiles are copies of elements of a base, which had to move to this rank."""
        return False

    @abstractmethod
    def local_boxes(self) -> list[Box]:
        """The boxes of this rank's tiles, in the order of :meth:`local_tiles`. Local.

        Raises:
            TypeError: The tiles are not reduced yet.
        """

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
