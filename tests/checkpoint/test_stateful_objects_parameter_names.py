"""Names of parameters in the states of optimizers: unique, and found again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tilework import checkpoint
from tilework.checkpoint.stateful_objects import one_to_one, parameters_of, places_of_parameters
from tilework.errors import CheckpointError
from tilework.parallel import ZeroRedundancyOptimizer
from tilework.parallel.data_parallel.leaves import local_tensors
from tilework.sharded import ChunkShardingSpec, ShardedOptimizer, ShardedTensor, shard_parameter
from tilework.testing import run_ranks


def linear() -> nn.Linear:
    return nn.Linear(2, 2, bias=False)


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = linear()


def adam(*modules: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam([p for module in modules for p in module.parameters()])


def stepped(*modules: nn.Module, first: float = 1) -> torch.optim.Adam:
    """An optimizer of which each parameter has another state."""
    optimizer = adam(*modules)
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        parameter.grad = torch.full_like(parameter, first + number)
    optimizer.step()
    return optimizer


def moment(optimizer: torch.optim.Optimizer, module: nn.Module) -> float | None:
    (parameter,) = module.parameters()
    state = optimizer.state.get(parameter)
    return round(state["exp_avg"][0, 0].item() * 10, 3) if state else None


def names(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        name for group in parameters_of(optimizer, places_of_parameters(state)) for name, _ in group
    ]


def save_as(path: Path, state: dict[str, Any], own: list[str]) -> None:
    """Save a state whose optimizer is at "opt", with other names of its parameters."""
    optimizer = state["opt"]
    packed = optimizer.state_dict()
    packed["state"] = {own[number]: each for number, each in packed["state"].items()}
    packed["param_groups"][0]["params"] = own
    checkpoint.save({**state, "opt": packed}, path)


def test_names_do_not_collide(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        return {"proj": linear(), "model": WithHead(), "head": linear()}

    modules = make()
    optimizer = stepped(*modules.values())
    assert names(modules, optimizer) == ["proj/weight", "model/head.weight", "head/weight"]
    checkpoint.save({**modules, "opt": optimizer}, tmp_path)
    again = make()
    other = adam(*again.values())
    checkpoint.load(tmp_path, into={**again, "opt": other})
    assert [moment(other, module) for module in again.values()] == [1, 2, 3]


def test_names_are_unique_whatever_keys_are() -> None:
    state: Any = {"a": {"b": linear(), 1: linear(), "1": linear()}, "a.b": linear()}
    optimizer = adam(*state["a"].values(), state["a.b"])
    found = names(state, optimizer)
    assert len(set(found)) == 4
    assert found[0] == "('a', 'b')/weight"
    loose = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    given = [("weight", state["a.b"].weight), *zip(("weight", "x", "x"), loose, strict=True)]
    assert names(state, torch.optim.SGD(given)) == ["weight", 1, 2, 3]


def test_order_and_other_modules_are_of_no_account(tmp_path: Path) -> None:
    a, b, c = linear(), linear(), linear()
    both = stepped(a, b)
    for state in ({"a": a, "b": b}, {"c": c, "b": b, "a": a}):
        assert names(state, both) == ["a/weight", "b/weight"]
        assert names(state, adam(b)) == ["weight"]
    checkpoint.save({"a": a, "b": b, "opt": both}, tmp_path)
    swapped = adam(a, b)
    checkpoint.load(tmp_path, into={"b": b, "a": a, "opt": swapped})
    assert [moment(swapped, module) for module in (a, b)] == [1, 2]
    alone = adam(b)
    checkpoint.load(tmp_path, into={"b": b, "opt": alone})
    assert moment(alone, b) == 2


def test_a_module_beside_the_saved_one_takes_nothing(tmp_path: Path) -> None:
    a, b = linear(), linear()
    checkpoint.save({"a": a, "opt": stepped(a)}, tmp_path)
    for order in ("ab", "ba"):
        optimizer = adam(a, b)
        state = {key: {"a": a, "b": b}[key] for key in order} | {"opt": optimizer}
        report = checkpoint.load(tmp_path, into=state, strict=False)
        assert report.missing == ["b.weight", "opt.state.b/weight"]
        assert (moment(optimizer, a), moment(optimizer, b)) == (1, None)


def test_pipeline_stages_of_ranks_come_together(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        stage = linear()
        optimizer = stepped(stage, first=rank + 1)
        checkpoint.save({f"stage{rank}": stage, f"opt{rank}": optimizer}, tmp_path)

    run_ranks(2, save)
    stages = [linear(), linear()]
    optimizers = [adam(stage) for stage in stages]
    into = {f"stage{n}": stage for n, stage in enumerate(stages)}
    into |= {f"opt{n}": optimizer for n, optimizer in enumerate(optimizers)}  # type: ignore[misc]
    checkpoint.load(tmp_path, into=into)
    assert [moment(o, s) for o, s in zip(optimizers, stages, strict=True)] == [1, 2]


def test_renamed_modules(tmp_path: Path) -> None:
    a, b = linear(), linear()
    checkpoint.save({"a": a, "b": b, "opt": stepped(a, b)}, tmp_path)
    optimizer = adam(a, b)
    swap = {"x.weight": "b.weight", "b.weight": "a.weight"}
    checkpoint.load(tmp_path, into={"x": a, "b": b, "opt": optimizer}, map_names=swap)
    assert [moment(optimizer, module) for module in (a, b)] == [2, 1]


# -- names of earlier versions ------------------------------------------------------------------


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_old_names_that_are_certain_are_taken(tmp_path: Path, order: str) -> None:
    modules = {"a": linear(), "b": linear()}
    optimizer = stepped(*modules.values())
    old = ["weight", "b.weight"] if order == "ab" else ["a.weight", "weight"]
    save_as(tmp_path, {**{key: modules[key] for key in order}, "opt": optimizer}, old)
    for way in ("ab", "ba"):
        other = adam(*modules.values())
        checkpoint.load(tmp_path, into={**{key: modules[key] for key in way}, "opt": other})
        assert [moment(other, module) for module in modules.values()] == [1, 2]


def test_an_old_name_may_look_like_another_module_s(tmp_path: Path) -> None:
    modules = {"model": WithHead(), "head": linear()}
    optimizer = stepped(*modules.values())
    save_as(tmp_path, {**modules, "opt": optimizer}, ["head.weight", "weight"])
    other = adam(*modules.values())
    checkpoint.load(tmp_path, into={**modules, "opt": other})
    assert [moment(other, module) for module in modules.values()] == [1, 2]


def test_old_names_that_are_not_certain_are_missing(tmp_path: Path) -> None:
    b = linear()
    save_as(
        tmp_path / "1", {"a": linear(), "b": b, "opt": stepped(linear(), b)}, ["weight", "b.weight"]
    )
    with pytest.raises(CheckpointError, match=r"lacks opt\.state\.weight"):
        checkpoint.load(tmp_path / "1", into={"b": b, "opt": adam(b)})
    modules = {"proj": linear(), "model": WithHead(), "head": linear()}
    optimizer = stepped(*modules.values())
    save_as(tmp_path / "2", {**modules, "opt": optimizer}, ["weight", "head.weight", "head.weight"])
    other = adam(*modules.values())
    checkpoint.load(tmp_path / "2", into={**modules, "opt": other}, strict=False)
    assert [moment(other, module) for module in modules.values()] == [None, None, None]


def test_states_that_were_not_saved_stay(tmp_path: Path) -> None:
    a, b = linear(), linear()
    checkpoint.save({"a": a, "opt": stepped(a)}, tmp_path)
    optimizer = stepped(a, b, first=5)
    report = checkpoint.load(tmp_path, into={"a": a, "b": b, "opt": optimizer}, strict=False)
    assert report.missing == ["b.weight", "opt.state.b/weight"]
    assert [moment(optimizer, module) for module in (a, b)] == [1, 6]


def split(*modules: Any) -> Any:
    parameters = [module.weight for module in modules]
    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam)


def sharded(*modules: Any) -> Any:
    spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    for module in modules:
        if not isinstance(module.weight, ShardedTensor):
            shard_parameter(module, "weight", spec)
    named = {f"{number}.weight": module.weight for number, module in enumerate(modules)}
    return ShardedOptimizer(named, torch.optim.Adam)


@pytest.mark.parametrize("make", [split, sharded])
def test_states_on_each_rank_that_were_not_saved_stay(
    tmp_path: Path, make: Callable[..., Any]
) -> None:
    def step(optimizer: Any, modules: nn.ModuleList, grad: float) -> None:
        for tile in (tile for each in modules.parameters() for tile in local_tensors(each)):
            tile.grad = torch.full_like(tile, grad)
        optimizer.step()

    def program(rank: int) -> list[float]:
        modules = nn.ModuleList([linear(), linear()])
        first, both = make(modules[0]), make(*modules)
        step(first, modules, 1)
        checkpoint.save({"m": modules, "opt": first}, tmp_path)
        step(both, modules, 5)
        report = checkpoint.load(tmp_path, into={"m": modules, "opt": both}, strict=False)
        assert report.missing == ["opt.state.1.weight"]
        states = getattr(both, "optim", both).state.values()
        return [round(state["exp_avg"].mean().item(), 3) for state in states if state]

    assert sorted({value for found in run_ranks(2, program) for value in found}) == [0.1, 0.5]


def test_states_of_other_ranks_stay(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        module = linear()
        checkpoint.save({"a": module, "opt": stepped(module, first=rank + 1)}, tmp_path)

    def load(rank: int) -> float | None:
        module = linear()
        optimizer = stepped(module, first=5)
        report = checkpoint.load(tmp_path, into={"a": module, "opt": optimizer})
        assert ("opt.state.weight.exp_avg" in report.other_ranks) == (rank == 2)
        loaded = moment(optimizer, module)
        optimizer.step()  # with a whole state
        return loaded

    run_ranks(2, save)
    assert run_ranks(3, load) == [1, 2, 5]


def test_one_to_one_leaves_out_what_is_not_certain() -> None:
    assert one_to_one({}) == {}
    assert one_to_one({"p": "xy"}) == {}
    assert one_to_one({"p": "xy", "q": "y"}) == {"p": "x", "q": "y"}
    assert one_to_one({"p": "x", "q": "xy", "r": "yz", "s": "z"}) == {}
    chain = {n: [n, n + 1] for n in range(1000)} | {1000: [1000]}
    assert one_to_one(chain) == {n: n for n in range(1001)}
