"""State dicts of modules with sharded tensors: saved, loaded, and made to fit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tilework.distributed as dist
from tests.sharded.ranks_and_specs import check_all_raise, chunks, cut, grid, numbered, on
from tests.tables import each
from tilework.sharded import (
    ShardedTensor,
    ShardingSpec,
    load_with_process_group,
    pre_load_state_dict_hook,
    rand,
    shard_parameter,
    state_dict_hook,
)

ROWS, COLUMNS = chunks(0, range(4)), chunks(1, [2, 1, 0])


class Inner(nn.Module):
    """A sharded attribute and a plain parameter."""

    def __init__(self, spec: ShardingSpec | None, group: Any = None) -> None:
        super().__init__()
        self.table2 = None if spec is None else rand(spec, 10, 20, process_group=group)
        self.plain2 = nn.Parameter(torch.rand(2, 2))


class Outer(nn.Module):
    """Another, with a submodule."""

    def __init__(self, spec: ShardingSpec | None = None, group: Any = None) -> None:
        super().__init__()
        self.table1 = None if spec is None else rand(spec, 10, 20, process_group=group)
        self.plain1 = nn.Parameter(torch.rand(2, 2))
        self.submodule = Inner(spec, group)


def hooked(module: Any) -> Any:
    module.register_state_dict_post_hook(state_dict_hook)
    module.register_load_state_dict_pre_hook(pre_load_state_dict_hook)
    return module


def saved(state: Any, weights_only: bool = True) -> Any:
    """Through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def check_equal(a: ShardedTensor, b: ShardedTensor) -> None:
    assert a.metadata() == b.metadata()
    for one, two in zip(a.local_tiles(), b.local_tiles(), strict=True):
        assert torch.equal(one, two)


# -- attributes ----------------------------------------------------------------------------------


@each("strict", [True, False])
@each("weights_only", [True, False])
def test_saved_and_loaded_into_a_module_without(strict: bool, weights_only: bool) -> None:
    def program(rank: int) -> None:
        model = hooked(Outer(ROWS))
        state = model.state_dict()
        assert sorted(state) == ["plain1", "submodule.plain2", "submodule.table2", "table1"]
        made = hooked(Outer())
        result = made.load_state_dict(saved(state, weights_only), strict=strict)
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert sorted(made.state_dict()) == sorted(state)
        check_equal(made.table1, model.table1)
        check_equal(made.submodule.table2, model.submodule.table2)
        assert torch.equal(made.submodule.plain2, model.submodule.plain2)

    on(4, program)


def test_with_the_private_names_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch marks functions that came by the public name, and refuses them under the other.
    monkeypatch.delattr(state_dict_hook, "_from_public_api", raising=False)

    def program(rank: int) -> None:
        model: Any = Outer(ROWS)
        made: Any = Outer()
        model._register_state_dict_hook(state_dict_hook)
        made._register_load_state_dict_pre_hook(pre_load_state_dict_hook, True)
        made.load_state_dict(saved(model.state_dict()), strict=False)
        check_equal(made.table1, model.table1)

    on(4, program)


def test_a_group_of_some_ranks() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([2, 3])
        spec = chunks(0, [2, 3, 2, 3])
        model = hooked(Outer(spec, group))
        with load_with_process_group(group):
            state = saved(model.state_dict())
        made = hooked(Outer())
        made.load_state_dict(state)
        assert made.table1.process_group is group
        assert len(made.table1.local_shards()) == (2 if rank > 1 else 0)
        check_equal(made.table1, model.table1)

    on(4, program)


def test_prefixes_of_hooked_submodules() -> None:
    def program(rank: int) -> None:
        wrapper: Any = nn.ModuleDict({"a": hooked(Outer(ROWS)), "b": nn.Linear(2, 2)})
        state = wrapper.state_dict()
        assert {"a.table1", "a.submodule.table2", "b.weight"} <= set(state)
        made: Any = nn.ModuleDict({"a": hooked(Outer()), "b": nn.Linear(2, 2)})
        assert not made.load_state_dict(state).unexpected_keys
        check_equal(made["a"].table1, wrapper["a"].table1)

    on(4, program)


def test_a_module_that_has_two_names() -> None:
    def program(rank: int) -> None:
        inner = Inner(chunks(0, [0]))
        model = hooked(nn.ModuleDict({"a": inner, "b": inner}))
        assert {"a.table2", "b.table2"} <= set(model.state_dict())
        assert not model.load_state_dict(model.state_dict()).missing_keys

    on(1, program)


def test_what_is_missing_is_told() -> None:
    def program(rank: int) -> None:
        model = hooked(Outer(ROWS))
        state = model.state_dict()
        del state["submodule.table2"]
        with pytest.raises(RuntimeError, match=r"Missing key.*submodule\.table2"):
            model.load_state_dict(state)
        result = model.load_state_dict(state, strict=False)
        assert result.missing_keys == ["submodule.table2"]

    on(4, program)


def test_modules_without_sharded_tensors_are_left_alone() -> None:
    model, made = hooked(nn.Linear(10, 10)), hooked(nn.Linear(10, 10))
    before = {name: value.clone() for name, value in nn.Linear.state_dict(model).items()}
    state = model.state_dict()
    assert list(state) == ["weight", "bias"]
    assert all(torch.equal(state[name], before[name]) for name in before)
    made.load_state_dict(saved(state))  # on no rank: nothing is communicated
    assert torch.equal(made.weight, model.weight)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        made.load_state_dict({**state, "x": torch.ones(1)})


