"""Whole blocks of models on DTensors: replicated with cut batches, and with cut weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dtensor.op_checks import noting_gatherings
from tests.dtensor.sharded_values import collectives
from tests.rounding import assert_close
from tilework.dtensor import DTensor, distribute_module, distribute_tensor, init_device_mesh
from tilework.layout import Placement, Replicate, Shard
from tilework.testing import run_ranks

R = Replicate()
#: How a parameter lies along each axis of the mesh, by the ends of names; else replicated.
Cuts = Mapping[str, Placement]


class Block(nn.Module):
    """A block as of GPT, with attention that is causal."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def by_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        q, k, v = (self.by_heads(layer(y)) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        more: Tensor = self.down(F.gelu(self.up(self.ln2(x))))
        return x + more


GPT: Cuts = {
    **{f"{name}.{kind}": Shard(0) for name in ("q", "k", "v", "up") for kind in ("weight", "bias")},
    "proj.weight": Shard(1),
    "down.weight": Shard(1),
}
ENCODER: Cuts = {
    "in_proj_weight": Shard(0),
    "in_proj_bias": Shard(0),
    "out_proj.weight": Shard(1),
    "linear1.weight": Shard(0),
    "linear1.bias": Shard(0),
    "linear2.weight": Shard(1),
}


def spread(module: nn.Module, mesh: Any, cuts: Cuts) -> None:
    """Make all parameters DTensors: cut along the last axis of the mesh, or replicated."""
    for owner in module.modules():
        for name, one in list(owner.named_parameters(recurse=False)):
            full = next(n for n, p in module.named_parameters() if p is one)
            cut = next((c for end, c in cuts.items() if full.endswith(end)), R)
            lying = [R] * (mesh.ndim - 1) + [cut]
            setattr(owner, name, nn.Parameter(distribute_tensor(one.detach(), mesh, lying)))


def check(
    module: nn.Module,
    inputs: list[Tensor],
    shape: tuple[int, ...],
    layout: list[Placement],
    cuts: Cuts | None = None,
) -> tuple[list[str], list[str]]:
    """Compare outputs and gradients with the plain module's.

    Returns:
        Collectives forward and backward, of the second time.
    """
    module = module.double()
    inputs = [one.double() for one in inputs]
    plain = copy.deepcopy(module)
    want = plain(*inputs)
    want = want[0] if isinstance(want, tuple) else want
    cotangent = torch.randn(want.shape, dtype=want.dtype)
    want.backward(cotangent)
    count = math.prod(shape)
    copies = [copy.deepcopy(module) for _ in range(count)]

    def program(rank: int) -> tuple[list[str], list[str]]:
        mesh = init_device_mesh("cpu", shape)
        mine = copies[rank]
        spread(mine, mesh, cuts or {})
        given = [distribute_tensor(one, mesh, layout) for one in inputs]
        for _ in range(2):
            mine.zero_grad()
            with collectives() as forward:
                got = mine(*given)
            got = got[0] if isinstance(got, tuple) else got
            with collectives() as backward:
                got.backward(cotangent)
        assert_close(got.full_tensor(), want)
        for (name, one), (_, other) in zip(
            mine.named_parameters(), plain.named_parameters(), strict=True
        ):
            grad = one.grad
            assert isinstance(one, DTensor), name
            assert isinstance(grad, DTensor), name
            assert grad.placements == one.placements, name
            assert_close(grad.full_tensor(), other.grad)
        return forward, backward

    with noting_gatherings():
        return run_ranks(count, program)[0]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def encoder(**kwargs: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True, **kwargs)


MODULES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]], Cuts]] = {
    "block": (Block, [(4, 5, 8)], GPT),
    "encoder layer": (encoder, [(4, 5, 8)], ENCODER),
    "encoder layer, norm first": (lambda: encoder(norm_first=True), [(4, 5, 8)], ENCODER),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(8, 4, 16, dropout=0.0, batch_first=True),
        [(4, 5, 8), (4, 3, 8)],
        ENCODER,
    ),
    "attention": (
        lambda: nn.MultiheadAttention(8, 4, batch_first=True),
        [(4, 5, 8), (4, 3, 8), (4, 3, 8)],
        ENCODER,
    ),
    "lstm": (
        lambda: nn.LSTM(8, 6, num_layers=2, batch_first=True),
        [(4, 5, 8)],
        {"weight_ih_l0": Shard(0), "weight_hh_l0": Shard(1)},
    ),
    "transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
        [(4, 5, 8), (4, 3, 8)],
        ENCODER,
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_cut_batch_reduces_gradients_once(name: str) -> None:
    made, shapes, _ = MODULES[name]
    inputs = [drawn(*shape) for shape in shapes]
    forward, backward = check(made(), inputs, (2,), [Shard(0)])
    assert (forward, backward) == ([], ["all_reduce"])


@pytest.mark.parametrize("name", MODULES)
def test_cut_weights(name: str) -> None:
    made, shapes, cuts = MODULES[name]
    inputs = [drawn(*shape) for shape in shapes]
    check(made(), inputs, (2, 2), [Shard(0), R], cuts)


def test_a_block_of_cut_weights_reduces_once_between_its_halves() -> None:
    """What it gives is in terms still; gradients are reduced before each of its norms."""
    forward, backward = check(Block(), [drawn(4, 5, 8)], (2,), [R], GPT)
    assert (forward, backward) == (["all_reduce"], ["all_reduce", "all_reduce"])


def test_cut_batch_and_cut_weights_reduce_gradients_of_parameters_once() -> None:
    _, backward = check(Block(), [drawn(4, 5, 8)], (2, 2), [Shard(0), R], GPT)
    assert backward == ["all_reduce"] * 3


def test_a_model_on_meta_is_given_memory_and_initialised() -> None:
    def program(rank: int) -> list[list[float]]:
        with torch.device("meta"):
            layer: Any = nn.Linear(6, 4)
        layer = distribute_module(layer, init_device_mesh("cpu", (2,)))
        for _ in range(4):  # memory of this size that is free has other contents on each rank
            torch.full((4, 6), rank + 1.0)
        layer.to_empty(device="cpu")
        torch.manual_seed(0)
        layer.reset_parameters()
        return layer.weight.to_local().tolist()  # type: ignore[no-any-return]

    first, second = run_ranks(2, program)
    assert first == second


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty_like(x),
        lambda x: torch.ops.aten.empty_like(x),
        lambda x: x.new_empty(4, 6),
        lambda x: x.new_empty((6, 4)),
        lambda x: x.new(4, 6),
        lambda x: x.new_empty_strided((4, 6), (1, 4)),
    ],
    ids=["empty_like", "aten", "new_empty", "other shape", "new", "new_empty_strided"],
)
def test_replicas_that_nobody_wrote_are_equal(make: Callable[[Any], Any]) -> None:
    def program(rank: int) -> list[list[float]]:
        x = distribute_tensor(torch.ones(4, 6), init_device_mesh("cpu", (2,)), [R])
        for _ in range(4):  # memory of this size that is free has other contents on each rank
            torch.full((4, 6), rank + 1.0)
        weight = nn.Parameter(make(x))
        torch.manual_seed(0)
        nn.init.uniform_(weight)
        return weight.tolist()

    first, second = run_ranks(2, program)
    assert first == second
