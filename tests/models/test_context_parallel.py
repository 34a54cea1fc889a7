"""Models of Hugging Face whose ranks share the sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.hugging_face import SIZES, VOCABULARY, build, transformers
from tests.tables import each
from tilework.dtensor import Shard, arange, init_device_mesh
from tilework.parallel import ContextParallel, parallelize_module
from tilework.testing import run_ranks


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    if name == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=8, **SIZES))
    if name == "mistral":
        config = transformers.MistralConfig(sliding_window=5, **SIZES)
        return transformers.MistralForCausalLM(config)
    return build(name)


def trained(model: Any, padded: bool) -> list[float]:
    """The losses of three steps."""
    ids = torch.randint(3, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(1))
    given: dict[str, Tensor] = {"input_ids": ids, "labels": ids}
    if padded:
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][1, 12:] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@each("name", ["llama", "qwen3", "mistral", "gpt2"])
@each("ranks, way, padded", [(2, "ring", True), (4, "heads", False)])
def test_training_is_that_of_one_process(name: str, ranks: int, way: str, padded: bool) -> None:
    model = model_of(name)
    want = trained(copy.deepcopy(model), padded)

    def program(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (ranks,))
        mine = copy.deepcopy(model)
        enable = getattr(
            mine, "activation_checkpointing_enable", mine.gradient_checkpointing_enable
        )
        enable()
        return trained(parallelize_module(mine, mesh, ContextParallel(way=way)), padded)

    assert run_ranks(ranks, program)[0] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("way", ["auto", "ring"])
def test_blocks_dealt_in_turns_train_as_one_process(way: str) -> None:
    plain = model_of("llama")
    wanted = trained(copy.deepcopy(plain), padded=False)

    def program(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        style = ContextParallel(turns=2, way=way)
        return trained(parallelize_module(copy.deepcopy(plain), mesh, style), padded=False)

    assert run_ranks(2, program)[0] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_turns_give_each_rank_as_many_causal_pairs(ranks: int) -> None:
    def program(rank: int) -> float:
        mesh = init_device_mesh("cpu", (ranks,))
        places = arange(1000, device_mesh=mesh, placements=[Shard(0, turns=2)]).to_local()
        return float((places + 1).sum())  # a query sees the keys up to its own place

    pairs = run_ranks(ranks, program)
    assert max(pairs) / (sum(pairs) / ranks) <= 1.05
