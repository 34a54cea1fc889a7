"""Concatenation with the empty tensors that caches start with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dtensor.op_checks import check_op, count_op
from tests.fuzz.programs import compare
from tilework.dtensor import Shard

KEYS = torch.randn(2, 4, 3, 2, generator=torch.Generator().manual_seed(1))
EMPTY = torch.tensor([])


def test_empty_tensors_of_one_dim_count_for_nothing() -> None:
    for fn in (
        lambda e, k: torch.cat([e, k], -2),
        lambda e, k: torch.cat([k, e, k, e], 1).sin(),
        lambda e, k: torch.cat([e, e]),
        lambda e, k: torch.cat([e.long(), k], 0),
    ):
        check_op(
            fn, EMPTY, KEYS.clone().requires_grad_(), meshes=[(2,)], grads=None, plain=True, most=10
        )
    check_op(lambda e, k: torch.cat([e, k.int()]), EMPTY, KEYS, meshes=[(2,)], grads=False, most=4)


def test_they_make_a_result_require_a_gradient() -> None:
    check_op(
        lambda e, k: torch.cat([k, e, k], 1),
        torch.zeros(0).requires_grad_(),
        KEYS,
        meshes=[(2,)],
        grads=None,
        most=6,
    )


def test_a_cache_that_starts_empty_stays_where_it_is() -> None:
    def decode(keys: Any) -> Any:
        cache = torch.tensor([], dtype=keys.dtype)
        for step in range(3):
            cache = torch.cat([cache, keys[:, :, step : step + 1]], -2)
        return cache

    seen = count_op(decode, KEYS, layouts=[[Shard(1)]])
    assert seen.placements == [(Shard(1),)]
    assert seen.forward == seen.backward == []


def test_ranks_without_a_part_have_second_gradients() -> None:
    compare(
        "v0 = leaf('v0', (3,), 59, 'S0')\nv1 = torch.cat([v0, v0], 0)\n"
        "v2 = v1.sort(-1, True)[0]\nv3 = gradient(v2 * v2, v0, create_graph=True)"
    )


@pytest.mark.parametrize("indexing", ["ij", "xy"])
def test_grids_share_the_memory_of_their_lines(indexing: str) -> None:
    compare(
        "v0 = leaf('v0', (3,), 82, 'S0')\nv1 = data((2,), 2, 'S0')\n"
        f"v2 = torch.meshgrid(v0, v1, indexing='{indexing}')[0]\n"
        f"v3 = torch.meshgrid(v0, v1, indexing='{indexing}')[1]\n"
        "with torch.no_grad(): v0.mul_(2.0)\nv1[0] = 5.0\nv4 = v2 * v3"
    )
