"""Models of Hugging Face at several sizes, captured: to every bit what they do without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture.twins import run_twins, tensors_of
from tests.models.hugging_face import SIZES, VOCABULARY, transformers
from tilework.capture import Program, capture
from tilework.mesh import init_device_mesh
from tilework.parallel import fully_shard, parallelize_module
from tilework.testing import run_ranks

_SIZES = {**SIZES, "head_dim": 4, "num_hidden_layers": 1}
_OF_T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4}
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {**_OF_T5, "decoder_start_token_id": 0}),
}


def build(name: str) -> Any:
    """The model, the same each time."""
    torch.manual_seed(0)
    config, kind, settings = _MODELS[name]
    return getattr(transformers, kind)(getattr(transformers, config)(**{**_SIZES, **settings}))


def trained(name: str, lengths: list[int], way: str = "") -> Program[..., Any]:
    """Train twins on batches of these lengths; return the captured one's program."""
    mesh = init_device_mesh("cpu", (2,)) if way else None

    def make() -> Any:
        model = build(name).train()
        if way == "tp":
            parallelize_module(model, mesh, model.tp_plan)
        elif way == "fsdp":
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(ids: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        return step, tensors_of(model, optimizer)

    draws = torch.Generator().manual_seed(5)
    return run_twins(
        make, [(torch.randint(3, VOCABULARY, (2, n), generator=draws),) for n in lengths]
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "programs"), [("t5", 1), ("mistral", 2)])
def test_lengths_share_a_program(name: str, programs: int) -> None:
    """Mistral has another program for lengths up to the window."""
    assert len(trained(name, [6, 6, 9, 13, 5, 9, 11]).records) == programs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "way"), [("llama", "tp"), ("mixtral", "fsdp")])
def test_lengths_share_a_program_on_ranks(name: str, way: str) -> None:
    assert run_ranks(2, lambda rank: len(trained(name, [6, 6, 9, 5, 9], way).records)) == [1, 1]


@pytest.mark.parametrize(("name", "cache"), [("llama", "static"), ("mistral", None)])
def test_a_captured_model_generates(name: str, cache: str | None) -> None:
    """Caches of a window count the tokens in an integer, others only by their tensors."""
    model = build(name).eval()
    prompt = torch.randint(3, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(3))
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}

    def written() -> Any:
        mask = torch.ones_like(prompt)
        kind = {} if cache is None else {"cache_implementation": cache}
        return model.generate(prompt, attention_mask=mask, **settings, **kind)

    expected = written()
    model.forward = program = capture(model.forward)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(torch.equal(written(), expected) for _ in range(2))
    assert program.records
