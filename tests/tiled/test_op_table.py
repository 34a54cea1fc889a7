"""The operator table: one entry per operator, and one way in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilework.dtensor  # registers the rules of both kinds
from tests.tables import each
from tilework.tiled import op_table
from tilework.tiled.op_table import (
    OpEntry,
    canonical_name,
    dtensor_handler,
    entry_of,
    find,
    register,
    rule,
)

del tilework


@pytest.fixture
def name() -> Iterator[str]:
    yield "an_operator"
    op_table.forget("an_operator")
    op_table.forget("an_operator_")


def _no_rule(*args: Any, **kwargs: Any) -> None:
    return None


def test_a_fact_that_is_known_is_refused(name: str) -> None:
    rule(name, is_view=True)(_no_rule)
    with pytest.raises(ValueError, match=f"rule of '{name}' cannot be registered: the rule"):
        rule(name)(_no_rule)
    with pytest.raises(ValueError, match="the is_view is known already"):
        register(name, is_view=True)


def test_a_handler_and_a_rule_exclude_each_other(name: str) -> None:
    rule(name)(_no_rule)
    with pytest.raises(ValueError, match="the rule is known already"):
        dtensor_handler(name)(lambda func, args, kwargs: None)


def test_facts_add_up_in_one_entry(name: str) -> None:
    register(name, is_view=True)
    rule(name, values_matter=False)(_no_rule)
    entry = entry_of(name)
    assert entry == OpEntry(name, rule=_no_rule, values_matter=False, is_view=True)
    assert entry.has_rule


def test_a_form_in_place_may_have_an_entry_of_its_own(name: str) -> None:
    dtensor_handler(name)(lambda func, args, kwargs: "new")

    def an_operator_() -> None: ...

    an_operator_.__module__ = "torch"
    assert find(an_operator_) == (OpEntry(name), True)
    dtensor_handler(f"{name}_")(lambda func, args, kwargs: "in place")
    entry, in_place = find(an_operator_)
    assert in_place
    assert entry.dtensor_handler is not None
    assert entry.dtensor_handler(None, (), {}) == "in place"


def test_functions_methods_overloads_and_aliases_have_one_entry() -> None:
    forms = (torch.mul, torch.Tensor.mul, torch.multiply, torch.ops.aten.mul.Tensor)
    assert {id(find(form)[0]) for form in forms} == {id(entry_of("mul"))}
    assert canonical_name(torch.Tensor.__imul__) == ("mul", True)


def test_the_entry_of_a_function_has_the_facts_of_its_name() -> None:
    entry, _ = find(torch.batch_norm)
    assert entry.silent_writes == ("running_mean", "running_var")
    assert entry.dtensor_rule is not entry_of("batch_norm").dtensor_rule


@each(("name", "draws"), [("bernoulli", True), ("rrelu", True), ("add", False), ("no_such", False)])
def test_which_operators_draw_random_numbers(name: str, draws: bool) -> None:
    assert entry_of(name).draws is draws


def test_lists_of_optimizers_are_elementwise() -> None:
    names = "add addcdiv addcmul copy div lerp maximum mul neg pow reciprocal sqrt sub zero"
    assert all(entry_of(name).is_elementwise for name in names.split())
    assert not any(entry_of(name).is_elementwise for name in ("norm", "max", "softmax", "mm"))
