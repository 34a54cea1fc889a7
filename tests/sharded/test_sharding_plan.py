"""shard_module: a whole module by a plan, checked before anything moves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.sharded.ranks_and_specs import check_all_raise, chunks, on
from tests.tables import each
from tilework.sharded import (
    ShardedTensor,
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    rand,
    shard_module,
)

ROWS, COLUMNS = chunks(0, [0, 1]), chunks(1, [1, 0])


class Block(nn.Module):
    """Two layers and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 4)
        self.fc2 = nn.Linear(4, 6)
        self.register_buffer("scale", torch.rand(4))


class Model(nn.Module):
    """Layers, of which one is tied to another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.embedding = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embedding.weight


def sharded_names(module: nn.Module) -> list[str]:
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if isinstance(parameter, ShardedTensor)]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def test_parameters_by_name_and_wildcard() -> None:
    source = Model()

    def program(rank: int) -> None:
        model = copy.deepcopy(source) if rank == 1 else Model()  # other values
        plan = ShardingPlan(
            {
                "layers.*.fc?.weight": ROWS,
                "layers.1.fc2.weight": COLUMNS,
                "layers.0.scale": ROWS,
            }
        )
        shard_module(model, plan, src_rank=1)
        assert sharded_names(model) == [
            "layers.0.scale",
            "layers.0.fc1.weight",
            "layers.0.fc2.weight",
            "layers.1.fc1.weight",
            "layers.1.fc2.weight",
        ]
        named = dict(model.named_parameters())
        for name in sharded_names(model):
            tensor = named[name]
            assert isinstance(tensor, ShardedTensor)
            assert tensor.sharding_spec() == (COLUMNS if name == "layers.1.fc2.weight" else ROWS)
            expected = dict([*source.named_parameters(), *source.named_buffers()])[name]
            assert torch.equal(tensor.full_tensor(), expected)
            assert tensor.requires_grad == expected.requires_grad

    on(2, program)


def test_a_wildcard_stands_for_one_part_of_a_name() -> None:
    def program(rank: int) -> None:
        model = Model()
        shard_module(model, ShardingPlan({"*.weight": ROWS}))
        assert sharded_names(model) == ["embedding.weight", "head.weight"]

    on(2, program)


@each("names", [["embedding.weight"], ["head.weight", "embedding.weight"], ["h*.weight"]])
def test_tied_parameters_stay_tied(names: list[str]) -> None:
    def program(rank: int) -> None:
        model = Model()
        shard_module(model, ShardingPlan(dict.fromkeys(names, ROWS)))
        assert isinstance(model.head.weight, ShardedTensor)
        assert model.head.weight is model.embedding.weight

    on(2, program)


def test_only_the_source_needs_values() -> None:
    def program(rank: int) -> Tensor:
        with torch.device("cpu" if rank == 0 else "meta"):
            model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        shard_module(model, ShardingPlan({"*.*": ROWS}))
        after = [whole(parameter) for parameter in model.parameters()]
        assert rank or all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        return after[0]

    one, two = on(2, program)
    assert torch.equal(one, two)


class Table(nn.Module):
    """Returns what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.st = rand(ROWS, 4, 6)

    def forward(self) -> ShardedTensor:
        return self.st


