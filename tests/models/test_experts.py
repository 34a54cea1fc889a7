"""Mixtures of experts of Hugging Face on several ranks train as on one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.models.hugging_face import SIZES, VOCABULARY, transformers
from tilework.mesh import init_device_mesh
from tilework.parallel import (
    DistributedDataParallel,
    ExpertParallel,
    balance_loss,
    fully_shard,
    parallelize_module,
)
from tilework.testing import run_ranks

EXPERTS = "model.layers.*.mlp.experts"


def build(name: str) -> Any:
    torch.manual_seed(0)
    if name == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config)
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
        num_experts=5,
        num_experts_per_tok=3,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def trained(model: nn.Module, tokens: Tensor) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def replicated(model: nn.Module, tokens: Tensor, rank: int) -> Tensor:
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {EXPERTS: ExpertParallel("replicate")})
    return trained(model, tokens)


def by_words(model: Any, tokens: Tensor, rank: int) -> Tensor:
    parallelize_module(model.model, init_device_mesh("cpu", (2,)), model.config.base_model_ep_plan)
    return trained(model, tokens)


def rows(model: Any, tokens: Tensor, rank: int) -> Tensor:
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {EXPERTS: ExpertParallel()})
    experts = {each for name, each in model.named_parameters() if ".experts." in name}
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)
    return averaged(trained(model, tokens.chunk(2)[rank]))


def beside_data_parallelism(model: Any, tokens: Tensor, rank: int, shard: bool) -> Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    parallelize_module(model, mesh["ep"], {EXPERTS: ExpertParallel("replicate")})
    if shard:
        fully_shard(model.model.layers[0], mesh=mesh["dp"])
        wrapped = fully_shard(model, mesh=mesh["dp"])
    else:
        wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
    return averaged(trained(wrapped, tokens.chunk(2)[rank // 2]))


def averaged(losses: Tensor) -> Tensor:
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("way", [replicated, by_words, rows])
def test_a_mixture_trains_as_on_one_rank(name: str, way: Any) -> None:
    model = build(name)
    tokens = torch.randint(3, VOCABULARY, (4, 8))
    expected = trained(copy.deepcopy(model), tokens)
    losses = run_ranks(2, lambda rank: way(copy.deepcopy(model), tokens, rank))[0]
    torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize("shard", [True, False])
def test_a_mixture_trains_beside_data_parallelism(shard: bool) -> None:
    model = build("mixtral")
    tokens = torch.randint(3, VOCABULARY, (4, 8))
    expected = trained(copy.deepcopy(model), tokens)

    def program(rank: int) -> Tensor:
        return beside_data_parallelism(copy.deepcopy(model), tokens, rank, shard)

    torch.testing.assert_close(run_ranks(4, program)[0], expected)


def test_the_balance_loss_takes_the_routers_logits() -> None:
    model = build("mixtral")
    tokens = torch.randint(3, VOCABULARY, (4, 8))

    def program(rank: int, ranks: int) -> Tensor:
        mine = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", (ranks,))
        parallelize_module(mine, mesh, {EXPERTS: ExpertParallel("replicate")})
        output = mine(tokens, labels=tokens, output_router_logits=True)
        loss = balance_loss(mine, output.router_logits)
        (output.loss + 0.01 * loss).backward()
        grad = mine.model.layers[0].mlp.gate.weight.grad
        return torch.cat([loss.detach().view(1), grad.flatten()])

    one = run_ranks(1, program, 1)[0]
    torch.testing.assert_close(run_ranks(2, program, 2)[0], one)
