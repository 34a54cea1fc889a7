"""State dicts by names: whole, sharded, of rank 0 alone, on every kind of model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as torchs
from torch import Tensor, nn

from tilework.checkpoint import state_dict as own
from tilework.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tilework.dtensor import DTensor, distribute_module, init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
)
from tilework.testing import run_ranks

FULL = StateDictOptions(full_state_dict=True)
RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def _ddp(seed: int) -> nn.Module:
    return DistributedDataParallel(_plain(seed))


def _inner_ddp(seed: int) -> nn.Module:
    model = _plain(seed)
    model[0] = DistributedDataParallel(model[0])
    return model


def _sharded(seed: int) -> nn.Module:
    model = _plain(seed)
    fully_shard(model[0])
    sharded: nn.Module = fully_shard(model)
    return sharded


def _tensor_parallel(seed: int) -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(_plain(seed), init_device_mesh("cpu", (2,)), plan)


def _dtensors(seed: int) -> nn.Module:
    return distribute_module(_plain(seed), init_device_mesh("cpu", (2,)))


#: torch's functions hand models of tilework's to tilework's own.
FUNCTIONS = pytest.mark.parametrize("functions", [own, torchs], ids=["own", "torch's"])
KINDS = pytest.mark.parametrize("build", [_ddp, _inner_ddp, _sharded, _tensor_parallel, _dtensors])


def _stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    return torch.equal(left, right) if isinstance(left, Tensor) else bool(left == right)


def _expected() -> tuple[dict[str, Any], dict[str, Any]]:
    model = _plain()
    return get_state_dict(model, _stepped(model))


@KINDS
@FUNCTIONS
def test_whole_state_dicts_are_those_of_one_process(
    functions: Any, build: Callable[[int], nn.Module]
) -> None:
    def program(rank: int) -> Any:
        model = build(0)
        return functions.get_state_dict(model, _stepped(model), options=FULL)

    expected = _expected()
    for state in run_ranks(2, program):
        assert _equal(list(state), list(expected))


@KINDS
@FUNCTIONS
def test_rank_0_alone_gets_whole_tensors_on_the_cpu(
    functions: Any, build: Callable[[int], nn.Module]
) -> None:
    def program(rank: int) -> Any:
        model = build(0)
        return functions.get_state_dict(model, _stepped(model), options=RANK_0)

    first, second = run_ranks(2, program)
    assert _equal(list(first), list(_expected()))
    assert second == ({}, {})


@KINDS
@FUNCTIONS
@pytest.mark.parametrize("options", [FULL, FROM_RANK_0], ids=["everywhere", "rank 0"])
def test_whole_state_dicts_are_set(
    functions: Any, build: Callable[[int], nn.Module], options: StateDictOptions
) -> None:
    expected = _expected()

    def program(rank: int) -> Any:
        model = build(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        has = rank == 0 or not options.broadcast_from_rank0
        given = dict(
            zip(
                ("model_state_dict", "optim_state_dict"), expected if has else ({}, {}), strict=True
            )
        )
        keys = functions.set_state_dict(model, optimizer, **given, options=options)
        assert keys == ([], [])
        return get_state_dict(model, optimizer, options=FULL)

    for state in run_ranks(2, program):
        assert _equal(list(state), list(expected))


def test_sharded_state_dicts_stay_sharded_and_load_into_another_layout() -> None:
    def program(rank: int) -> Any:
        model = _sharded(0)
        state = get_model_state_dict(model)
        kinds = isinstance(state["0.weight"], DTensor)
        other = _tensor_parallel(1)
        set_model_state_dict(other, state)
        return kinds, get_model_state_dict(other, options=FULL)

    for is_sharded, state in run_ranks(2, program):
        assert is_sharded
        assert _equal(state, _expected_untrained())


def _expected_untrained() -> dict[str, Any]:
    return dict(_plain().state_dict())


def test_flat_states_of_optimizers_come_back() -> None:
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)

    def program(rank: int) -> Any:
        model, other = _sharded(0), _sharded(0)
        flat = get_optimizer_state_dict(model, _stepped(model), options=options)
        optimizer = torch.optim.AdamW(other.parameters())
        set_optimizer_state_dict(other, optimizer, flat, options=options)
        return flat, get_optimizer_state_dict(other, optimizer, options=options)

    flat, again = run_ranks(2, program)[0]
    assert _equal(flat, again)
    assert {"state.0.weight.exp_avg", "param_groups.0.weight.lr"} <= set(flat)


def test_several_optimizers_are_one_state_dict() -> None:
    model = _plain()
    optimizers = [_stepped(model[0]), _stepped(model[2])]
    state = get_optimizer_state_dict(model, optimizers)
    assert set(state["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert [group["params"] for group in state["param_groups"]] == [
        ["0.weight", "0.bias"],
        ["2.weight", "2.bias"],
    ]


def test_frozen_parameters_and_other_modules_are_left_out() -> None:
    model = _plain()
    next(model.parameters()).requires_grad_(False)
    options = StateDictOptions(ignore_frozen_params=True)
    assert list(get_model_state_dict(model, submodules={model[0]}, options=options)) == ["0.bias"]
    options = StateDictOptions(keep_submodule_prefixes=False)
    assert list(get_model_state_dict(model, submodules={model[2]}, options=options)) == [
        "weight",
        "bias",
    ]


def test_a_wrapper_in_two_places_is_in_neither_name() -> None:
    shared = nn.DataParallel(nn.Linear(2, 2, bias=False))
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert list(get_model_state_dict(model)) == ["0.weight", "2.weight"]


def test_other_names_raise_unless_they_may_differ() -> None:
    model = _plain()
    with pytest.raises(RuntimeError, match=r"missing \['0.weight'.*unexpected \['other'\]"):
        set_model_state_dict(model, {"other": torch.ones(1)})
    keys = set_model_state_dict(
        model, {"0.bias": torch.ones(6)}, options=StateDictOptions(strict=False)
    )
    assert "0.weight" in keys.missing_keys
    assert model.get_parameter("0.bias").detach().equal(torch.ones(6))


def test_another_shape_raises_and_changes_nothing() -> None:
    model, before = _plain(), _plain().state_dict()
    state = _plain(1).state_dict() | {"2.bias": torch.ones(4)}
    with pytest.raises(ValueError, match=r"2.bias is a tensor of shape \[3\]"):
        set_model_state_dict(model, state)
    assert _equal(dict(model.state_dict()), dict(before))


def test_a_parameter_of_another_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"a parameter of shape \[6, 4\] that the model lacks"):
        get_optimizer_state_dict(_plain(), _stepped(_plain()))


def test_broadcasts_are_of_whole_tensors() -> None:
    with pytest.raises(ValueError, match="full_state_dict=True"):
        StateDictOptions(broadcast_from_rank0=True)
