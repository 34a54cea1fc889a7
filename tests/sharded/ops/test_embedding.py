"""Look-ups in sharded tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sharded.ops.op_checks import CUTS, RANKS, close, shards_of, values
from tests.sharded.ranks_and_specs import check_all_raise, chunks, examples, on, specs
from tests.tables import each
from tilework.sharded import ShardedTensor, ShardingSpec
from tilework.sharded.ops import embedding as embedding_module
from tilework.sharded.ops import exchange as exchanging

IDS = [torch.tensor([[0, 4], [1, 1]]), torch.zeros(0, 2, dtype=torch.int64),
    torch.tensor([[3, 3], [3, 2]], dtype=torch.int32)]  # fmt: skip


def _bag(mode: str, **options: Any) -> Callable[[Tensor, Any], Tensor]:
    def look_up(ids: Tensor, table: Any) -> Tensor:
        flat = ids.reshape(-1)
        offsets = torch.tensor([0, min(3, len(flat))], dtype=ids.dtype)
        return F.embedding_bag(flat, table, offsets, mode=mode, **options)

    return look_up


def _weighted(ids: Tensor, table: Any) -> Tensor:
    weights = torch.arange(ids.numel(), dtype=torch.float64).view(ids.shape)
    return F.embedding_bag(ids, table, mode="sum", per_sample_weights=weights)


LOOK_UPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "embedding": F.embedding,
    "padding": lambda ids, table: F.embedding(ids, table, padding_idx=3),
    "padding from the end": lambda ids, table: F.embedding(ids, table, padding_idx=-5),
    "by frequency": lambda ids, table: F.embedding(ids, table, scale_grad_by_freq=True),
    "bag sum": _bag("sum"),
    "bag mean": _bag("mean", padding_idx=1),
    "bag max": _bag("max"),
    "bag with the last offset": _bag("sum", include_last_offset=True),
    "bag of rows": lambda ids, table: F.embedding_bag(ids, table, mode="mean"),
    "bag with weights": _weighted,
}


def check_look_up(
    rank: int,
    look_up: Callable[[Tensor, Any], Tensor],
    table: Tensor,
    spec: ShardingSpec,
    ids: list[Tensor],
) -> None:
    whole = table.clone().requires_grad_()
    expected = [look_up(each, whole) for each in ids]
    losses = [y.square().sum() * (r + 1) for r, y in enumerate(expected)]
    torch.autograd.backward(torch.stack(losses).sum())
    tensor = shards_of(table.clone().requires_grad_(), spec, rank)
    found = look_up(ids[rank], tensor)
    assert found.requires_grad
    close(found, expected[rank])
    torch.autograd.backward(found.square().sum() * (rank + 1))
    assert isinstance(tensor.grad, ShardedTensor)
    assert whole.grad is not None
    close(tensor.grad.full_tensor(), whole.grad)


@each("look_up", LOOK_UPS.values())
@each("spec", CUTS.values())
def test_look_ups(spec: ShardingSpec, look_up: Callable[[Tensor, Any], Tensor]) -> None:
    on(RANKS, lambda rank: check_look_up(rank, look_up, values(5, 4), spec, IDS))


@examples(25)
@given(hs.data())
def test_any_cut_and_any_ids(data: hs.DataObject) -> None:
    size = data.draw(hs.sampled_from([(6, 4), (1, 3), (9, 2)]))
    spec = data.draw(specs(size, (0, 1, 2)))
    some = hs.lists(hs.integers(0, size[0] - 1), max_size=6)
    ids = [torch.tensor(data.draw(some), dtype=torch.int64) for _ in range(RANKS)]
    look_up = data.draw(hs.sampled_from([F.embedding, _bag("max"), _bag("mean")]))
    on(RANKS, lambda rank: check_look_up(rank, look_up, values(*size), spec, ids))


def test_modules() -> None:
    def program(rank: int) -> None:
        for module in (nn.Embedding(5, 4, padding_idx=1), nn.EmbeddingBag(5, 4, mode="mean")):
            whole = values(5, 4, dtype=torch.float32)
            ids = torch.tensor([[rank, 4, 1]])
            module.weight = nn.Parameter(whole)
            expected = module(ids)
            module.weight = nn.Parameter(shards_of(whole, CUTS["rows"], rank))
            close(module(ids), expected)

    on(RANKS, program)


def test_each_row_moves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[list[int]] = []

    def counted(parts: Any, sizes: Any, group: Any) -> Any:
        if group.rank() == 0:
            received.append(list(sizes))
        return exchanging.exchange(parts, sizes, group)

    monkeypatch.setattr(embedding_module, "exchange", counted)
    ids = torch.tensor([9, 9, 0, 7, 9, 0, 7])
    on(2, lambda rank: F.embedding(ids, shards_of(values(10, 8), chunks(0, [0, 1]), rank)))
    # The ids that rank 0 is asked for: one by itself, one by rank 1; then the rows 0, and 7 and 9.
    assert received == [[1, 1], [8, 16]]


_BAD: dict[str, tuple[Callable[[int, Any], Any], type[Exception], str]] = {
    "beyond": (lambda rank, w: F.embedding(torch.tensor([5 * rank]), w), IndexError, "id 5 is out"),
    "negative": (lambda rank, w: F.embedding(torch.tensor([-rank]), w), IndexError, "id -1 is out"),
    "floats": (lambda rank, w: F.embedding(torch.ones(2), w), RuntimeError, "must be int32 or"),
    "max_norm": (lambda rank, w: F.embedding(torch.tensor([1]), w, max_norm=1.0),
        RuntimeError, "(?s)renormalize.*not supported for ShardedTensor!$"),
    "sparse": (lambda rank, w: F.embedding(torch.tensor([1]), w, sparse=rank == 1),
        RuntimeError, "(?s)sparse=False.*not supported for ShardedTensor!$"),
    "padding": (lambda rank, w: F.embedding(torch.tensor([1]), w, padding_idx=7),
        ValueError, "padding_idx 7"),
    "sharded ids": (lambda rank, w: F.embedding(w.long(), w), RuntimeError, "the ids are plain"),
    "plain table": (lambda rank, w: F.embedding(w.long(), torch.ones(5, 4)), RuntimeError,
        "the table is sharded"),
    "one dim": (lambda rank, w: F.embedding(torch.tensor([1]), w[:, 0]), RuntimeError, "two dims"),
    "no_grad on one rank": (
        lambda rank, w: torch.set_grad_enabled(rank == 0)(lambda: F.embedding(
            torch.tensor([1]), w.requires_grad_()))(), ValueError, "on all ranks or on none"),
}  # fmt: skip


@each(("compute", "kind", "pattern"), _BAD.values())
def test_what_is_wrong_on_one_rank_raises_on_all(
    compute: Callable[[int, Any], Any], kind: type[Exception], pattern: str
) -> None:
    check_all_raise(
        2, lambda rank: compute(rank, shards_of(values(5, 4), CUTS["all on rank 1"], rank)),
        kind, pattern,
    )  # fmt: skip
