"""Passes, and what a pass of a user's own may do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilework.distributed as dist
from tilework.capture import capture
from tilework.capture.program import passes
from tilework.capture.program.graph import Graph
from tilework.capture.program.passes import PASSES, run_passes
from tilework.errors import CaptureError
from tilework.testing import run_ranks


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Graph], Graph]]:
    """The passes of this test, to which the test may add."""
    own = list(PASSES)
    monkeypatch.setattr(passes, "PASSES", own)
    return own


def squares(x: Tensor) -> Tensor:
    return x**2 + 1


def run_three_times(step: Callable[..., Any]) -> str:
    fast = capture(step)
    for _ in range(3):
        fast(torch.ones(2))
    return str(fast)


def test_a_pass_changes_later_programs(added: Any) -> None:
    def multiply(graph: Graph) -> Graph:
        made = []
        for each in graph.instructions:
            if each.function is torch.ops.aten.pow.Tensor_Scalar:
                mul, x = torch.ops.aten.mul.Tensor, each.args[0]
                each = replace(each, function=mul, args=(x, x), name=str(mul))
            made.append(each)
        return replace(graph, instructions=made)

    added.append(multiply)
    assert "mul(t1, t1)" in run_three_times(squares)
    added.remove(multiply)
    assert "pow(t1, 2)" in run_three_times(squares)


def test_a_pass_that_changes_values_is_found(added: Any) -> None:
    added.append(lambda graph: replace(graph, result=[graph.inputs[0].value]))
    with pytest.raises(CaptureError, match="a first run of the record gave another result"):
        run_three_times(squares)


def test_a_pass_that_returns_nothing(added: Any) -> None:
    def look(graph: Graph) -> None:
        pass

    added.append(look)
    with pytest.raises(CaptureError, match="the pass look returned NoneType, not a Graph"):
        run_three_times(squares)


def test_a_rank_with_other_collectives_after_a_pass_raises_on_all(added: Any) -> None:
    def twice(graph: Graph) -> Graph:
        copies = [x for x in graph.instructions if x.kind == "collective"]
        return replace(graph, instructions=graph.instructions + copies * dist.get_rank())

    def program(rank: int) -> None:
        fast = capture(lambda x: dist.all_reduce(x))
        fast(torch.ones(2))
        with pytest.raises(CaptureError, match="different programs"):
            fast(torch.ones(2))

    added.append(twice)
    run_ranks(2, program)


def test_what_nothing_needs_is_dropped() -> None:
    def step(x: Tensor, out: Tensor) -> Tensor:
        kept = x.clone()
        dead = kept.clone()
        dead.add_(kept)
        torch.zeros(2).copy_(dead)
        out.copy_(kept)
        return x.sin()

    fast = capture(step)
    for _ in range(2):
        fast(torch.ones(2), torch.zeros(2))
    (record,) = fast.records
    names = [each.name for each in record.graph.instructions]
    assert names == ["aten.clone.default", "aten.copy_.default", "aten.sin.default"]
    assert record.graph.keeps_order


def test_an_empty_program() -> None:
    assert run_passes(Graph(result=[])).instructions == []
