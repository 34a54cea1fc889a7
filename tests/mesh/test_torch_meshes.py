"""Meshes under torch's names: flattened, unflattened, joined, with backends of their own."""

from __future__ import annotations

import pytest
import torch

import tilework.distributed as dist
from tests.tables import each
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.mesh.torch_meshes import backends_of_axes
from tilework.testing import run_ranks


def total(mesh: DeviceMesh, name: str) -> float:
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=mesh[name].get_group())
    return x.item()


def test_an_axis_becomes_two_with_groups_of_their_own() -> None:
    def program(rank: int) -> tuple[object, ...]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        parts = mesh._unflatten(0, (2, 2), ("dp", "tp"))
        names = parts.mesh_dim_names
        return names, total(parts, "dp"), total(parts, "tp"), parts._flatten("all").shape

    names = ("dp", "tp")
    assert run_ranks(4, program) == [
        (names, 2.0, 1.0, (4,)),
        (names, 4.0, 1.0, (4,)),
        (names, 2.0, 5.0, (4,)),
        (names, 4.0, 5.0, (4,)),
    ]


def test_the_other_axes_share_their_groups() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "ep", "tp"))
        parts = mesh.unflatten("ep", (1, 2), ("a", "b"))
        assert parts.mesh_dim_names == ("dp", "a", "b", "tp")
        assert parts["dp"].get_group() is mesh["dp"].get_group()

    run_ranks(4, program)


def test_parts_of_one_mesh_are_joined() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
        assert DeviceMesh._concatenate([mesh["tp"], mesh["dp"]]) == mesh["tp", "dp"]
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        with pytest.raises(ValueError, match="parts of one mesh"):
            DeviceMesh.concatenate([mesh["tp"], other])

    run_ranks(2, program)


def test_what_does_not_fit_the_axis_is_refused() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        with pytest.raises(ValueError, match=r"the product of the sizes \(3, 1\) is 3"):
            mesh.unflatten("a", (3, 1), ("x", "y"))
        with pytest.raises(ValueError, match="must name each"):
            mesh.unflatten("a", (2, 1), ("x",))

    run_ranks(2, program)


def test_an_axis_has_a_backend_of_its_own() -> None:
    def program(rank: int) -> tuple[str, str, str]:
        override = {"dp": "threads"}
        names = ("dp", "tp")
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names, backend_override=override)
        assert total(mesh, "dp") == 1.0
        flat = mesh._flatten("all", backend_override="threads")
        groups = mesh["dp"].get_group(), mesh["tp"].get_group(), flat.get_group()
        return tuple(dist.get_backend(group) for group in groups)  # type: ignore[return-value]

    assert run_ranks(2, program, backend="shm")[0] == ("threads", "shm", "threads")


@each(
    ("override", "error"),
    [
        ("gloo", TypeError),
        ({"dp": 3}, TypeError),
        ({"dp": "gloo", 0: "gloo"}, ValueError),
        ({2: "gloo"}, ValueError),
        (["gloo"], ValueError),
    ],
)
def test_what_names_no_backends_is_refused(override: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="backend_override"):
        backends_of_axes(override, ("dp", "tp"), 2)


def test_options_beside_a_backend_are_dropped() -> None:
    assert backends_of_axes([None, ("gloo", object())], None, 2) == (None, "gloo")
