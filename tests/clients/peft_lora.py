"""peft: LoRA of a small Llama, replicated by DDP, and cut by torch's fully_shard."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from tests.clients.program import main


def adapted() -> Any:
    """A model with adapters, the same on all ranks."""
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def losses(model: Any) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    generator, seen = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(5):
        ids = torch.randint(32, (4, 8), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def train() -> list[list[float]]:
    cut = adapted()
    for layer in cut.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(cut)
    return [losses(DistributedDataParallel(adapted())), losses(cut)]


if __name__ == "__main__":
    main(train)
