"""What training holds between steps, in storages: the formula of docs/how-to/memory.md."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilework.parallel import DistributedDataParallel, ZeroRedundancyOptimizer, fully_shard
from tilework.testing import run_ranks

LAYERS, SIZE = 4, 256
#: By way: copies of the parameters that each of two ranks holds with AdamW.
COPIES = {"ddp": 4.0, "views": 4.0, "zero": 3.0, "fully_shard": 2.0, "meta": 2.0}


def held_bytes() -> int:
    """The bytes in which at least one tensor that Python knows has memory."""
    spans = set()
    for each in gc.get_objects():
        if type(each) not in (Tensor, nn.Parameter) or not each.is_cpu:
            continue
        with contextlib.suppress(NotImplementedError):  # sparse tensors of other tests
            storage = each.untyped_storage()
            spans.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    total = end = 0
    for first, last in sorted(spans):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def trained(way: str, batches: int) -> Any:
    """A model and its optimizer after two steps; gradients are there."""
    with torch.device("meta" if way == "meta" else "cpu"):
        model: Any = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
    if way in ("fully_shard", "meta"):
        for parameter in model.parameters():
            parameter.data.fill_(0.01)
        for each in (*model, model):
            fully_shard(each)
        model.to_empty(device="cpu") if way == "meta" else None
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=way == "views")
    kind: Any = torch.optim.AdamW
    optimizer: Any = kind(model.parameters()) if way != "zero" else None
    optimizer = optimizer or ZeroRedundancyOptimizer(model.parameters(), kind)
    for _ in range(2):
        optimizer.zero_grad()
        for batch in range(batches, 0, -1):
            model.require_backward_grad_sync = batch == 1
            model(torch.ones(2, SIZE)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("way", "batches"), [*((way, 1) for way in COPIES), ("ddp", 2)])
def test_ranks_hold_what_the_formula_counts(way: str, batches: int) -> None:
    gc.collect()
    before = held_bytes()
    kept = run_ranks(2, lambda rank: trained(way, batches))
    gc.collect()
    copies = (held_bytes() - before) / (len(kept) * LAYERS * SIZE * SIZE * 4)
    assert copies == pytest.approx(COPIES[way], abs=0.02)
