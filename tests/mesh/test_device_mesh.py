"""Meshes with groups, on ranks that are threads."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tilework.dtensor import init_device_mesh
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
        with pytest.raises(ValueError, match="groups and no mesh: pass mesh"):
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


def test_a_pickled_part_is_taken_of_the_mesh_that_is_there() -> None:
    """As by a program that was started again, and loads before it takes the parts."""

    def program(rank: int) -> tuple[float, float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh.flatten("all")
        dp, tp = pickle.dumps(mesh["dp"]), pickle.dumps(mesh["tp", "dp"])
        assert pickle.loads(tp).get_coordinate() == [rank % 2, rank // 2]
        assert pickle.loads(dp).get_group() is mesh.get_group("dp")
        assert pickle.loads(pickle.dumps(mesh["all"])) is mesh["all"]
        return total(pickle.loads(dp).get_group()), total(pickle.loads(tp).get_group("tp"))

    assert run_ranks(4, program) == [(2.0, 1.0), (4.0, 1.0), (2.0, 5.0), (4.0, 5.0)]


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
        with pytest.raises(RuntimeError, match="needs 3 ranks, and there are 2"):
            init_device_mesh("cpu", (3,))
        with pytest.raises(RuntimeError, match="must be a kind of device"):
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


def test_one_rank_alone_is_told_how_to_start_more() -> None:
    def program(rank: int) -> None:
        with pytest.raises(RuntimeError, match="tilework run -n 4"):
            init_device_mesh("cpu", (2, 2))

    run_ranks(1, program)
