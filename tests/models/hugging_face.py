"""Hugging Face's Llama and GPT-2 from small random configurations, and plans for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded

import pytest
import torch
from torch import Tensor, nn

from tilework.layout import Placement, Replicate, Shard
from tilework.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

transformers: Any = pytest.importorskip("transformers", reason="it is in the extra dev")

VOCABULARY = 50
NAMES = ("llama", "gpt2")
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
#: The sizes of models such as Llama.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **_SPECIAL,
}


def build(name: str) -> Any:
    """The model, the same each time; without dropout."""
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(max_position_embeddings=32, use_cache=False, **SIZES)
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=4,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
        **_SPECIAL,
    )
    return transformers.GPT2LMHeadModel(config)


class ShardedConv1D(ParallelStyle):
    """GPT-2's linear layers, whose weights are (inputs, outputs)."""

    def __init__(self, *, outputs: bool) -> None:
        """``outputs``: each rank has some outputs, else some inputs."""
        self.outputs = outputs

    def parameter_layouts(self, module: nn.Module) -> Mapping[str, Placement]:
        if self.outputs:
            return {"weight": Shard(1), "bias": Shard(0)}
        return {"weight": Shard(0), "bias": Replicate()}

    def attach(self, module: nn.Module, axis: Any) -> None:
        inside = Replicate() if self.outputs else Shard(-1)
        outside = Shard(-1) if self.outputs else Replicate()

        def before(module: nn.Module, inputs: tuple[Tensor]) -> Any:
            return axis.move_input(axis.annotate(inputs[0], inside, "the input"), inside)

        def after(module: nn.Module, inputs: object, output: Any) -> Any:
            return axis.move(output, outside).to_local()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


def plan(name: str) -> dict[str, ParallelStyle]:
    """Attention heads, features and vocabulary over the ranks; GPT-2's heads stay whole."""
    if name == "gpt2":
        return {
            "transformer.wte": RowwiseParallel(input_layouts=Replicate()),
            "transformer.h.*.mlp.c_fc": ShardedConv1D(outputs=True),
            "transformer.h.*.mlp.c_proj": ShardedConv1D(outputs=False),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
    columns = ("self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        **{f"model.layers.*.{each}": ColwiseParallel() for each in columns},
        **{f"model.layers.*.{each}": RowwiseParallel() for each in rows},
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }


def blocks(model: Any) -> list[nn.Module]:
    """The layers, to be sharded one by one."""
    return list(model.model.layers if hasattr(model, "model") else model.transformer.h)
