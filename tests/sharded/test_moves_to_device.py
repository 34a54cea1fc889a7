"""Other dtypes and devices: ``to``, ``cpu`` and ``cuda``.

Of the devices here the meta device is one that a tensor can be moved to. What holds of
accelerators alone is tested with their questions answered by the test.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.sharded.ranks_and_specs import check_all_raise, chunks, cut, grid, numbered, on
from tests.tables import each
from tilework import sharded
from tilework.sharded import ChunkShardingSpec, ShardedTensor, ShardingSpec
from tilework.sharded.moves import to_current_device

SPECS = [chunks(0, [0, 1]), chunks(0, [1, 0, 1]), chunks(0, [1]), grid([1, 3], [2, 1], [0, 1])]


def check_moved(made: ShardedTensor, old: ShardedTensor, dtype: torch.dtype, device: str) -> None:
    """``made`` is ``old`` in that dtype on that device, in all that it tells."""
    assert made is not old
    assert (made.dtype, made.device.type, made.shape) == (dtype, device, old.shape)
    assert made.metadata().tensor_properties.dtype == dtype
    places = [shard.placement for shard in made.metadata().shards_metadata]
    assert {place.device().type for place in places if place} == {device}
    ranks = [shard.placement for shard in old.metadata().shards_metadata]
    assert [p.rank() for p in places if p] == [p.rank() for p in ranks if p]
    assert type(made.sharding_spec()) is type(old.sharding_spec())
    properties = made.metadata().tensor_properties
    assert made.sharding_spec().build_metadata(made.shape, properties) == made.metadata()
    assert made.process_group is old.process_group
    for new, tile in zip(made.local_shards(), old.local_tiles(), strict=True):
        assert (new.tensor.dtype, new.tensor.device.type) == (dtype, device)
        assert new.metadata in made.metadata().shards_metadata
        assert device == "meta" or torch.equal(new.tensor.cpu(), tile.cpu().to(dtype))


@each("spec", SPECS)
def test_every_way_to_say_it(spec: ShardingSpec) -> None:
    def program(rank: int) -> None:
        st = cut(numbered([4, 3]), spec, rank)
        meta, cpu = torch.device("meta"), torch.device("cpu")
        check_moved(st.to(torch.float16), st, torch.float16, "cpu")
        check_moved(st.to(dtype=torch.int32), st, torch.int32, "cpu")
        check_moved(st.to(device=meta), st, torch.float32, "meta")
        check_moved(st.to(meta), st, torch.float32, "meta")
        check_moved(st.to("meta"), st, torch.float32, "meta")
        check_moved(st.to("meta", torch.float16), st, torch.float16, "meta")
        check_moved(st.to("cpu", torch.float16), st, torch.float16, "cpu")
        check_moved(st.to(torch.ones(3, dtype=torch.float64)), st, torch.float64, "cpu")
        check_moved(st.to(torch.ones(3, device=meta)), st, torch.float32, "meta")
        check_moved(st.to(st.to(torch.float16)), st, torch.float16, "cpu")
        check_moved(st.to(dtype=torch.float64, non_blocking=True), st, torch.float64, "cpu")
        check_moved(st.to(torch.float64, memory_format=torch.contiguous_format), st,
                    torch.float64, "cpu")  # fmt: skip
        for same in (st.to(torch.float32), st.to("cpu"), st.to(cpu), st.to(device="cpu"), st.cpu(),
                     st.to(torch.ones(1)), st.to(dtype=st.dtype, device="cpu"), st.to(st),
                     st.to(process_group=st.process_group)):  # fmt: skip
            assert same is st

    on(2, program)


def test_a_copy() -> None:
    def program(rank: int) -> None:
        st = cut(numbered([4]), chunks(0, [0, 1]), rank)
        made = st.to("cpu", copy=True)
        check_moved(made, st, torch.float32, "cpu")
        made.local_tensor().zero_()
        assert st.full_tensor().tolist() == [0, 1, 2, 3]
        assert made.sharding_spec() == st.sharding_spec()

    on(2, program)


def test_gradients_flow_through_casts() -> None:
    def program(rank: int) -> None:
        st = cut(numbered([4]), chunks(0, [0, 1]), rank, requires_grad=True)
        made = st.to(torch.float64)
        assert made.requires_grad
        (gradient,) = torch.autograd.grad(made.full_tensor().sum(), st.local_tensor())
        assert (gradient.dtype, gradient.tolist()) == (torch.float32, [1, 1])

    on(2, program)


def test_what_cannot_have_gradients_requires_none() -> None:
    def program(rank: int) -> None:
        st = cut(numbered([4]), chunks(0, [1]), rank, requires_grad=True)
        whole = st.to(torch.int64)
        with torch.no_grad():
            double = st.to(torch.float64)
        for made in (whole, double):
            assert not made.requires_grad
            assert not made.metadata().tensor_properties.requires_grad
            assert not any(tile.requires_grad for tile in made.local_tiles())

    on(2, program)


def test_another_group() -> None:
    def program(rank: int) -> None:
        st = sharded.ones(chunks(0, [0, 1]), 4)
        group = dist.new_group()
        made = st.to(device="cpu", process_group=group)
        assert made is not st
        assert made.process_group is group
        assert st.to("meta", process_group=group).process_group is group
        assert made.full_tensor().tolist() == [1] * 4

    on(2, program)


@each("way", ["to", "cpu", "cuda"])
def test_other_memory_formats(way: str) -> None:
    def program(rank: int) -> None:
        st = sharded.ones(chunks(0, [0]), 4)
        getattr(st, way)(memory_format=torch.channels_last)

    message = "Only `torch.contiguous_format` or `torch.preserve_format` is supported!"
    check_all_raise(1, program, RuntimeError, message)


def test_from_meta_there_is_no_way_back() -> None:
    def program(rank: int) -> None:
        sharded.ones(chunks(0, [0], "meta"), 4).cpu()

    check_all_raise(1, program, NotImplementedError, "Cannot copy out of meta tensor")


def test_nonsense() -> None:
    check_all_raise(
        1, lambda _: sharded.ones(chunks(0, [0]), 4).to("nowhere"), RuntimeError, "nowhere"
    )


# -- accelerators ------------------------------------------------------------------------------


@pytest.fixture
def second_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank's current device of the kind "meta" has the index 1."""
    device = "tilework.sharded.moves._current_device"
    monkeypatch.setattr(device, lambda kind: torch.device(kind, 1))


