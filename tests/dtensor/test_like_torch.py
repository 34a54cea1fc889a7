"""torch's names: counts of collectives, pictures, boxes, parts made by a function."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

import tilework.distributed as dist
from tilework.dtensor import (
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    compute_local_shape_and_global_offset,
    distribute_tensor,
    from_callback,
    implicit_replication,
    init_device_mesh,
    local_box,
    visualize_sharding,
)
from tilework.layout import Box, Placement
from tilework.parallel import fully_shard
from tilework.testing import run_ranks
from tilework.testing.ranks import Kind


def test_collectives_are_counted_by_kind_and_by_torchs_operators(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        mode = CommDebugMode()
        with mode:
            x.full_tensor()
            x.redistribute(placements=[Shard(1)])
        counts = mode.get_comm_counts()
        assert (mode.get_total_counts(), dict(counts)) == (2, {"all_gather": 1, "all_to_all": 1})
        assert counts[torch.ops._c10d_functional.all_gather_into_tensor] == 1  # type: ignore[index]
        assert counts["reduce_scatter"] == 0
        file = tmp_path / f"{rank}.txt"
        mode.log_comm_debug_tracing_table_to_file(str(file))
        assert "all_gather" in file.read_text()
        with mode:
            pass
        assert mode.get_total_counts() == 0

    run_ranks(2, program)


def test_all_collectives_of_groups_are_counted() -> None:
    ops = torch.ops._c10d_functional

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for layer in (*model, model):
            fully_shard(layer)
        with CommDebugMode() as comm:
            model(torch.ones(1, 2)).sum().backward()
        # In backward both small layers are gathered together.
        counts = {ops.all_gather_into_tensor: 3, ops.reduce_scatter_tensor: 2}
        assert comm.get_comm_counts() == counts
        assert comm.get_comm_counts() != {torch.ops.c10d._allgather_base_: 3}
        with CommDebugMode() as comm:
            distribute_tensor(torch.ones(4), mesh, [Replicate()], src_data_rank=1)
            dist.all_reduce(torch.ones(1))
        assert comm.get_comm_counts() == {ops.broadcast: 1, torch.ops.c10d.allreduce_: 1}
        dist.all_reduce(torch.ones(1))
        assert comm.get_total_counts() == 2

    for kind in get_args(Kind):
        run_ranks(2, program, kind=kind)


def test_a_picture_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        visualize_sharding(x, header="the weight")

    run_ranks(2, program)
    printed = capsys.readouterr().out
    assert printed.count("the weight") == printed.count("DTensor f32") == 1


def test_plain_tensors_are_replicated_with_and_without_saying_it() -> None:
    def program(rank: int) -> list[float]:
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with implicit_replication():
            total = x + torch.ones(4)
        assert isinstance(total, DTensor)
        full: list[float] = total.full_tensor().tolist()
        return full

    assert run_ranks(2, program)[0] == [2.0] * 4


def test_the_part_of_a_rank_is_known_without_a_tensor() -> None:
    def program(rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        mesh = init_device_mesh("cpu", (2, 2))
        both = [Shard(0), Shard(0)]
        boxes = [local_box((5, 2), mesh, both, order=order) for order in ((0, 1), (1, 0))]
        assert local_box((5, 2), mesh, both, rank=0).offsets == (0, 0)
        sizes, offsets = compute_local_shape_and_global_offset((5, 2), mesh, both)
        assert (offsets, sizes) == (boxes[0].offsets, boxes[0].sizes)
        with pytest.raises(ValueError, match="rank 7 is not in"):
            local_box((5,), mesh, [Replicate(), Replicate()], rank=7)
        return [(box.offsets, box.sizes) for box in boxes]

    assert run_ranks(4, program)[1] == [((2, 0), (1, 2)), ((3, 0), (1, 2))]


def test_each_rank_is_asked_for_its_part_only() -> None:
    def program(rank: int) -> tuple[list[Box], list[int]]:
        asked: list[Box] = []

        def part(box: Box) -> torch.Tensor:
            asked.append(box)
            return torch.arange(5)[box.slices]

        mesh = init_device_mesh("cpu", (4,))
        x = from_callback((5,), mesh, [Shard(0)], part)
        return asked, x.full_tensor().tolist()

    results = run_ranks(4, program)
    assert [(box.offsets, box.sizes) for (box,), _ in results] == [
        ((0,), (2,)),
        ((2,), (2,)),
        ((4,), (1,)),
        ((5,), (0,)),
    ]
    assert results[0][1] == list(range(5))


def test_a_part_of_another_shape_is_refused() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(ValueError, match=r"shape \[2\] for box"):
            from_callback((4,), mesh, [Shard(0)], lambda box: torch.ones(4))
        with pytest.raises(TypeError, match="to make a tensor"):
            from_callback((4,), mesh, [Shard(0)], lambda box: None)  # type: ignore[arg-type,return-value]

    run_ranks(2, program)


def test_one_rank_alone_can_take_all_parts_for_equal() -> None:
    def program(rank: int) -> tuple[torch.Size, object] | None:
        mesh = init_device_mesh("cpu", (2, 2))
        if rank != 1:
            return None
        layout: list[Placement] = [Shard(0), Partial()]
        x = DTensor.from_local(torch.ones(2, 3), mesh, layout, check=False)
        with pytest.raises(ValueError, match="leave one"):
            DTensor.from_local(torch.ones(2), mesh, layout, check=False, run_check=True)
        return x.shape, x.placements

    assert run_ranks(4, program)[1] == (torch.Size([4, 3]), (Shard(0), Partial()))
