"""A loop of accelerate's: metrics over all ranks, and a state that is saved and loaded."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

from tests.clients.program import loss_of, main, net, rows


def train() -> list[Any]:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == dist.get_world_size()
    made, held_out = net(), rows(13)
    model, optimizer, loader, every = accelerator.prepare(
        made,
        torch.optim.AdamW(made.parameters(), lr=0.1),
        DataLoader(rows(), 4, shuffle=True),
        DataLoader(held_out, 3),
    )
    seen: list[Any] = []

    def epoch() -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if accelerator.sync_gradients:
                    seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()

    def evaluate() -> list[float]:
        found = []
        for batch in every:  # within it, as only the last batch has what is cut off
            with torch.no_grad():
                error = model(batch[0]) - batch[1]
            found.append(accelerator.gather_for_metrics(error).flatten())
        errors = torch.cat(found)
        assert len(errors) == len(held_out)
        seen.append(errors.tolist())
        return errors.tolist()

    epoch()
    accelerator.save_state(os.path.join(str(folder[0]), "state"))
    before = evaluate()
    epoch()
    accelerator.load_state(os.path.join(str(folder[0]), "state"))
    assert evaluate() == before
    return seen


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(train)
