"""Suggested plans suit the memory, and can be applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.plan.programs import Block
from tilework.plan import Cluster, ModelPlan, pretend, suggest
from tilework.plan.model_plan import backward
from tilework.plan.suggestions import step
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


class Attention(nn.Module):
    """A block with attention and experts, of which each row takes two."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.into = nn.Linear(width, 3 * width)
        self.router = nn.Linear(width, 4)
        self.experts = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        rows = x.flatten(0, 1)
        weights, ids = self.router(rows).softmax(-1).topk(2, dim=-1)
        result: Tensor = x + self.experts(rows, ids, weights).view(x.shape)
        return result


class Experts(nn.Module):
    """Stacked layers, called with rows, the numbers of experts, and weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Parameter(torch.randn(4, width, width) / 8)

    def forward(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        made: Tensor = torch.einsum("rf,rkfg->rkg", rows, self.layers[ids])
        result: Tensor = (made * weights.unsqueeze(-1)).sum(1)
        return result


def build_attention() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention() for _ in range(2)))


APPLIED = (
    (build, ModelPlan({"ddp": 2, "tp": 2})),
    (build, ModelPlan({"fsdp": 4, "recompute": 1})),
    (build, ModelPlan({"pp": 2}, 2)),
    (build, ModelPlan({"pp": 2, "fsdp": 2}, 2)),
    (build_attention, ModelPlan({"cp": 2})),
    (build_attention, ModelPlan({"fsdp": 2, "cp": 2})),
    (build_attention, ModelPlan({"fsdp": 1, "ep": 2})),
    (build_attention, ModelPlan({"fsdp": 2, "ep": 2})),
)


@pytest.mark.parametrize(("make", "plan"), APPLIED, ids=lambda x: getattr(x, "__name__", str(x)))
def test_an_applied_plan_trains_as_the_model(
    make: Callable[[], nn.Module], plan: ModelPlan
) -> None:
    batch = torch.randn((4, 6, 8) if make is build_attention else (4, 64))

    def trained(model: nn.Module, rows: Tensor) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(float(backward(model, (rows,))))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def program(rank: int) -> list[float]:
        torch.manual_seed(0)
        rows = plan.rows(batch)
        return trained(plan.apply(make(), (rows,)), rows)

    torch.manual_seed(0)
    expected = torch.tensor(trained(make(), batch))
    losses = run_ranks(prod(plan.degrees.values()), program)
    torch.testing.assert_close(torch.tensor(losses).mean(0), expected)


def test_routers_are_assumed_to_be_even_and_the_report_says_so() -> None:
    with pretend(ranks=4) as job:
        report = job.run(
            step, ModelPlan({"fsdp": 2, "ep": 2}), build_attention, (torch.ones(4, 6, 8),)
        )
    assert report.is_good
    assert "assumed: topk at" in str(report)
    assert "chooses each alternative equally often" in str(report)


def test_a_pipeline_waits_for_the_first_and_the_last_microbatches() -> None:
    with pretend(ranks=2, cluster=Cluster(latency=0, seconds_per_byte=1e-15)) as job:
        report = job.run(step, ModelPlan({"pp": 2}, 4), build, (torch.ones(4, 64),))
    first = report.kinds[0].time
    assert first.waiting / first.seconds == pytest.approx(1 / 5, abs=0.07)  # (p - 1) / (m + p - 1)


def test_ways_that_do_not_go_together_raise() -> None:
    with pytest.raises(ValueError, match="ep and ddp are not for one plan"):
        ModelPlan({"ddp": 2, "ep": 2})


def test_without_a_plan_that_fits_changes_are_named() -> None:
    found = suggest(build, (torch.ones(4, 64),), ranks=2, memory="200 kB")
    assert not found
    assert "memory does not suffice" in str(found)
    assert "apply_activation_checkpointing" in str(found)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((build, torch.ones(4, 64), 2), "example is a tuple"),
        ((lambda: 3, (torch.ones(4, 64),), 2), "takes an nn.Module"),
    ],
)
def test_bad_input_raises(arguments: Any, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        suggest(*arguments)


def test_plans_can_be_edited() -> None:
    plan = replace(ModelPlan({"ddp": 8}), degrees={"fsdp": 4, "tp": 2})
    assert str(plan) == "fsdp 4 + tp 2"


def test_unknown_ways_raise() -> None:
    with pytest.raises(ValueError, match="ways are pp, tp, cp, ep, recompute, fsdp, ddp"):
        ModelPlan({"magic": 2})


@pytest.mark.parametrize("name", WAYS)
def test_formulas_shrink_what_is_shared(name: str) -> None:
    whole = Sizes(
        100, 200, 50, block=10, blocks=10, in_linear=0.9, in_experts=0.5, rows=64, microbatches=8
    )
    assert WAYS[name].shrink(whole, 4).activations < whole.activations
