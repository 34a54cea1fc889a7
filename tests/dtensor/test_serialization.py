"""DTensors in files, in copies and in state dicts."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tilework.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from tilework.testing import run_ranks

LAYOUTS: list[tuple[list[Placement], Any]] = [
    ([Shard(0), Shard(1)], None),
    ([Shard(0), Shard(0)], (1, 0)),
    ([Shard(1, sizes=(4, 1)), Replicate()], None),
    ([Partial("avg"), Shard(0)], None),
]


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(data: bytes, **options: Any) -> Any:
    return torch.load(io.BytesIO(data), **options)


def test_a_tensor_comes_back_as_it_was() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(35.0).view(7, 5)
        for placements, order in LAYOUTS:
            there = distribute_tensor(whole, mesh, placements, order=order).requires_grad_()
            ways = [
                loaded(saved(there), weights_only=True),
                loaded(saved({"a": [there]}), weights_only=False)["a"][0],
                pickle.loads(pickle.dumps(there)),
                copy.deepcopy(there),
                copy.deepcopy([there, there])[1],
            ]
            for found in ways:
                assert isinstance(found, DTensor)
                assert found._spec == there._spec
                assert found.device_mesh is mesh
                assert found.requires_grad
                assert found.is_leaf
                assert torch.equal(found.to_local(), there.to_local())
                assert found.to_local().data_ptr() != there.to_local().data_ptr()

    run_ranks(4, program)


def test_strides_come_back() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        whole = distribute_tensor(torch.arange(120.0).view(2, 3, 4, 5), mesh, [Shard(1)])
        images = whole.to(memory_format=torch.channels_last)
        expanded = whole[:1].expand(2, -1, -1, -1)
        for there in (whole.transpose(0, 3), whole[:, :, 1:3], expanded, images):
            found = loaded(saved(there), weights_only=True)
            assert isinstance(there, DTensor)
            assert found.stride() == there.clone().stride()
            copied = found.transpose(0, 1).reshape(-1)
            copied.zero_()
            found.add_(1)
            assert torch.equal(found.full_tensor(), there.full_tensor() + 1)

        def before(*saved: Any) -> Any:
            local, device_mesh, layout, *rest = saved
            return rebuild(local, device_mesh, layout[:3], *rest)  # as files had it

        rebuild, arguments = images.__reduce_ex__(4)  # type: ignore[no-untyped-call]
        assert before(*arguments).stride() == whole.stride()

    run_ranks(2, program)


def test_a_parameter_comes_back_as_one() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        for found in (loaded(saved(parameter), weights_only=True), copy.deepcopy(parameter)):
            assert isinstance(found, nn.Parameter)
            assert isinstance(found, DTensor)

    run_ranks(2, program)


def test_only_this_ranks_part_is_in_the_file() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        part = torch.zeros(1 << 20)[: 1 << 10]
        there = DTensor.from_local(part, mesh, [Shard(0)])
        assert len(saved(there)) < (1 << 10) * 4 + 10_000

    run_ranks(2, program)


def test_a_part_is_loaded_where_it_was_saved() -> None:
    files: dict[int, bytes] = {}

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        files[rank] = saved(distribute_tensor(torch.arange(4), mesh, [Shard(0)]))
        files[rank + 2] = saved(distribute_tensor(torch.arange(4), mesh))

    run_ranks(2, save)

    def load(rank: int) -> Any:
        # In a new job: the mesh is made as the file says.
        return loaded(files[rank], weights_only=True).full_tensor().tolist()

    assert run_ranks(2, load) == [[0, 1, 2, 3]] * 2

    def other(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(ValueError, match=r"the rank at \[[10]\] of"):
            loaded(files[1 - rank])
        whole = loaded(files[2])
        assert whole.device_mesh is mesh
        assert whole.to_local().tolist() == [0, 1, 2, 3]

    run_ranks(2, other)
    with pytest.raises(RuntimeError, match=r"not be bigger .* load it in a job of 2"):
        run_ranks(1, lambda _: loaded(files[0]))


def test_outside_the_mesh_too() -> None:
    def program(rank: int) -> None:
        mesh = DeviceMesh("cpu", [0])
        found = loaded(saved(distribute_tensor(torch.ones(3), mesh)))
        assert found.shape == (3,)
        assert found.to_local().shape == ((3,) if rank == 0 else (0,))

    run_ranks(2, program)


def test_results_cannot_be_copied() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,))
        made = distribute_tensor(torch.ones(3, requires_grad=True), mesh) * 2
        with pytest.raises(RuntimeError, match="leaves"):
            copy.deepcopy(made)

    run_ranks(1, program)


def rows(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))


def test_state_dicts_keep_layouts_and_take_values_of_any() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = distribute_module(copy.deepcopy(plain), mesh, rows)
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        assert state["0.weight"].placements == (Shard(0),)

        def check(expected: nn.Module) -> None:
            for name, value in expected.state_dict().items():
                found: Any = model.state_dict()[name]
                assert torch.equal(found.full_tensor(), value), name
            assert model.state_dict()["0.weight"].placements == (Shard(0),)

        check(plain)
        model.load_state_dict(other.state_dict())  # plain tensors are cut
        check(other)
        columns = {
            name: distribute_tensor(value, mesh, [Shard(-1) if value.ndim else Replicate()])
            for name, value in plain.state_dict().items()
        }
        model.load_state_dict(columns)
        check(plain)
        model.load_state_dict(other.state_dict())
        model.load_state_dict(loaded(saved(state), weights_only=True))
        check(other)  # what was saved shares memory with the model
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**state, "0.weight": torch.ones(1, 3)})

    run_ranks(2, program)


def test_a_copied_parameter_has_no_gradient() -> None:
    """As plain ones: a copy of a model amid training would add to what the model had."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        layer = distribute_module(nn.Linear(2, 2), mesh)
        leaf = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]).requires_grad_()
        layer(leaf).sum().backward()
        twin, copied = copy.deepcopy(layer), copy.deepcopy(leaf)
        assert all(p.grad is None and p.requires_grad and p.is_leaf for p in twin.parameters())
        assert leaf.grad is not None
        assert copied.grad is not None
        assert copied.grad.tolist() == leaf.grad.tolist()

    run_ranks(2, program)
