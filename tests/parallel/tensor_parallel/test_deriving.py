"""Plans derived from a forward: which layers are cut, why, and what moves then."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.rounding import assert_close
from tilework.dtensor import DTensor, Replicate, explain, init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    DerivedPlan,
    ParallelStyle,
    RowwiseParallel,
    derive_plan,
    parallelize,
    parallelize_module,
)
from tilework.parallel.tensor_parallel.words import WholeOutput
from tilework.testing import run_ranks


class Attention(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        query, key, value = (
            layer(x).view(rows, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(rows, length, width))  # type: ignore[no-any-return]


class Summed(nn.Module):
    """Something else than a layer sums over what is between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        between = self.up(x)
        return self.down(between / between.square().mean(-1, keepdim=True))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """A stack of matrices whose products are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(4, 32, 16) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bld,edh->blh", x, self.matrices)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))


def _styles(plan: DerivedPlan) -> dict[str, str]:
    def told(style: ParallelStyle) -> str:
        if isinstance(style, WholeOutput):
            return "a stack"
        kind = "rows" if isinstance(style, RowwiseParallel) else "columns"
        return kind + " alone" * _is_alone(style)

    return {name: told(style) for name, style in plan.items()}


def _is_alone(style: Any) -> bool:
    given = style.input_layouts if isinstance(style, RowwiseParallel) else style.output_layouts
    return bool(given == Replicate())


CHAIN = {"up": "columns", "down": "rows"}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str], str]] = {
    "two layers": (_mlp, {"0": "columns", "2": "rows"}, "0 by columns, 2 by rows: a rank holds"),
    "heads": (
        lambda: Attention(4, 32),
        {"query": "columns", "key": "columns", "value": "columns", "out": "rows"},
        "query, key, value by columns, out by rows",
    ),
    "heads that do not divide": (
        lambda: Attention(3, 48),
        dict.fromkeys(("query", "key", "value", "out"), "columns alone"),
        "3 parts are not divisible by 2",
    ),
    "a stack": (
        lambda: nn.Sequential(nn.LayerNorm(32), Stack()),
        {"1": "a stack"},
        "1: matrices by dim 0, products summed: a rank holds 4 KiB less, receives at most 384 B",
    ),
    "a sum between": (
        Summed,
        {"up": "columns alone", "down": "columns alone"},
        "up by itself, as mean in the model needs all of it, the output gathered: a rank holds",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_are_cut_where_operators_carry_the_cut(case: str) -> None:
    build, styles, text = CASES[case]
    torch.manual_seed(0)
    plain = build()
    x = torch.randn(2, 3, next(plain.parameters()).shape[-1])
    expected = plain(x)
    # A sum of squares after a LayerNorm is constant: the gradients would be nothing but rounding.
    expected.pow(3).sum().backward()

    def program(rank: int) -> DerivedPlan:
        model = copy.deepcopy(plain)
        model.zero_grad()
        mesh = init_device_mesh("cpu", (2,))
        plan = derive_plan(model, mesh, (x,))
        parallelize_module(model, mesh, plan)
        with explain() as log:
            found = model(x)
        assert sum(event.nbytes for event in log.events) == plan.moved_bytes
        assert_close(found, expected)
        found.pow(3).sum().backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            grad: Any = mine.grad
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            assert_close(whole, other.grad)
        return plan

    plan = run_ranks(2, program)[0]
    assert _styles(plan) == styles
    assert re.search(text, str(plan))


def test_a_layer_whose_output_is_larger_than_its_weight_stays_whole() -> None:
    def program(rank: int) -> str:
        layer = nn.Sequential(nn.Linear(8, 8))
        plan = derive_plan(layer, init_device_mesh("cpu", (2,)), (torch.ones(64, 8),))
        assert plan == {}
        return str(plan)

    text = "a rank would hold 128 B less, but receive 1 KiB, for a cut by itself"
    assert text in run_ranks(2, program)[0]


def test_a_model_without_memory_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    def program(rank: int) -> Any:
        with torch.device("meta"):
            model = _mlp()
        parallelize(model, init_device_mesh("cpu", (2,)), {"input": torch.ones(2, 32)})
        weight: Any = model.get_parameter("0.weight")
        return weight.to_local().shape

    assert run_ranks(2, program) == [(32, 32)] * 2
    assert capsys.readouterr().out.count("0 by columns, 2 by rows") == 1


def test_what_cannot_be_planned_is_refused() -> None:
    def program(rank: int) -> None:
        mesh, x = init_device_mesh("cpu", (2,)), (torch.ones(2, 32),)
        with pytest.raises(TypeError, match="a forward of Sequential, got NoneType"):
            derive_plan(_mlp(), mesh)
        with pytest.raises(ValueError, match=r"has 2: pass mesh\['tp'\]"):
            derive_plan(_mlp(), init_device_mesh("cpu", (2, 1)), x)
        model = parallelize_module(_mlp(), mesh, {"0": ColwiseParallel()})
        with pytest.raises(TypeError, match="Sequential has DTensors already"):
            derive_plan(model, mesh, x)

    run_ranks(2, program)
