"""``flex_attention`` on DTensors."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.tables import each
from tilework.dtensor import Replicate, Shard, distribute_tensor, explain, init_device_mesh
from tilework.layout import Placement
from tilework.testing import run_ranks

flex: Any = flex_attention
TOKENS = 101
DOCUMENTS = torch.arange(TOKENS) // 40
PATTERNS: dict[str, Any] = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 10),
    "documents": lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k],
    "by batch and head": lambda b, h, q, k: q + 9 * b + 3 * h >= k,
}


def attend(pattern: str, *tensors: Any, **options: Any) -> Any:
    sizes = tensors[0].shape[2], tensors[1].shape[2]
    mask = create_block_mask(PATTERNS[pattern], 2, 4, *sizes, "cpu", BLOCK_SIZE=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is not compiled
        return flex(*tensors, block_mask=mask, enable_gqa=True, **options)


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, TOKENS, 8, generator=generator) for heads in (4, 2, 2)]


def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + (h + 1) * 0.1 * (k - q)


@each("pattern", list(PATTERNS))
@each("placement", [Shard(0), Shard(1), Shard(2), Shard(3), Replicate()])
def test_global_indices_reach_the_programs_functions(pattern: str, placement: Placement) -> None:
    want = attend(pattern, *tensors(), score_mod=alibi)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        given = [distribute_tensor(x, mesh, [placement]) for x in tensors()]
        out = attend(pattern, *given, score_mod=alibi)
        assert out.placements == ((Replicate(),) if placement == Shard(3) else (placement,))
        torch.testing.assert_close(out.full_tensor(), want)

    run_ranks(2, program)


@each("sizes", [(40, 70), (70, 40)])
def test_other_lengths_of_queries_and_keys(sizes: tuple[int, int]) -> None:
    q, k = (x[:, :, :n] for x, n in zip(tensors(), sizes, strict=False))
    want = attend("causal", q, k, k)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        mine = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k)]
        out = attend("causal", mine[0], mine[1], mine[1])
        torch.testing.assert_close(out.full_tensor(), want)

    run_ranks(2, program)


def test_only_listed_blocks_are_sent() -> None:
    def program(rank: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2,))
        given = [distribute_tensor(x, mesh, [Shard(2)]) for x in tensors()]
        with explain() as log:
            attend("window", *given)
        return [event.nbytes for event in log.events]

    # The second rank's queries, from 51 on, need keys from 32 on: those of blocks 2 and 3.
    assert run_ranks(2, program)[0] == [(51 - 32) * 2 * 2 * 8 * 4] * 2