# -- parameters ------------------------------------------------------------------------------------


def linear(spec: ShardingSpec | None, value: float = 0) -> Any:
    """With the values ``numbered + value`` in its weight, cut by ``spec``."""
    module = nn.Linear(5, 6)
    with torch.no_grad():
        module.weight.copy_(numbered((6, 5)) + value)
    if spec is not None:
        shard_parameter(module, "weight", spec)
    return hooked(module)


LAYOUTS = [None, ROWS, COLUMNS, grid([1, 5], [2, 3], [3, 1, 1, 0]), chunks(0, [3])]


@each("target", LAYOUTS)
@each("source", LAYOUTS)
def test_values_from_any_layout_to_any(
    source: ShardingSpec | None, target: ShardingSpec | None
) -> None:
    def program(rank: int) -> None:
        state = saved(linear(source, 7).state_dict())
        made = linear(target)
        before = made.weight
        tiles = before.local_tiles() if target else [before]
        made.load_state_dict(state)
        assert made.weight is before
        assert made.weight.requires_grad
        if target is None:
            whole = made.weight.detach()
        else:
            assert made.weight.sharding_spec() == target
            # Written in place: an optimizer may hold them.
            assert all(a is b for a, b in zip(made.weight.local_tiles(), tiles, strict=True))
            whole = made.weight.detach().full_tensor()
        assert torch.equal(whole, numbered((6, 5)) + 7)
        if source is not None:
            loaded = state["weight"]
            assert loaded.sharding_spec() == source  # as it was

    on(4, program)


def test_dtypes_follow_the_parameter() -> None:
    def program(rank: int) -> None:
        made = linear(ROWS)
        made.load_state_dict({"weight": cut(numbered((6, 5)).double(), COLUMNS, rank),
                              "bias": torch.ones(6)})  # fmt: skip
        assert made.weight.dtype == torch.float32
        assert torch.equal(made.weight.detach().full_tensor(), numbered((6, 5)))

    on(4, program)


def test_assign_takes_what_is_loaded() -> None:
    def program(rank: int) -> None:
        state = linear(COLUMNS, 7).state_dict()
        made = linear(ROWS)
        made.load_state_dict(state, assign=True)
        assert [name for name, _ in made.named_parameters()] == ["weight", "bias"]
        assert isinstance(made.weight, ShardedTensor)
        assert made.weight.sharding_spec() == COLUMNS

    on(4, program)


def test_between_groups() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([1, 3])
        made = nn.Linear(5, 6)
        shard_parameter(made, "weight", chunks(0, [3, 1]), src_rank=1, process_group=group)
        hooked(made)
        # Its shards are on ranks of the group.
        inside = cut(numbered((6, 5)), chunks(1, [1, 3]), rank)
        made.load_state_dict({"weight": inside, "bias": torch.ones(6)})
        weight: Any = made.weight
        for shard in weight.local_shards():
            assert torch.equal(shard.tensor, numbered((6, 5))[shard.metadata.box.slices])

    on(4, program)


WRONG: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "size": (
        lambda rank: cut(numbered((5, 6)), ROWS, rank),
        RuntimeError,
        "size mismatch for weight",
    ),
    "what ranks load": (
        lambda rank: cut(numbered((6, 5)), COLUMNS, rank) if rank else numbered((6, 5)),
        ValueError,
        "weight=a plain tensor.* on rank 0 does not match with weight=a sharded tensor",
    ),
    "nothing on one rank": (
        lambda rank: None if rank == 2 else cut(numbered((6, 5)), COLUMNS, rank),
        ValueError,
        "weight=a sharded .* does not match with weight=nothing on rank 2",
    ),
}


@each("case", WRONG)
def test_all_ranks_raise(case: str) -> None:
    make, kind, pattern = WRONG[case]

    def program(rank: int) -> None:
        made, value = linear(ROWS, 3), make(rank)
        state = {"bias": torch.ones(6), **({} if value is None else {"weight": value})}
        try:
            made.load_state_dict(state)
        finally:
            assert torch.equal(made.weight.local_tensor(), cut(numbered((6, 5)) + 3, ROWS, rank)
                               .local_tensor())  # fmt: skip

    check_all_raise(4, program, kind, pattern)


def test_values_on_ranks_outside_the_group() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([0, 1])
        made = nn.Linear(5, 6)
        shard_parameter(made, "weight", chunks(0, [0, 1]), process_group=group)
        hooked(made)
        state = {"weight": cut(numbered((6, 5)), COLUMNS, rank), "bias": torch.ones(6)}
        if rank < 2:
            with pytest.raises(ValueError, match=r"ranks \[2\] hold shards of the tensor"):
                made.load_state_dict(state)

    on(3, program)


def test_copied_modules_keep_their_hooks() -> None:
    def program(rank: int) -> None:
        made = copy.deepcopy(linear(ROWS))
        made.load_state_dict(linear(COLUMNS, 7).state_dict())
        assert torch.equal(made.weight.detach().full_tensor(), numbered((6, 5)) + 7)

    on(4, program)
