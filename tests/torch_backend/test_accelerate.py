"""Hugging Face accelerate: a training loop as its users write it, on Gloo and on tilework."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.jobs import Launcher, Rank

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="needs accelerate (pip install accelerate)",
)

LETTERS, LENGTH = 17, 8


class Counting(Dataset[Tensor]):
    """Sequences that count up from anywhere: what comes next can be learnt."""

    def __len__(self) -> int:
        return 50  # does not divide by the batch size, nor by the ranks

    def __getitem__(self, index: int) -> Tensor:
        return (torch.arange(LENGTH + 1) + index) % LETTERS


class TinyGPT(nn.Module):
    """A transformer with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, 32)
        self.position = nn.Parameter(torch.zeros(LENGTH, 32))
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, LETTERS)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        logits: Tensor = self.head(self.block(self.embedding(x) + self.position, mask))
        return logits


def loop(rank: Rank) -> list[float]:
    accelerate: Any = importlib.import_module("accelerate")
    # tilework run, torchrun and accelerate launch set these.
    os.environ.update(RANK=str(rank.number), WORLD_SIZE=str(rank.size))
    os.environ.update(LOCAL_RANK=str(rank.number), LOCAL_WORLD_SIZE=str(rank.size))
    torch.manual_seed(3)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == rank.size
    made = TinyGPT()
    model, optimizer, data = accelerator.prepare(
        made, torch.optim.AdamW(made.parameters(), lr=3e-3), DataLoader(Counting(), 4, shuffle=True)
    )
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    seen: list[float] = []
    for _ in range(2):
        losses = []
        for batch in data:
            with accelerator.accumulate(model):
                logits = model(batch[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach().repeat(len(batch))))
        every = torch.cat(losses)
        assert len(every) == len(Counting())  # what was repeated to fill the last batch is cut off
        seen.append(every.mean().item())
    assert accelerator.gather_for_metrics([rank.number], use_gather_object=True) == [0, 1]
    seen.append(float(accelerator.reduce(torch.tensor(1.0 + rank.number), "mean")))
    accelerator.wait_for_everyone()
    for name in ("AcceleratorState", "GradientState", "PartialState"):
        getattr(accelerate.state, name)._reset_state()
    return seen


def test_a_training_loop(ranks: Launcher) -> None:
    found: list[dict[str, Any]] = ranks(2, Rank.on_both, loop)
    for by_backend in found:
        assert by_backend["tilework"] == by_backend["gloo"]
    first, last, mean = found[0]["tilework"]
    assert last < 0.9 * first
    assert mean == 1.5
    assert not dist.is_initialized()
