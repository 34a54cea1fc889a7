"""transformers' Trainer: trains, evaluates, saves, and resumes."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist

from tests.clients.program import main


def train() -> list[Any]:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    sizes: Any = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    ids = torch.arange(24 * 8).remainder(31).reshape(24, 8)
    data: Any = [{"input_ids": row, "labels": row} for row in ids]
    seen: list[Any] = []
    for steps in (3, 6):  # the second goes on after the first
        torch.manual_seed(0)
        arguments = TrainingArguments(
            str(folder[0]),
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_steps=3,
            disable_tqdm=True,
            report_to="none",
        )
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:5])
        trainer.train(resume_from_checkpoint=steps > 3)
        assert trainer.accelerator.num_processes == dist.get_world_size()
        seen.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
        seen.append(trainer.evaluate()["eval_loss"])
    return seen


if __name__ == "__main__":
    main(train)