class Tables(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Table(), Table()

    def forward(self) -> tuple[Any, Any]:
        return self.one(), self.two()


def test_outputs() -> None:
    def program(rank: int) -> None:
        model = Tables()
        shard_module(model, ShardingPlan({}, {"one": COLUMNS, "two": None}, ["one"]))
        one, two = model()
        assert type(one) is Tensor
        assert one.shape == (4, 3)
        assert two.sharding_spec() == ROWS
        shard_module(model, ShardingPlan({}, {"": COLUMNS}, [""]))
        assert model()[1].shape == (4, 3)

    on(2, program)


class ByHand(Sharder):
    """Puts another module in place, which takes part in communication."""

    def shard(self, module: nn.Module) -> nn.Module:
        held = torch.ones(1)
        dist.all_reduce(held)
        return nn.Sequential(module, nn.Hardtanh(0, held.item()))


def test_sharder_replaces_the_module() -> None:
    def program(rank: int) -> None:
        model = Model()
        before = model.layers[0]
        # fc1 is no part of fc10.
        model.fc1, model.fc10 = nn.Linear(2, 2), nn.Linear(2, 2)
        plan: dict[str, Any] = {"layers.0": ByHand(), "fc1": ByHand(), "fc10.weight": ROWS}
        shard_module(model, ShardingPlan(plan))
        replaced = model.layers[0]
        assert isinstance(replaced, nn.Sequential)
        assert replaced[0] is before
        assert replaced[1].max_val == 2
        assert isinstance(model.fc1, nn.Sequential)
        assert isinstance(model.fc10.weight, ShardedTensor)

    on(2, program)


class Half(ShardingPlanner):
    """Cuts all matrices."""

    def build_plan(self, module: nn.Module) -> ShardingPlan:
        matrices = [name for name, p in module.named_parameters() if p.dim() == 2]
        return ShardingPlan(dict.fromkeys(matrices, ROWS))


def test_planner() -> None:
    def program(rank: int) -> None:
        model = Model()
        shard_module(model, Half().build_plan(model))
        assert len(sharded_names(model)) == 6
        assert "layers.0.fc1.bias" not in sharded_names(model)

    on(2, program)


def test_a_group_of_some_ranks() -> None:
    def program(rank: int) -> list[list[int]]:
        group = dist.new_group([2, 0])
        model = nn.Linear(3, 4)
        plan = ShardingPlan({"weight": chunks(0, [2, 0])})
        shard_module(model, plan, src_rank=2, process_group=group)
        assert isinstance(model.weight, ShardedTensor)
        return [list(tile.shape) for tile in model.weight.local_tiles()]

    assert on(3, program) == [[[2, 3]], [], [[2, 3]]]


def test_plans_in_another_order_are_the_same() -> None:
    def program(rank: int) -> bool:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        names = ["0.weight", "1.weight", "0.bias"]
        plan = ShardingPlan(dict.fromkeys(names if rank else reversed(names), ROWS))
        shard_module(model, plan)
        return sharded_names(model) == ["0.weight", "0.bias", "1.weight"]

    assert on(2, program) == [True, True]


# -- what raises on all ranks, and leaves the module as it was ------------------------------------

Case = tuple[Callable[[int], ShardingPlan], type[Exception], str]
WRONG: dict[str, Case] = {
    "name": (
        lambda rank: ShardingPlan({"layers.0.fc1.wieght": ROWS}),
        AttributeError,
        "Model has no attribute `layers.0.fc1.wieght`; did you mean 'layers.0.fc1.weight'",
    ),
    "name on one rank": (
        lambda rank: (
            ShardingPlan({f"layers.{rank}.fc1.weight": ROWS, "layers.2.x": ROWS})
            if rank
            else ShardingPlan({"head.weight": ROWS})
        ),
        AttributeError,
        r"has no attribute `layers.2.x`",
    ),
    "wildcard": (
        lambda rank: ShardingPlan({"layers.*.weight": ROWS}),
        AttributeError,
        r"no attribute `layers.\*.weight`; did you mean",
    ),
    "no tensor": (
        lambda rank: ShardingPlan({"training": ROWS}),
        ValueError,
        "Expected Model.training to be a Tensor, but found bool",
    ),
    "two wildcards": (
        lambda rank: ShardingPlan({"head.*": ROWS, "*.weight": COLUMNS}),
        ValueError,
        "two wildcards of the plan give 'head.weight' different specs",
    ),
    "tied": (
        lambda rank: ShardingPlan({"head.weight": ROWS, "embedding.weight": COLUMNS}),
        ValueError,
        "are one parameter",
    ),
    "plans": (
        lambda rank: ShardingPlan({"head.weight": [ROWS, COLUMNS][rank]}),
        ValueError,
        "head.weight: sharding_spec=.* does not match with sharding_spec=",
    ),
    "more on one rank": (
        lambda rank: ShardingPlan(
            {"head.weight": ROWS, **({"layers.0.scale": ROWS} if rank else {})}
        ),
        ValueError,
        "layers.0.scale: src_rank=nothing on rank 0 does not match with src_rank=0 on rank 1",
    ),
    "outputs": (
        lambda rank: ShardingPlan({}, {"head": [ROWS, COLUMNS][rank]}),
        ValueError,
        "head: output_plan=",
    ),
    "local": (
        lambda rank: ShardingPlan({}, None, ["head"] * rank),
        ValueError,
        "return_local_tensor",
    ),
    "sharder": (
        lambda rank: ShardingPlan({"head": [ByHand(), Other()][rank]}),
        ValueError,
        "head: sharder=ByHand on rank 0 does not match with sharder=Other on rank 1",
    ),
    "sharder's parameter": (
        lambda rank: ShardingPlan({"layers": ByHand(), "layers.0.fc1.weight": ROWS}),
        RuntimeError,
        "leave out one of them",
    ),
    "sharder's sharder": (
        lambda rank: ShardingPlan({"layers.0": ByHand(), "layers.0.fc1": ByHand()}),
        RuntimeError,
        "a Sharder for the module 'layers.0'",
    ),
    "module": (
        lambda rank: ShardingPlan({}, {"hed": ROWS}),
        AttributeError,
        "no attribute `hed`; did you mean 'head'",
    ),
    "local module": (lambda rank: ShardingPlan({}, None, ["x"]), AttributeError, "`x`"),
    "sharder's module": (lambda rank: ShardingPlan({"hea": ByHand()}), AttributeError, "`hea`"),
    "spec": (
        lambda rank: ShardingPlan({"embedding.weight": ROWS, "layers.0.scale": COLUMNS}),
        ValueError,
        "Invalid sharding dim",
    ),
}


class Other(ByHand):
    """Another."""


@each("case", WRONG)
def test_all_ranks_raise(case: str) -> None:
    make, kind, pattern = WRONG[case]

    def program(rank: int) -> None:
        model = Model()
        try:
            shard_module(model, make(rank))
        finally:
            assert not sharded_names(model)
            assert not any(module._forward_hooks for module in model.modules())

    check_all_raise(2, program, kind, pattern)


def test_plans_are_checked_when_they_are_made() -> None:
    with pytest.raises(TypeError, match="Only `ShardingSpec` and `Sharder` are supported to shard"):
        ShardingPlan({"weight": "rows"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="Only `ShardingSpec` is supported as output_plan for 'a'"):
        ShardingPlan({}, {"a": 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="a list of module names"):
        ShardingPlan({}, None, "fc")
    with pytest.raises(KeyError, match="Module path must not be empty"):
        ShardingPlan({"": ByHand()})


class NoModule(Sharder):
    """Returns something else."""

    def shard(self, module: nn.Module) -> nn.Module:
        return "module"  # type: ignore[return-value]


def test_a_sharder_returns_a_module() -> None:
    check_all_raise(
        2,
        lambda rank: shard_module(Model(), ShardingPlan({"head": NoModule()})),
        TypeError,
        "NoModule.shard returned str for 'head'",
    )
