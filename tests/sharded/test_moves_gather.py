"""Gathering: the whole tensor on one rank or on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs

import tilework.distributed as dist
from tests.rounding import assert_close
from tests.sharded.ranks_and_specs import (
    boxes,
    check_all_raise,
    chunks,
    cut,
    examples,
    grid,
    numbered,
    on,
    specs,
)
from tests.tables import each
from tilework import sharded
from tilework.sharded import ChunkShardingSpec, ShardingSpec
from tilework.testing import run_ranks

SPECS = {
    "even": chunks(0, range(4)),
    "uneven": chunks(0, [0, 0, 1, 1, 2]),
    "columns": chunks(1, [3, 1, 2]),
    "grid": grid([5, 5], [10, 10], range(4)),
    "several": grid([5, 5], [10, 10], [0, 1, 0, 3]),
    "empty": chunks(0, [*range(4), *range(4), *range(4)]),
    "one": boxes(([0, 0], [10, 20], 2)),
}


# -- gather ------------------------------------------------------------------------------------


@each("spec", SPECS.values())
@each("dst", [0, 1])
def test_gather(spec: ShardingSpec, dst: int) -> None:
    whole = numbered([10, 20])

    def program(rank: int) -> None:
        out = torch.zeros(10, 20) if rank == dst else None
        cut(whole, spec, rank).gather(dst, out)
        assert out is None or torch.equal(out, whole)

    on(4, program)


@given(hs.data())
@examples(30)
def test_gather_of_any_cut(data: hs.DataObject) -> None:
    size = tuple(data.draw(hs.lists(hs.integers(0, 6), min_size=1, max_size=3)))
    spec, dst = data.draw(specs(size, (0, 1, 2))), data.draw(hs.integers(0, 2))
    kinds = [torch.float32, torch.bool, torch.int64, torch.uint8, torch.bfloat16, torch.complex64]
    whole = numbered(size, data.draw(hs.sampled_from(kinds)))

    def program(rank: int) -> None:
        out = torch.zeros_like(whole) if rank == dst else None
        tensor = cut(whole, spec, rank)
        tensor.gather(dst, out)
        assert out is None or torch.equal(out, whole)
        assert torch.equal(tensor.full_tensor(), whole)

    on(3, program)


def test_out_may_have_any_strides() -> None:
    whole = numbered([6, 4])

    def program(rank: int) -> None:
        room = torch.zeros(8, 12)
        for out in (room[1:7, ::3], torch.zeros(4, 6).t()):
            cut(whole, grid([2, 4], [1, 3], [0, 1]), rank).gather(1, out if rank else None)
            assert not rank or torch.equal(out, whole)
        assert room[:, 1].sum() == room[0].sum() == 0

    on(2, program)


@each("out_dtype", [torch.float64, torch.float16, torch.int32])
def test_dtypes_on_the_way(out_dtype: torch.dtype) -> None:
    whole = numbered([4, 3]) + 0.5

    def program(rank: int) -> None:
        tensor = cut(whole, chunks(0, [0, 1]), rank)
        options: list[dict[str, Any]] = [
            {}, {"enforce_dtype": True}, {"dtype": torch.float16}, {"dtype": torch.float64}
        ]  # fmt: skip
        for option in options:
            out = torch.zeros(4, 3, dtype=out_dtype) if rank == 0 else None
            tensor.gather(0, out, **option)
            assert out is None or torch.equal(out, whole.to(out_dtype))
        assert tensor.dtype == torch.float32

    on(2, program)


def test_what_is_sent_is_rounded_to_dtype() -> None:
    def program(rank: int) -> None:
        out = torch.zeros(2) if rank == 0 else None
        cut(torch.tensor([1.0, 1.0001]), chunks(0, [0, 1]), rank).gather(
            0, out, dtype=torch.float16
        )
        assert out is None or out.tolist() == [1.0, 1.0]

    on(2, program)


def test_tensors_that_require_grad_are_gathered_too() -> None:
    def program(rank: int) -> None:
        tensor = cut(numbered([4]), chunks(0, [0, 1]), rank, requires_grad=True)
        out = torch.zeros(4) if rank == 0 else None
        tensor.gather(0, out)
        assert out is None or (out.tolist() == [0, 1, 2, 3] and not out.requires_grad)

    on(2, program)


def test_dst_is_a_global_rank() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([1, 2])
        tensor = cut(numbered([4]), chunks(0, [1, 2]), rank, process_group=group)
        out = torch.zeros(4) if rank == 2 else None
        tensor.gather(2, out)  # rank 0 does nothing, without a warning
        assert out is None or out.tolist() == [0, 1, 2, 3]

    on(3, program)


def test_gather_of_metas() -> None:
    def program(rank: int) -> None:
        tensor = sharded.zeros(chunks(0, [0, 1], "meta"), 4)
        tensor.gather(0, None if rank else torch.empty(4, device="meta"))
        assert tensor.full_tensor().is_meta
        assert tensor.full_tensor().shape == (4,)

    on(2, program)


@each("move", ["gather", "full_tensor", "reshard"])
def test_some_shards_on_meta(move: str) -> None:
    def program(rank: int) -> None:
        tensor = sharded.ones(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/meta"]), 4)
        if move == "gather":
            tensor.gather(0, None if rank else torch.zeros(4))
        elif move == "reshard":
            tensor.reshard(chunks(0, [1, 0]))
        else:
            tensor.full_tensor()

    check_all_raise(2, program, ValueError, "some shards are on the meta device")


@each(
    ("outs", "message"),
    [
        ([None, None, None], r"must be specified on destination rank 1"),
        ([None, (10, 19), None], r"has size \(10, 19\), but should be \(10, 20\)"),
        (
            [(10, 20), (10, 20), None],
            "must NOT be specified on non-destination ranks: this is rank 0",
        ),
    ],
)
def test_wrong_outs_raise_on_all_ranks(outs: list[Any], message: str) -> None:
    def program(rank: int) -> None:
        tensor = sharded.ones(chunks(0, range(3)), 10, 20)
        size = outs[rank]
        tensor.gather(1, None if size is None else torch.zeros(size))

    check_all_raise(3, program, ValueError, message)


def test_dst_must_be_in_the_group() -> None:
    check_all_raise(
        2,
        lambda rank: sharded.ones(chunks(0, [0, 1]), 4).gather(2),
        ValueError,
        r"dst=2 is not part of the tensor's group of ranks \[0, 1\]",
    )


def test_ranks_that_want_different_things() -> None:
    def program(rank: int) -> None:
        sharded.ones(chunks(0, [0, 1]), 4).gather(rank, torch.zeros(4))

    check_all_raise(2, program, ValueError, "dst=0 on rank 0 does not match with dst=1 on rank 1")


# -- full_tensor -------------------------------------------------------------------------------


@each("spec", SPECS.values())
def test_full_tensor_and_its_gradient(spec: ShardingSpec) -> None:
    whole, weight = numbered([10, 20]), torch.linspace(-1, 1, 200).reshape(10, 20)

    def program(rank: int) -> None:
        tensor = cut(whole, spec, rank, requires_grad=True)
        full = tensor.full_tensor()
        assert torch.equal(full, whole)
        loss = (full * full * weight).sum()
        found = torch.autograd.grad(loss, tensor.local_tiles()) if tensor.local_shards() else ()
        for shard, gradient in zip(tensor.local_shards(), found, strict=True):
            expected = (2 * whole * weight)[shard.metadata.box.slices]
            assert_close(gradient, expected)

    on(4, program)


def test_ranks_without_shards_take_part_in_backward() -> None:
    whole = numbered([4])

    def program(rank: int) -> None:
        scale = torch.tensor(3.0, requires_grad=True)
        result: Any = cut(whole, chunks(0, [1]), rank) * scale
        loss = result.full_tensor().sum()
        (gradient,) = torch.autograd.grad(loss, [scale])
        assert gradient.item() == whole.sum().item()

    on(2, program)


def test_the_whole_is_every_ranks_own() -> None:
    def program(rank: int) -> None:
        tensor = cut(numbered([4]), boxes(([0], [4], 0)), rank)
        full = tensor.full_tensor()
        full.zero_()
        assert tensor.full_tensor().tolist() == [0, 1, 2, 3]
        assert not full.requires_grad

    on(2, program)


def test_full_tensor_outside_the_group() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([1])
        tensor = sharded.ones(chunks(0, [1]), 4, process_group=group)
        if rank:
            assert tensor.full_tensor().tolist() == [1] * 4
        else:
            with pytest.raises(ValueError, match="rank 0 is not in the tensor's group of ranks"):
                tensor.full_tensor()

    on(2, program)


def test_between_processes() -> None:
    def program(rank: int) -> None:
        whole = numbered([9, 5])
        tensor = cut(whole, grid([2, 7], [3, 2], [0, 1, 1, 0]), rank)
        out = torch.zeros(9, 5) if rank == 1 else None
        tensor.gather(1, out)
        assert out is None or torch.equal(out, whole)
        assert torch.equal(tensor.reshard(chunks(1, [1, 0])).full_tensor(), whole)

    run_ranks(2, program, kind="processes")


@pytest.mark.parametrize(
    ("out", "error", "text"),
    [
        ([0.0] * 4, TypeError, "plain tensor, got list"),
        (torch.empty(4, device="meta"), ValueError, "meta device"),
    ],
)
def test_what_gather_cannot_write_to(out: Any, error: type[Exception], text: str) -> None:
    def program(rank: int) -> None:
        st = sharded.ones(chunks(0, range(2)), 4)
        with pytest.raises(error, match=text):
            st.gather(0, out if rank == 0 else None)
        with pytest.raises(TypeError, match="plain tensor, got ShardedTensor"):
            st.gather(0, st if rank == 0 else None, enforce_dtype=True)
        assert st.full_tensor().tolist() == [1.0] * 4

    run_ranks(2, program)