@pytest.mark.usefixtures("second_of_its_kind")
def test_shards_go_to_each_ranks_current_device() -> None:
    def program(rank: int) -> Any:
        st = sharded.ones(chunks(0, [0, 1]), 4)
        made = st.to("meta")
        assert [str(shard.placement) for shard in made.metadata().shards_metadata] == [
            "rank:0/meta",
            "rank:1/meta",
        ]
        assert made.sharding_spec() == ChunkShardingSpec(0, ["rank:0/meta", "rank:1/meta"])
        assert made.to(torch.device("meta", 1)).metadata() == made.metadata()
        return made.metadata()

    found = on(2, program)
    assert found[0] == found[1]


@pytest.mark.usefixtures("second_of_its_kind")
def test_another_ranks_device_is_refused_with_a_warning() -> None:
    def program(rank: int) -> None:
        sharded.ones(chunks(0, [0]), 4).to("meta:3")

    with pytest.warns(UserWarning, match="moves each rank's shards to its current device"):
        on(1, program)


def test_to_the_current_device_always_makes_a_tensor() -> None:
    def program(rank: int) -> None:
        st = cut(numbered([4, 3]), chunks(0, [0, 1]), rank)
        here = to_current_device(st, "cpu", None, False, torch.preserve_format, None)
        check_moved(here, st, torch.float32, "cpu")
        assert here.local_tensor() is st.local_tensor()
        there = to_current_device(st, "meta", "meta", True, torch.contiguous_format, None)
        check_moved(there, st, torch.float32, "meta")
        group = dist.new_group()
        elsewhere = to_current_device(st, "cpu", None, False, torch.preserve_format, group)
        assert elsewhere.process_group is group
        for other in ("meta:3", 3, "cpu"):
            with pytest.raises(ValueError, match="moves to each rank's current device"):
                to_current_device(st, "meta", other, False, torch.preserve_format, None)

    on(2, program)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda() -> None:
    def program(rank: int) -> None:
        st = cut(numbered([4, 3]), chunks(0, [0, 1]), rank)
        made = st.cuda()
        check_moved(made, st, torch.float32, "cuda")
        assert made.cuda().local_tensor() is made.local_tensor()
        check_moved(made.cpu(), made, torch.float32, "cpu")
        assert made.to(torch.cuda.current_device()) is made

    on(2, program)
