"""Parts of meshes, other axes, and meshes that shrink, on ranks that are threads."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.dtensor.sharded_values import cut, same
from tilework.dtensor import Shard, init_device_mesh
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks

GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def total(group: Any) -> float:
    """What tells a group from others: the sum of its global ranks."""
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=group)
    return x.item()


def test_axes_in_any_order_and_parts_of_parts() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
        turned = mesh["tp", "pp"]
        assert turned.mesh.tolist() == [[0, 2], [1, 3]]
        assert turned.mesh_dim_names == ("tp", "pp")
        assert turned["pp"].get_group() is mesh.get_group("pp")
        assert turned["pp"] == mesh["pp"]
        assert mesh["pp", "dp", "tp"] is mesh
        assert hash(mesh["pp"]) == hash(turned["pp"])
        assert mesh["pp"] != mesh["tp"]
        with pytest.raises(KeyError, match="Invalid mesh_dim_name 'tp'"):
            mesh["pp"]["tp"]

    run_ranks(4, program)


def test_parts_of_a_second_mesh_and_after_another_init() -> None:
    store = dist.HashStore()

    def program(rank: int) -> None:
        def make() -> DeviceMesh:
            return init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

        first, second = make(), make()
        parts = first["tp"], second["tp"]
        assert parts[0] is first["tp"]
        assert parts[1] is second["tp"] is not parts[0]
        dist.destroy_process_group()
        dist.init_process_group("threads", store=store, rank=rank, world_size=2)
        part = make()["tp"]
        assert pickle.loads(pickle.dumps(part)) is part
        assert total(part.get_group()) == 1

    run_ranks(2, program)


def test_flattened_axes_have_a_group_and_a_name() -> None:
    def program(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        flat = mesh["a", "c"].flatten()
        assert flat is mesh["a_c"] is mesh["a", "c"].flatten()
        assert flat.mesh_dim_names == ("a_c",)
        assert flat.get_local_rank() == rank // 4 * 2 + rank % 2
        everything = mesh.flatten("all")
        assert everything.get_group() is dist.get_default_group()
        assert mesh["all"].size() == 8
        assert mesh["b"].flatten("other").get_group() is mesh.get_group("b")
        with pytest.raises(ValueError, match="'a' is an axis already"):
            mesh["b"].flatten("a")
        with pytest.raises(ValueError, match="'all' is an axis already"):
            mesh["b"].flatten("all")
        return total(flat.get_group())

    of = {False: 0.0 + 1 + 4 + 5, True: 2.0 + 3 + 6 + 7}
    assert run_ranks(8, program) == [of[bool(rank & 2)] for rank in range(8)]


def test_flattened_axes_are_named_beside_others() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        flat = mesh["c", "a"].flatten("ca")
        assert mesh.get_group("ca") is flat.get_group()
        assert (
            mesh.get_local_rank("ca") == rank % 2 * 2 + rank // 4 == mesh["b"].get_local_rank("ca")
        )
        assert mesh.size("ca") == 4
        both = mesh["b", "ca"]
        assert both is mesh["b", "ca"]
        assert both.mesh_dim_names == ("b", "ca")
        assert both.mesh.tolist() == [[0, 4, 1, 5], [2, 6, 3, 7]]
        assert both.get_all_groups() == [mesh.get_group("b"), flat.get_group()]
        assert both["ca"] is flat
        everything = mesh["ca", "b"].flatten()
        assert everything.mesh.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
        assert mesh.root_axes("ca_b") == ("c", "a", "b")
        same(cut(GRID, both, [Shard(0), Shard(1)]) * 2, GRID * 2)
        with pytest.raises(ValueError, match="each axis can be taken once"):
            mesh["a", "ca"]
        with pytest.raises(KeyError, match="Invalid mesh_dim_name 'd'"):
            mesh["ca", "d"]
        with pytest.raises(KeyError, match="Invalid mesh_dim_name 'a'"):
            mesh["b"]["ca", "a"]

    run_ranks(8, program)


def test_one_axis_is_flat_already() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for one in (mesh["a"], init_device_mesh("cpu", (4,), mesh_dim_names=("a",))):
            assert one.flatten() is one.flatten("a") is one
        unnamed = init_device_mesh("cpu", (4,))
        assert unnamed.flatten() is unnamed

    run_ranks(4, program)


def test_meshes_are_sliced_in_any_order_and_flattened() -> None:
    """pytorch#133193, pytorch#169381: and tensors on what comes of it are right."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
        turned = mesh["tp", "pp"]
        assert turned.mesh_dim_names == ("tp", "pp")
        assert turned.mesh.tolist() == [[0, 2], [1, 3]]
        flat = mesh["pp", "tp"].flatten("all")
        assert mesh["all"] is flat
        assert flat.mesh.tolist() == [0, 1, 2, 3]
        same(cut(GRID, turned, [Shard(0), Shard(1)]) * 2, GRID * 2)
        same(cut(GRID, flat, [Shard(0)]).sum(0), GRID.sum(0))
        same(cut(GRID, mesh["tp"], [Shard(1)]).sum(), GRID.sum())

    run_ranks(4, program)


