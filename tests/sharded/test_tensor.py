"""What a sharded tensor is to the rest of a program: sizes, shards, and what print shows."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.sharded.ranks_and_specs import boxes, check_all_raise, chunks, cut, grid, numbered, on
from tests.tables import each
from tilework import sharded
from tilework.sharded import Shard, ShardedTensor, ShardedTensorBase, ShardingSpec, TiledTensor

SPECS = [
    chunks(0, [0, 1]),
    chunks(1, [1, 0, 1]),
    chunks(0, [1]),
    grid([1, 3], [2, 4], [0, 1]),
    chunks(0, [0, 1, 0, 1, 0, 1]),
]


def test_sizes() -> None:
    def program(rank: int) -> None:
        tensor = sharded.empty(chunks(0, [0, 1]), 10, 20)
        assert tensor.size() == tensor.shape == torch.Size([10, 20])
        assert (tensor.size(0), tensor.size(1), tensor.size(-1), tensor.size(-2)) == (
            10,
            20,
            20,
            10,
        )
        assert tensor.dim() == tensor.ndim == tensor.ndimension() == 2
        assert tensor.numel() == tensor.nelement() == 200
        assert (tensor.element_size(), tensor.itemsize, tensor.nbytes, len(tensor)) == (
            4,
            4,
            800,
            10,
        )
        for dim in (-3, 2):
            with pytest.raises(IndexError, match="Dimension out of range"):
                tensor.size(dim)

    on(2, program)


def test_the_one_local_tensor() -> None:
    def program(rank: int) -> None:
        tensor = sharded.rand(chunks(0, range(4)), 24, 12)
        assert tensor.local_tensor().shape == (6, 12)
        assert tensor.local_tensor() is tensor.local_shards()[0].tensor

    on(4, program)


@pytest.mark.parametrize("ranks", [[0, 0, 1, 1, 1, 2, 2], [3, 3]])
def test_no_or_several_local_tensors(ranks: list[int]) -> None:
    def program(rank: int) -> None:
        tensor = sharded.rand(chunks(0, ranks), 24, 12)
        with pytest.raises(NotImplementedError, match=r"Only single local shard is supported\."):
            tensor.local_tensor()
        assert len(tensor.local_shards()) == ranks.count(rank) != 1

    on(4, program)


@each("spec", SPECS)
def test_tiles_are_listed_as_the_tiling_lists_them(spec: ShardingSpec) -> None:
    def program(rank: int) -> Any:
        tensor = cut(numbered([4, 6]), spec, rank)
        boxes = [tile.box for tile in tensor.tiling.tiles]
        assert boxes == [shard.box for shard in tensor.metadata().shards_metadata]
        assert list(tensor.tiling.boxes_of(rank)) == [s.metadata.box for s in tensor.local_shards()]
        assert tensor.tiling.shape == (4, 6)
        assert tensor.tiling is tensor.tiling
        for shard, tile in zip(tensor.local_shards(), tensor.local_tiles(), strict=True):
            assert shard.tensor is tile
        return tensor.tiling

    found = on(2, program)
    assert found[0] == found[1]


def test_its_kind() -> None:
    def program(rank: int) -> None:
        tensor = sharded.ones(chunks(0, [0, 1]), 4)
        assert isinstance(tensor, torch.Tensor)
        assert isinstance(tensor, TiledTensor)
        assert isinstance(tensor, ShardedTensorBase)
        assert torch.is_tensor(tensor)
        assert not isinstance(tensor, torch.nn.Parameter)
        assert tensor.process_group is dist.get_default_group()

    on(2, program)


# -- tensors cut alike -------------------------------------------------------------------------


def test_like_has_other_values_in_the_same_places() -> None:
    def program(rank: int) -> None:
        tensor = cut(numbered([4, 6]), grid([1, 3], [2, 4], [0, 1]), rank)
        made = tensor.like(
            (tile.double() * 2 for tile in tensor.local_tiles()), dtype=torch.float64
        )
        assert made.dtype == torch.float64
        assert made.sharding_spec() is tensor.sharding_spec()
        assert made.tiling is tensor.tiling
        assert made.metadata().shards_metadata is tensor.metadata().shards_metadata
        assert torch.equal(made.full_tensor(), numbered([4, 6], torch.float64) * 2)
        assert tensor.dtype == tensor.metadata().tensor_properties.dtype == torch.float32

    on(2, program)


@each("tiles", [[], [torch.ones(2)] * 2, [torch.ones(3)]])
def test_like_takes_as_many_tensors_of_the_same_sizes(tiles: list[torch.Tensor]) -> None:
    def program(rank: int) -> None:
        sharded.ones(chunks(0, [0]), 2).like(tiles)

    check_all_raise(1, program, ValueError, "zip|does not match")


# -- what any program does with objects --------------------------------------------------------


def test_nothing_here_waits_for_another_rank() -> None:
    """Rank 1 does none of this, so it would hang if any of it communicated."""

    def program(rank: int) -> None:
        tensors = [
            sharded.ones(spec, 4, 6, requires_grad=gradient)
            for spec in SPECS
            for gradient in (False, True)
        ]
        for tensor in tensors if rank == 0 else []:
            _use_as_an_object(tensor)
        dist.barrier()

    on(2, program)


def _use_as_an_object(tensor: ShardedTensor) -> None:
    assert hash(tensor) == hash(tensor)
    assert len({tensor: 1, tensor.detach(): 2}) == 2
    assert tensor in [tensor]
    assert weakref.ref(tensor)() is tensor
    assert "local_shards" in dir(tensor)
    for told in (
        repr(tensor),
        str(tensor),
        f"{tensor}",
        f"{tensor:>3}",
        str([tensor]),
        f"{tensor!r}",
    ):
        assert "ShardedTensor" in told
        assert "4, 6" in told
    assert "\n" not in repr(tensor)
    assert repr(tensor) in repr({"a": (tensor,)})
    assert (tensor.is_leaf, tensor.grad, tensor.grad_fn) == (True, None, None)
    assert (tensor.is_meta, tensor.is_cuda, tensor.is_sparse) == (False, False, False)
    assert tensor.get_device() == -1
    assert tensor.data.shape == (4, 6)
    assert tensor.T.shape == tensor.mT.shape == (6, 4)
    assert len(list(iter(tensor))) == len(tensor) == 4
    for need_values in (bool, float, int):
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            need_values(tensor)
    for name in ("item", "tolist", "numpy", "data_ptr", "untyped_storage"):
        with pytest.raises(RuntimeError, match=r"not supported for ShardedTensor!$"):
            getattr(tensor, name)()


def test_parameters_are_shown_and_printed_inside_modules() -> None:
    def program(rank: int) -> None:
        parameter: Any = torch.nn.Parameter(sharded.ones(chunks(0, [0, 1]), 4, 6))
        assert isinstance(parameter, ShardedTensor)
        assert "ShardedTensor" in repr(parameter)
        assert "4x6" in repr(torch.nn.ParameterList([parameter]))

    on(2, program)


def test_a_subclass_stays_one() -> None:
    class Own(ShardedTensor):
        """A user's."""

    def program(rank: int) -> None:
        tensor = Own(chunks(0, [0, 1]), 4)
        part = Shard.from_tensor_and_offsets(torch.ones(2), [2 * rank], rank)
        joined = Own.init_from_local_shards([part], 4)
        for made in (tensor, joined, tensor.like(tensor.local_tiles()), tensor.to(torch.float64)):
            assert type(made) is Own

    on(2, program)


def test_uneven_boxes() -> None:
    spec = boxes(([0, 0], [2, 4], 0), ([0, 4], [4, 2], 1), ([2, 0], [4, 4], 2), ([4, 4], [2, 2], 3))
    sizes = [(2, 4), (4, 2), (4, 4), (2, 2)]

    def program(rank: int) -> None:
        tensor = sharded.empty(spec, 6, 6)
        assert tensor.local_tensor().shape == sizes[rank]
        assert tensor.local_shards()[0].metadata == spec.shards[rank]
        assert tensor.metadata().shards_metadata == spec.shards

    on(4, program)
