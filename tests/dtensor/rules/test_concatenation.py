"""Concatenation with the empty tensors that caches start with."""

from __future__ import annotations

from typing import Any

import torch

from tests.dtensor.op_checks import check_op, count_op
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


def test_a_cache_that_starts_empty_stays_where_it_is() -> None:
    def decode(keys: Any) -> Any:
        cache = torch.tensor([], dtype=keys.dtype)
        for step in range(3):
            cache = torch.cat([cache, keys[:, :, step : step + 1]], -2)
        return cache

    seen = count_op(decode, KEYS, layouts=[[Shard(1)]])
    assert seen.placements == [(Shard(1),)]
    assert seen.forward == seen.backward == []
