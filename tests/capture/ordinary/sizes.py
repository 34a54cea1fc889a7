"""Sizes that change between calls: crops, pads, odd lengths, branches, tables, caches."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.capture.ordinary.data import mlp
from tests.capture.ordinary.models import LanguageModel, NanoGPT, next_token
from tests.capture.ordinary.running import Capture, Made, fit, fitted, program

BLOCK = 8
LENGTHS = (4, 4, 6, 8, 10, 20, 5, 7, 9, 16, 17, 3, 12, 33)
BUCKETS = (8, 16, 40)
SCALES = {8: 0.5, 16: 0.25, 40: 0.125}


def padded(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, 0, 0, size - x.shape[0]))


def sequences(embedded: Tensor) -> Tensor:
    n = embedded.shape[0]
    q = embedded[None, None]
    return F.scaled_dot_product_attention(q, q, q, is_causal=n > 8)[0, 0]


def with_tail(x: Tensor) -> Tensor:
    return torch.cat([x, x[-1:]]) if x.shape[0] % 2 else x


def of_table(x: Tensor) -> Tensor:
    size = next(size for size in BUCKETS if size >= len(x))
    return padded(x, size) * SCALES[size]


def squares(x: Tensor) -> Tensor:
    side = math.isqrt(x.shape[0])
    return x[: side * side].view(side, side, -1).mean(0)


def windows(x: Tensor) -> Tensor:
    return torch.stack([x[i : i + 4].sum(0) for i in range(0, x.size(0) - 3, 2)] or [x.sum(0)])


#: What is done to rows of 6 numbers, of many counts, between two layers.
SIZED: dict[str, Any] = {
    "crop_to_the_block": lambda x: x if x.size(0) <= BLOCK else x[-BLOCK:],
    "pad_to_a_few_sizes": of_table,
    "pair_up_odd_rows": lambda x: with_tail(x).view(-1, 2, 6).mean(1),
    "at_most_twelve": lambda x: x[: min(x.shape[0], 12)],
    "at_least_sixteen": lambda x: padded(x, max(16, x.shape[0])),
    "causal_if_long": sequences,
    "square_or_not": lambda x: x * 2 if x.shape[0] == x.shape[1] else x + 1,
    "square_root_of_rows": squares,
    "split_by_16": lambda x: torch.cat([p.mean(0, keepdim=True) for p in x.split(16)]),
    "chunk_by_3": lambda x: torch.stack([p.sum(0) for p in x.chunk(3)]),
    "next_multiple_of_8": lambda x: padded(x, -(-x.shape[0] // 8) * 8).view(-1, 8, 6).amax(1),
    "scale_by_root": lambda x: x * x.shape[0] ** -0.5,
    "log_of_length": lambda x: x * math.log(x.shape[0]) / 6,
    "windows": windows,
    "to_full_batches": lambda x: torch.cat([x, x.new_zeros(-len(x) % 8, 6)]).cumsum(0)[: len(x)],
    "positions": lambda x: x + torch.linspace(0, 1, x.shape[0])[:, None],
    "relative_bias": lambda x: (
        torch.softmax(x @ x.T - (torch.arange(len(x))[:, None] - torch.arange(len(x))).abs(), 1) @ x
    ),
}


def sized(change: Any, capture: Capture) -> list[Any]:
    """Training on batches of many sizes."""
    model, head = mlp(6, 8, 6), nn.Linear(6, 2)
    both = nn.ModuleList([model, head])
    batches = [(torch.randn(n, 6),) for n in LENGTHS]
    return fit(capture, both, lambda x: head(change(model(x))).square().mean(), batches)


for name, change in SIZED.items():
    program(name=f"size_{name}")(partial(sized, change))


@program()
def generation_that_crops_in_the_step(capture: Capture) -> list[Any]:
    model = NanoGPT(block=8).eval()

    @torch.no_grad()
    def step(idx: Tensor) -> Any:
        cond = idx if idx.size(1) <= 8 else idx[:, -8:]
        probs = F.softmax(model(cond)[0][:, -1], -1)
        return torch.cat([idx, torch.multinomial(probs, 1)], 1)

    fast, idx, seen = capture(step), torch.randint(16, (2, 3)), []
    for _ in range(14):
        idx = fast(idx)
        seen.append(idx.clone())
    return seen


@program()
def generation_with_a_cache(capture: Capture) -> list[Any]:
    qkv, head = nn.Linear(8, 24), nn.Linear(8, 8)

    @torch.no_grad()
    def step(x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv(x).chunk(3, -1)
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=q.shape[1] > 1)
        return head(out), keys, values

    fast = capture(step)
    x, keys, values = fast(torch.randn(2, 4, 8), *torch.zeros(2, 2, 0, 8))
    seen = [x.clone()]
    for _ in range(12):
        x, keys, values = fast(x[:, -1:], keys, values)
        seen.append(x.clone())
    return [seen, keys, values]


@fitted()
def language_model_of_varying_lengths() -> Made:
    model = LanguageModel(nn.GRU)
    batches = [(torch.randint(12, (2 + n % 3, n)),) for n in LENGTHS]
    return (model, lambda ids: next_token(model(ids)[0], ids), batches)


@fitted()
def convolutions_of_varying_images() -> Made:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(1))
    batches = [(torch.randn(2, 1, n + 4, 2 * n),) for n in LENGTHS[:10]]
    return (model, lambda x: model(x).square().mean(), batches)


@fitted()
def graphs_of_varying_nodes_and_edges() -> Made:
    message, out = nn.Linear(6, 6), nn.Linear(6, 2)
    model = nn.ModuleList([message, out])

    def loss(x: Tensor, edges: Tensor) -> Any:
        sums = torch.zeros_like(x).index_add_(0, edges[1], message(x)[edges[0]])
        degree = x.new_ones(len(x), 1).index_add_(0, edges[1], x.new_ones(edges.shape[1], 1))
        return out(x + sums / degree).square().mean()

    batches = [(torch.randn(n, 6), torch.randint(n, (2, 2 * n + n % 3))) for n in LENGTHS]
    return (model, loss, batches)
