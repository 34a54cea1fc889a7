"""Suggested plans suit the memory, and can be applied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.plan.programs import Block
from tilework.plan import ModelPlan, suggest
from tilework.plan.ways import WAYS, Sizes
from tilework.testing import run_ranks


def build() -> nn.Module:
    return nn.Sequential(*(Block(64) for _ in range(2)))


def test_plans_suit_the_memory_and_others_have_reasons() -> None:
    found = suggest(build, (torch.ones(4, 64),), ranks=4, hosts=2, memory="1.2 MB")
    assert found
    assert all(plan.report is not None and plan.report.is_good for plan in found)
    assert "tp would cross hosts" in str(found)
    assert dict(found.left_out)["ddp 4"].startswith("needs")


@pytest.mark.parametrize("degrees", [{"ddp": 2, "tp": 2}, {"fsdp": 4, "recompute": 1}])
def test_an_applied_plan_computes_as_the_model(degrees: dict[str, int]) -> None:
    x = torch.randn(3, 64)

    def program(rank: int) -> torch.Tensor:
        torch.manual_seed(0)
        result: torch.Tensor = ModelPlan(degrees).apply(build(), (x,))(x)
        return getattr(result, "full_tensor", lambda: result)().detach()

    torch.manual_seed(0)
    expected = build()(x)
    assert all(torch.allclose(each, expected, atol=1e-5) for each in run_ranks(4, program))


def test_plans_can_be_edited() -> None:
    plan = replace(ModelPlan({"ddp": 8}), degrees={"fsdp": 4, "tp": 2})
    assert str(plan) == "fsdp 4 + tp 2"


def test_unknown_ways_raise() -> None:
    with pytest.raises(ValueError, match="ways are tp, recompute, fsdp, ddp"):
        ModelPlan({"magic": 2})


@pytest.mark.parametrize("name", WAYS)
def test_formulas_shrink_what_is_shared(name: str) -> None:
    whole = Sizes(100, 200, 50, block=10, blocks=10, in_linear=0.9, rows=64)
    assert WAYS[name].shrink(whole, 4).activations < whole.activations
