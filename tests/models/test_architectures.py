"""Models of Hugging Face whose every parameter is cut, against the plain models.

No plan and no change to the models: parameters become DTensors cut along their first and last dims,
inputs stay plain, and losses and gradients are those of one process.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.models.hugging_face import transformers
from tests.rounding import assert_close
from tilework.dtensor import DTensor, GatherWarning, distribute_module, distribute_tensor
from tilework.layout import Placement, Replicate, Shard
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.testing import run_ranks

BATCH, LENGTH, VOCABULARY, LABELS, PIXELS = 4, 12, 64, 5, 16

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCABULARY}
#: The sizes of most language models, by their usual names.
USUAL = TOKENS | {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = USUAL | {"num_key_value_heads": 2}
SHORT = TOKENS | {"hidden_size": 16, "n_layer": 2, "n_head": 4}
MASKED = USUAL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TWO_SIDED = TOKENS | {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 2,
    "dropout": 0.0,
}
PICTURES = {"num_labels": LABELS, "image_size": PIXELS, "hidden_dropout_prob": 0.0}

#: Class of the model without its ending, ending, settings.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("ForCausalLM", GROUPED | {"sliding_window": 4}),
    "Qwen3": ("ForCausalLM", GROUPED | {"head_dim": 4}),
    "Gemma2": ("ForCausalLM", GROUPED | {"head_dim": 4}),
    "Mixtral": ("ForCausalLM", GROUPED | {"num_local_experts": 4}),
    "GPTNeoX": ("ForCausalLM", USUAL),
    "Bloom": ("ForCausalLM", SHORT),
    "Falcon": ("ForCausalLM", USUAL),
    "OPT": ("ForCausalLM", USUAL | {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "Mamba": ("ForCausalLM", TOKENS | {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}),
    "Bert": ("ForMaskedLM", MASKED),
    "Albert": ("ForMaskedLM", MASKED | {"embedding_size": 8}),
    "DebertaV2": (
        "ForMaskedLM",
        MASKED | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "T5": (
        "ForConditionalGeneration",
        TOKENS
        | {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "Bart": ("ForConditionalGeneration", TWO_SIDED | {"max_position_embeddings": 64}),
    "ViT": ("ForImageClassification", PICTURES | USUAL | {"patch_size": 4}),
    "Swin": (
        "ForImageClassification",
        PICTURES
        | {"patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]}
        | {"window_size": 4, "drop_path_rate": 0.0},
    ),
    "ResNet": (
        "ForImageClassification",
        PICTURES | {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ),
}


def build(name: str) -> Any:
    ending, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}{ending}")(config).train()


def batch(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if MODELS[name][0] == "ForImageClassification":
        pixels = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator)
        return {
            "pixel_values": pixels,
            "labels": torch.randint(0, LABELS, (BATCH,), generator=generator),
        }
    words = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": words, "labels": words}


def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard parameters along the first dim over the mesh's rows, and the last over its columns."""
    for own, parameter in list(module.named_parameters(recurse=False)):
        dims = parameter.dim()
        places: list[Placement] = [Shard(0), Shard(dims - 1)] if dims else [Replicate()] * 2
        parts = distribute_tensor(parameter.detach(), mesh, places)
        module.register_parameter(own, nn.Parameter(parts))


def train(model: Any, name: str) -> dict[str, Tensor | None]:
    """The loss, and the gradients by name."""
    loss = model(**batch(name)).loss
    loss.backward()
    results = {key: parameter.grad for key, parameter in model.named_parameters()}
    results["the loss"] = loss.detach()
    return {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in results.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_cut_is_the_plain_one(name: str) -> None:
    # Not in the threads: while it makes a model, the library patches torch for all of them.
    models = [build(name) for _ in range(5)]

    def program(rank: int) -> dict[str, Tensor | None]:
        mesh = init_device_mesh("cpu", (2, 2))
        model = distribute_module(models[rank], mesh, cut)
        cast(Any, model).tie_weights()
        return train(model, name)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GatherWarning)
        outcomes = run_ranks(4, program)
    expected = train(models[4], name)
    for results in outcomes:
        assert results.keys() == expected.keys()
        for key, x in expected.items():
            message = f"{key}: ".__add__
            assert_close(results[key], x, rtol=1e-3, atol=1e-4, msg=message)
