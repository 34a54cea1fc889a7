"""Tensor parallel plans that models of Hugging Face bring with them, in words."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import Tensor, nn

from tests.models.test_architectures import GROUPED, MODELS, build, train
from tests.rounding import assert_close
from tilework.dtensor import DTensor, Shard, init_device_mesh
from tilework.parallel import parallelize_module
from tilework.parallel.tensor_parallel.words import WORDS
from tilework.testing import run_ranks

#: Beside those of MODELS: a shared weight, a fused layer, parameters of an attention, latents.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "Phi3": ("ForCausalLM", GROUPED),
    "GraniteSWA": ("ForCausalLM", GROUPED),
    "DeepseekV2": (
        "ForCausalLM",
        GROUPED
        | {"num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 8}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
        | dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8)
        | dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 4),
    ),
}
NAMES = ["Llama", "Qwen3", "Mistral", "Mixtral", "Phi3", "GraniteSWA", "DeepseekV2"]


def test_all_words_of_transformers_are_known() -> None:
    styles: Any = pytest.importorskip(
        "transformers.distributed.tensor_parallel", reason="version 5"
    )
    theirs = set(styles.ALL_PARALLEL_STYLES.keys())
    assert theirs - set(WORDS) <= {"grouped_gemm", "ep_dispatch_experts"}  # of expert parallelism


@pytest.mark.filterwarnings("ignore:.* of the plan fits no module")  # of other variants
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_one_process(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, name, OTHERS.get(name) or MODELS[name])
    models = [build(name) for _ in range(3)]  # not in the threads, see test_architectures

    def program(rank: int) -> tuple[dict[str, Tensor | None], float]:
        model = models[rank]
        parallelize_module(model, init_device_mesh("cpu", (2,)), model.tp_plan)
        cut = [p for p in model.parameters() if isinstance(p, DTensor)]
        return train(model, name), sum(p.numel() for p in cut) / _elements(model)

    expected = train(models[2], name)
    for results, share in run_ranks(2, program):
        assert share > 0.8
        for key, x in expected.items():
            message = f"{key}: ".__add__
            assert_close(results[key], x, rtol=1e-3, atol=1e-4, msg=message)


def _elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_words_of_parameters_are_taken_and_others_named() -> None:
    def program(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        stack = nn.ParameterList([nn.Parameter(nn.Linear(4, 6).weight.detach())])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallelize_module(stack, mesh, {"0": "colwise"})
        with pytest.raises(ValueError, match=r"'columns'.* is not a word of such plans"):
            parallelize_module(nn.Linear(2, 2), mesh, {"": "columns"})
        return stack[0].placements

    assert run_ranks(2, program) == [(Shard(0),)] * 2
