"""Writes to memory that parameters had before they were sharded are not lost in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.fully_sharded.test_fully_shard_lives import full, layers
from tilework.parallel import fully_shard
from tilework.testing import run_ranks

X = torch.ones(2, 4)


@pytest.mark.parametrize("alias_of", [lambda p: p.data, lambda p: p.detach(), lambda p: p[:2].data])
def test_a_write_to_an_alias_of_a_new_head_raises(alias_of: Callable[[Any], Any]) -> None:
    def program(rank: int) -> None:
        model = fully_shard(layers())
        model(X)
        model[4] = nn.Linear(6, 3)
        alias = alias_of(model[4].weight)
        model(X).sum().backward()
        with torch.no_grad():
            alias.sub_(0.1)
        model(X)

    with pytest.raises(RuntimeError, match=r"former memory of parameter 4\.weight of Sequential"):
        run_ranks(2, program)


def test_a_last_write_raises_when_the_state_is_saved() -> None:
    def program(rank: int) -> None:
        model = layers()
        alias = model[0].bias.data
        fully_shard(model)
        alias.zero_()
        model.state_dict()

    with pytest.raises(RuntimeError, match=r"former memory of parameter 0\.bias"):
        run_ranks(2, program)


def test_memory_that_is_held_and_not_written_raises_nothing() -> None:
    def program(rank: int) -> Any:
        model = layers()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        fully_shard(model).load_state_dict(state, assign=True)
        model(X).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        model(X)
        return full(model[0].weight).equal(state["0.weight"])

    assert run_ranks(2, program) == [False, False]


def test_memory_that_only_a_parameter_had_is_freed() -> None:
    def program(rank: int) -> int:
        model = fully_shard(layers())
        model(X)
        return len(model._fsdp_state.owner.former._formers)

    assert run_ranks(2, program) == [0, 0]


def test_data_of_another_layout_may_be_one_vector() -> None:
    def program(shard: Callable[[Any], Any]) -> Any:
        model = shard(layers())
        for _ in range(3):
            model.zero_grad()
            model(X).square().sum().backward()
            with torch.no_grad():
                vector = nn.utils.parameters_to_vector(model.parameters())
                step = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
                nn.utils.vector_to_parameters(vector - 0.01 * step, model.parameters())
        return [full(p).sum().item() for p in model.parameters()]

    for got in run_ranks(2, lambda rank: program(fully_shard)):
        assert got == pytest.approx(program(lambda model: model), abs=1e-5)


def test_slices_of_a_flat_gradient_are_refused() -> None:
    def program(rank: int) -> None:
        model = fully_shard(layers())
        parameters, begin = list(model.parameters()), 0
        flat = torch.cat([p.data.reshape(-1) for p in parameters])
        grads = torch.zeros_like(flat)
        for p in parameters:
            p.data = flat[begin : begin + p.numel()].view_as(p)
            p.grad = grads[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
        model(X)

    with pytest.raises(ValueError, match="a gradient in memory that another tensor shows"):
        run_ranks(2, program)
