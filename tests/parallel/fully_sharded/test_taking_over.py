"""Parameters that change between passes: the others stay where they are, and so do aliases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

from tests.parallel.fully_sharded.test_fully_shard_lives import full, layers
from tests.rounding import assert_close
from tilework.parallel import fully_shard
from tilework.testing import run_ranks

X = torch.ones(2, 4)


def replace_head(model: Any) -> None:
    model[4] = nn.Linear(6, 3)


def cast_head(model: Any) -> None:
    model[3].register_forward_hook(lambda *args: args[2].double())
    model[4].double()


def give_other_memory(model: Any) -> None:
    model[4].weight.data = model[4].weight.detach().clone()


def drop_bias(model: Any) -> None:
    model[2].bias = None


def tie(model: Any) -> None:
    model[4] = nn.Linear(6, 6)
    model[4].weight = model[2].weight


@pytest.mark.parametrize("change", [replace_head, cast_head, give_other_memory, drop_bias, tie])
@pytest.mark.parametrize("ranks", [2, 7])
def test_aliases_stay_the_parameter_when_another_changes(
    change: Callable[[Any], None], ranks: int
) -> None:
    def program(shard: Callable[[Any], Any]) -> list[Any]:
        model = shard(layers())
        alias, view = model[0].weight.data, model.state_dict()["0.bias"][1:4]
        model(X)
        change(model)
        model(X).sum().backward()
        with torch.no_grad():
            alias.sub_(model[0].weight.grad)
            view.zero_()
        return [full(t).clone() for t in (alias, model[0].weight, model[0].bias, model(X))]

    wanted = program(lambda model: model)
    for got in run_ranks(ranks, lambda rank: program(fully_shard)):
        for mine, theirs in zip(got, wanted, strict=True):
            assert_close(mine, theirs)


def test_other_memory_is_shared_with_what_it_was_given() -> None:
    def program(shard: Callable[[Any], Any]) -> Any:
        model = shard(layers())
        given = model[0].weight.data = model[0].weight.detach().clone()
        model(X)
        replace_head(model)
        model(X)
        given.zero_()
        return full(model[0].weight).abs().sum().item()

    assert program(lambda model: model) == 0
    assert run_ranks(2, lambda rank: program(fully_shard)) == [0, 0]


def test_weights_that_are_untied_are_both_gathered() -> None:
    def program(rank: int) -> Any:
        model = layers()
        model[4] = nn.Linear(6, 6)
        model[4].weight = model[2].weight
        fully_shard(model)
        model[4].weight = nn.Parameter(model[2].weight.detach().clone())
        seen: list[Any] = []
        model[3].register_forward_hook(lambda *_: seen.extend([model[2].weight, model[4].weight]))
        model(X)
        return [type(weight) for weight in seen]

    assert run_ranks(2, program) == [[torch.Tensor] * 2] * 2


def test_ranks_with_empty_shards_notice_other_data() -> None:
    def program(rank: int) -> Any:
        model = fully_shard(nn.Linear(4, 1, bias=False), reshard_after_forward=False)
        model(X)
        model.weight.data = torch.ones_like(model.weight)
        return model(X)[0, 0].item()

    assert run_ranks(2, program) == [4, 4]


def test_parametrizations_of_a_sharded_module_are_removed() -> None:
    def program(shard: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        layer = shard(weight_norm(nn.Linear(4, 4)))
        layer(X).sum().backward()
        remove_parametrizations(layer, "weight")
        assert type(layer) is type(shard(nn.Linear(4, 4)))
        optimizer = torch.optim.SGD(layer.parameters())
        layer(X).square().sum().backward()
        optimizer.step()
        return layer(X).detach(), full(layer.weight)

    for got in run_ranks(2, lambda rank: program(fully_shard)):
        assert_close(got, program(lambda model: model))


def test_masks_of_pruning_are_whole_beside_full_weights() -> None:
    def program(shard: Callable[[Any], Any], x: Any) -> Any:
        model = shard(layers())
        model(x)
        prune.l1_unstructured(model[0], "weight", 0.5)  # type: ignore[no-untyped-call]
        model(x).sum().backward()
        return full(model[0].weight_orig.grad), full(model[0].weight_mask)

    x = torch.arange(8.0).view(2, 4)
    wanted = program(lambda model: model, x)
    for got in run_ranks(2, lambda rank: program(fully_shard, x[rank : rank + 1])):
        assert_close(got[0] * 2, wanted[0])  # an average
        assert got[1].equal(wanted[1])
