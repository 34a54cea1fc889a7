"""GPT-2 and Llama of Hugging Face, cut into stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.pipelines.models import seeded, stages_of, together
from tilework.parallel import Schedule
from tilework.testing import run_ranks

transformers = pytest.importorskip("transformers")
plans = [Schedule.one_forward_one_backward(2, 2), Schedule.interleaved(2, 2)]


def gpt2() -> Any:
    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none, **ends))


def llama() -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def _tokens(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 32, (4, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    return tokens, mask


@pytest.mark.parametrize("kind", [gpt2, llama])
@pytest.mark.parametrize("plan", plans, ids=["1f1b", "interleaved"])
def test_losses_and_gradients_of_several_lengths_are_those_of_one_process(
    kind: Any, plan: Schedule
) -> None:
    def program(rank: int) -> tuple[list[float], dict[str, Tensor | None]]:
        model = seeded(kind)
        split = getattr(model.config, "base_model_pp_plan", None) or "even"
        stages = stages_of(model, plan, split)
        losses = []
        for length in (7, 5):
            tokens, mask = _tokens(length)
            options: dict[str, Any] = {"attention_mask": mask, "labels": tokens, "weight": "rows"}
            losses.append(stages.step(tokens, **options).item())
        named = stages.named_parameters(remove_duplicate=False)
        return losses, {name: p.grad for name, p in named}

    model, losses = seeded(kind), []
    for length in (7, 5):
        tokens, mask = _tokens(length)
        loss = model(tokens, attention_mask=mask, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
    outcomes = run_ranks(2, program)
    got = together(grads for _, grads in outcomes)
    expected = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert [each for each, _ in outcomes] == [pytest.approx(losses, rel=1e-5)] * 2


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 5}])
def test_stages_generate_the_same_text_on_all_ranks(options: dict[str, Any]) -> None:
    tokens = _tokens(4)[0][:1]

    def program(rank: int) -> list[int]:
        torch.manual_seed(rank)
        stages = stages_of(seeded(llama), plans[0]).eval()
        torch.manual_seed(rank)
        made: list[int] = stages.generate(tokens, max_new_tokens=5, **options)[0].tolist()
        return made

    first, second = run_ranks(2, program)
    assert first == second
    if not options["do_sample"]:
        expected = seeded(llama).eval().generate(tokens, max_new_tokens=5, do_sample=False)
        assert first == expected[0].tolist()


def test_generation_sees_padding() -> None:
    tokens, mask = _tokens(5)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}

    def program(rank: int) -> list[list[int]]:
        stages = stages_of(seeded(gpt2), plans[0]).eval()
        made: list[list[int]] = stages.generate(tokens, **options).tolist()
        return made

    expected = seeded(gpt2).eval().generate(tokens, **options).tolist()
    assert run_ranks(2, program) == [expected] * 2


@pytest.mark.parametrize("options", [{}, {"use_cache": False, "output_hidden_states": True}])
@pytest.mark.parametrize("hooked", [False, True])
def test_what_modules_of_all_stages_collect_is_refused(
    options: dict[str, Any], hooked: bool
) -> None:
    tokens, _ = _tokens(5)

    def program(rank: int) -> None:
        model = seeded(llama).eval()
        if hooked:  # the first time makes hooks
            model(tokens, output_hidden_states=True)
        stages = stages_of(model, plans[0])
        with pytest.raises(ValueError, match="use_cache=False"):
            stages.evaluate(tokens, **options)

    run_ranks(2, program)


def test_losses_of_what_hooks_collect_in_other_stages_are_refused() -> None:
    tokens, _ = _tokens(5)

    def program(rank: int) -> None:
        model = seeded(llama)
        model(tokens, output_hidden_states=True)  # makes hooks
        options: dict[str, Any] = {"output_hidden_states": True, "weight": "rows"}
        stages_of(model, plans[0]).step(tokens, loss=_of_hidden, use_cache=False, **options)

    with pytest.raises(ValueError, match="hooks or caches collect"):
        run_ranks(2, program)


def _of_hidden(result: Any) -> Tensor:
    return torch.stack(result.hidden_states).square().mean()
