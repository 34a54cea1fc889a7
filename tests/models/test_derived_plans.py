"""Models of Hugging Face made tensor parallel without a plan, against the plain models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_architectures import GROUPED, MODELS, TOKENS, build, train
from tests.rounding import assert_close
from tilework.dtensor import explain, init_device_mesh
from tilework.parallel import derive_plan, parallelize_module
from tilework.testing import run_ranks

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", GROUPED),
    "GPT2": (
        "LMHeadModel",
        TOKENS
        | {"n_embd": 16, "n_layer": 2, "n_head": 4}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0),
    ),
}
HEADS = "model.layers.*.self_attn.[q_proj, k_proj, v_proj] by columns"
FEATURES = (
    "model.layers.*.mlp.[gate_proj, up_proj] by columns, model.layers.*.mlp.down_proj by rows"
)
#: What is told of each.
TOLD = {
    "Llama": [HEADS, FEATURES],
    "Qwen3": [HEADS, FEATURES],
    "Mistral": [HEADS, FEATURES],
    "GPT2": [
        "transformer.h.*.mlp.c_fc by columns, transformer.h.*.mlp.c_proj by rows",
        "as split in transformer.h.*.attn needs all of it",
    ],
    "Bert": ["attention.self.[query, key, value] by columns"],
    "Mixtral": [HEADS, "model.layers.*.mlp.experts: gate_up_proj by dim 0, down_proj by dim 0"],
}


@pytest.mark.parametrize("name", TOLD)
def test_losses_gradients_and_messages_are_as_expected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, name, OTHERS.get(name) or MODELS[name])
    models = [build(name) for _ in range(3)]  # not in the threads, see test_architectures

    def program(rank: int) -> tuple[dict[str, Tensor | None], str]:
        model, mesh = models[rank], init_device_mesh("cpu", (2,))
        plan = derive_plan(model, mesh)
        parallelize_module(model, mesh, plan)
        with explain() as log, torch.no_grad():
            model.eval()(**model.dummy_inputs)
        moved = sum(event.nbytes for event in log.events)
        # Sums of experts move when they are needed, some of them after they have become smaller.
        assert moved <= plan.moved_bytes if name == "Mixtral" else moved == plan.moved_bytes
        return train(model.train(), name), str(plan)

    expected = train(models[2], name)
    for results, text in run_ranks(2, program):
        for each in TOLD[name]:
            assert each in text
        for key, x in expected.items():
            message = f"{key}: ".__add__
            assert_close(results[key], x, rtol=1e-3, atol=1e-4, msg=message)
