"""Meshes with groups, on ranks that are threads."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.dtensor.sharded_values import cut, same
from tilework.dtensor import (
    Shard,
    init_device_mesh,
)
from tilework.mesh import DeviceMesh, MeshSpec, current_mesh
from tilework.testing import run_ranks


def total(group: Any) -> float:
    """What tells a group from others: the sum of its global ranks."""
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=group)
    return x.item()


def test_a_group_along_each_axis() -> None:
    def program(rank: int) -> tuple[Any, ...]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        assert mesh.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (mesh.shape, mesh.ndim, mesh.size()) == ((2, 3), 2, 6)
        assert (mesh.size("dp"), mesh.size(1), mesh.size(-2)) == (2, 3, 2)
        assert mesh.get_coordinate() == [rank // 3, rank % 3]
        assert mesh.get_local_rank("tp") == rank % 3 == mesh["tp"].get_local_rank()
        assert mesh.get_group(0) is mesh.get_group("dp") is mesh["dp"].get_group()
        assert mesh.get_all_groups() == [mesh.get_group("dp"), mesh.get_group("tp")]
        assert mesh.get_rank() == rank
        return total(mesh.get_group("dp")), total(mesh.get_group("tp"))

    dp, tp = [3.0, 5.0, 7.0], [3.0, 12.0]
    assert run_ranks(6, program) == [(dp[r % 3], tp[r // 3]) for r in range(6)]


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


def test_axes_have_a_group_together() -> None:
    def program(rank: int) -> tuple[float, ...]:
        mesh = init_device_mesh("cpu", (2, 1, 2, 2), mesh_dim_names=("a", "b", "c", "d"))
        both = mesh.axes_group((3, 0))
        assert both is mesh.axes_group([0, 1, 3]) is mesh["d", "a"].axes_group((0, 1))
        assert mesh.axes_group((0, 1)) is mesh.get_group("a")
        assert mesh.axes_group(range(4)) is dist.get_default_group()
        assert mesh.axes_group((1,)).size() == 1
        return total(both), total(mesh["c", "d"].axes_group((0, 1)))

    ad, cd = [10.0, 18.0], [6.0, 22.0]
    assert run_ranks(8, program) == [(ad[r // 2 % 2], cd[r // 4]) for r in range(8)]


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


def test_some_ranks_in_any_order() -> None:
    def program(rank: int) -> Any:
        mesh = DeviceMesh("cpu", torch.tensor([[3, 0], [1, 2]]))
        if rank == 4:
            assert mesh.get_coordinate() is None
            for call in (mesh.get_all_groups, lambda: mesh.get_local_rank(0), mesh.flatten):
                with pytest.raises(RuntimeError, match="rank 4 is not in the mesh"):
                    call()
            return None
        assert mesh.get_coordinate() == {3: [0, 0], 0: [0, 1], 1: [1, 0], 2: [1, 1]}[rank]
        return total(mesh.get_group(0)), total(mesh.get_group(1))

    assert run_ranks(5, program) == [(2.0, 3.0), (4.0, 3.0), (2.0, 3.0), (4.0, 3.0), None]


def test_groups_that_exist() -> None:
    def program(rank: int) -> None:
        pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
        cross = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
        line = DeviceMesh.from_group(pair, "cpu", mesh_dim_names=("tp",))
        assert line.get_group("tp") is pair
        assert line.get_local_rank() == rank % 2
        assert isinstance(pair, dist.ProcessGroup)
        assert isinstance(cross, dist.ProcessGroup)
        grid = DeviceMesh.from_group([cross, pair], "cpu", [[0, 1], [2, 3]])
        assert grid.get_all_groups() == [cross, pair]
        with pytest.raises(ValueError, match="the mesh's axes through rank"):
            DeviceMesh.from_group([pair, cross], "cpu", [[0, 1], [2, 3]])
        with pytest.raises(ValueError, match="need a mesh"):
            DeviceMesh.from_group([pair, cross], "cpu")

    run_ranks(4, program)


def test_values_and_copies() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        again = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
        assert mesh == again
        assert mesh is not again
        assert len({mesh, again, DeviceMesh("cpu", MeshSpec.regular((2,)))}) == 2
        assert mesh != "mesh"
        assert copy.copy(mesh) is mesh is copy.deepcopy(mesh)
        assert pickle.loads(pickle.dumps(mesh)) == mesh
        assert repr(mesh) == "DeviceMesh('cpu', [0, 1], mesh_dim_names=('dp',))"
        with pytest.raises(RuntimeError, match="No device mesh is currently active"):
            current_mesh()
        with mesh, again:
            assert current_mesh() is again
        assert mesh.get_group() is dist.get_default_group()
        assert DeviceMesh("meta", [0, 1]).device_type == "meta"

    run_ranks(2, program)


def test_a_pickled_mesh_is_made_where_it_is_not_known() -> None:
    def program(rank: int) -> None:
        data = pickle.dumps(DeviceMesh("cpu", [1, 0]))
        assert pickle.loads(data).get_coordinate() == [1 - rank]

    run_ranks(2, program)


def test_a_program_without_a_launcher_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/a/train.py"])

    def program(rank: int) -> None:
        told = r"is 1, .*`tilework run -n 2 train\.py`"
        with pytest.raises(RuntimeError, match=told):
            init_device_mesh("cpu", (2,))
        with pytest.raises(RuntimeError, match=told):
            DeviceMesh("cpu", [0, 1])
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(RuntimeError, match="There is 1: start the job with 2"):
            DeviceMesh("cpu", [0, 1])

    run_ranks(1, program)


def test_bad_meshes_raise_on_all_ranks() -> None:
    def program(rank: int) -> None:
        number: Any = 2
        with pytest.raises(TypeError, match=r"such as \(2,\), got 2"):
            init_device_mesh("cpu", number)
        with pytest.raises(RuntimeError, match=r"as many ranks .* are 2: start the job with 3"):
            init_device_mesh("cpu", (3,))
        with pytest.raises(RuntimeError, match="is a kind of device"):
            init_device_mesh((2,), "cpu")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="backend_override names axis 'a'"):
            init_device_mesh("cpu", (2,), backend_override={"a": "gloo"})
        with pytest.raises(ValueError, match="unknown backend 'none'"):
            init_device_mesh("cpu", (2,), backend_override={0: "none"})
        with pytest.raises(ValueError, match="all ranks must make the same mesh: backends"):
            init_device_mesh("cpu", (2,), backend_override={0: "gloo"} if rank else None)
        with pytest.raises(RuntimeError, match="not be bigger than default world size 2"):
            DeviceMesh("cpu", [0, 1, 2])
        with pytest.raises(RuntimeError, match="without an index"):
            DeviceMesh("cpu:0", [0, 1])
        with pytest.raises(ValueError, match="all ranks must make the same mesh"):
            DeviceMesh("cpu", [rank, 1 - rank])
        with pytest.raises(RuntimeError, match="not be bigger"):
            DeviceMesh("cpu", [0, 1] if rank else [0, 7])
        mesh = init_device_mesh("cpu", (1, 2))
        for ask in (mesh.get_group, mesh.get_local_rank):
            with pytest.raises(RuntimeError, match="have 2 dimensions"):
                ask()
        with pytest.raises(ValueError, match="taken once"):
            mesh.spec.through([0, 0], 0)
        assert total(None) == 1.0

    run_ranks(2, program)


GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


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


def test_one_rank_alone_is_told_how_to_start_more() -> None:
    def program(rank: int) -> None:
        with pytest.raises(RuntimeError, match="tilework run -n 4"):
            init_device_mesh("cpu", (2, 2))

    run_ranks(1, program)
