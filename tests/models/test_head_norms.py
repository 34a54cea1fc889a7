"""Models whose attention has plain norms between its sharded layers, tensor parallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.hugging_face import SIZES, plan, transformers
from tilework.dtensor import DTensor, init_device_mesh
from tilework.parallel import ColwiseParallel, parallelize_module
from tilework.testing import run_ranks


def _build(name: str, key_value_heads: int) -> Any:
    torch.manual_seed(0)
    sizes = SIZES | {"head_dim": 4, "use_cache": False, "num_key_value_heads": key_value_heads}
    if name == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes))


@pytest.mark.parametrize("key_value_heads", [2, 1], ids=["grouped", "one key and value"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_gradients_are_those_of_one_process(name: str, key_value_heads: int) -> None:
    def program(rank: int, ranks: int) -> dict[str, Tensor]:
        model = _build(name, key_value_heads)
        if ranks > 1:
            styles = plan("llama")
            if key_value_heads == 1:  # the one head of keys and of values stays whole
                del styles["model.layers.*.self_attn.[qkv]_proj"]
                styles["model.layers.*.self_attn.q_proj"] = ColwiseParallel()
            parallelize_module(model, init_device_mesh("cpu", (ranks,)), styles)
        ids = torch.arange(14).reshape(2, 7) + 3
        model(input_ids=ids, labels=ids).loss.backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {
            name: grad.full_tensor() if isinstance(grad, DTensor) else grad
            for name, grad in grads.items()
        }

    expected = program(0, 1)
    assert any("q_norm" in name for name in expected)
    for grads in run_ranks(2, program, 2):
        torch.testing.assert_close(grads, expected)