# -- after ranks were lost ------------------------------------------------------------------


def lose(rank: int, lost: tuple[int, ...]) -> bool:
    """True for a rank that is lost; the others have a group of those that are left."""
    if rank in lost:
        return True
    try:
        dist.barrier()
    except dist.PeerLostError:
        dist.shrink_group()
    return False


def test_a_mesh_of_one_axis_shrinks_to_the_ranks_that_are_left() -> None:
    def program(rank: int) -> object:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
        part = DeviceMesh("cpu", [3, 1, 0])
        if lose(rank, (1,)):
            return None
        mesh, part = mesh.shrink(), part.shrink()
        x = torch.ones(1)
        dist.all_reduce(x, group=mesh.get_group("x"))
        return x.item(), mesh.mesh.tolist(), part.mesh.tolist()

    assert run_ranks(4, program) == [
        None if rank == 1 else (3.0, [0, 1, 2], [2, 0]) for rank in range(4)
    ]


def test_a_mesh_of_two_axes_loses_whole_rows() -> None:
    def program(rank: int) -> object:
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        if lose(rank, (3,)):
            return None
        rows, columns = mesh.shrink("dp"), mesh.shrink("tp")
        sums = []
        for each in (rows, columns):
            if each.here:
                x = torch.tensor([float(rank)])
                dist.all_reduce(x, group=each.get_group("dp"))
                sums.append(x.item())
        again = rows.shrink()
        return rows.mesh.tolist(), columns.mesh.tolist(), sums, again == rows

    results = run_ranks(6, program)
    # Rank 3 was lost, so 4 and 5 are 3 and 4 now.
    rows, columns = [[0, 1], [3, 4]], [[0], [2], [3]]
    sums = {0: [4.0, 6.0], 1: [6.0], 2: [6.0], 4: [4.0, 6.0], 5: [6.0]}
    for rank, expected in sums.items():
        assert results[rank] == (rows, columns, expected, True)


def test_a_mesh_without_a_whole_slice_cannot_shrink() -> None:
    def program(rank: int) -> object:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        part = mesh["tp"]
        if lose(rank, (0, 3)):
            return None
        with pytest.raises(ValueError, match=r"no slice across axis 0 .* without ranks \[0, 3\]"):
            mesh.shrink()
        with pytest.raises(RuntimeError, match="is a part of dp=2 tp=2: let that shrink"):
            part.shrink()
        with pytest.raises(KeyError, match="pp"):
            mesh.shrink("pp")
        return dist.get_world_size()

    assert run_ranks(4, program)[1:3] == [2, 2]


def test_a_part_stays_though_nobody_holds_it() -> None:
    def program(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh["tp"].call_counts = counts = object()
        gc.collect()
        return mesh["tp"].call_counts is counts

    assert all(run_ranks(4, program))
