"""Optimizers that hold what a model no longer has."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.tables import each
from tilework.dtensor import distribute_module, init_device_mesh
from tilework.parallel import ColwiseParallel, fully_shard, parallelize_module
from tilework.parallel.stale_optimizers import mark_replaced, marking_replaced
from tilework.sharded import ChunkShardingSpec, shard_parameter
from tilework.testing import run_ranks


def _stale() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A model and an optimizer of a parameter that it had."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with marking_replaced(model, by="pruning"):
        model.weight = nn.Parameter(torch.zeros(1, 2))
    return model, optimizer


def test_a_step_on_a_replaced_parameter_raises_and_changes_nothing() -> None:
    model, optimizer = _stale()
    model.bias.grad = torch.ones(2)
    before = model.bias.detach().clone()
    with pytest.raises(RuntimeError, match=r"'weight' \(Parameter of \[2, 2\]\), which pruning"):
        optimizer.step()
    assert model.bias.equal(before)


def test_a_parameter_that_is_put_back_can_be_stepped() -> None:
    model, optimizer = _stale()
    model.weight = optimizer.param_groups[0]["params"][0]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_backward_to_a_parameter_that_a_list_or_closure_has_kept_raises() -> None:
    class Listed(nn.Linear):
        kept: list[Tensor]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.kept[0]

    def program(rank: int) -> None:
        torch.manual_seed(0)
        model = Listed(2, 2, bias=False)
        model.kept = [model.weight]
        fully_shard(model)
        with pytest.raises(RuntimeError, match=r"does not have: 'weight' .* fully_shard has repl"):
            model(torch.ones(1, 2)).sum().backward()

    run_ranks(2, program)


def test_a_new_optimizer_and_groups_added_later_are_looked_at() -> None:
    model, stale = _stale()
    fresh = torch.optim.SGD(model.parameters())
    fresh.step()
    fresh.add_param_group({"params": stale.param_groups[0]["params"][:1]})
    with pytest.raises(RuntimeError, match="'weight'"):
        fresh.step()


def test_a_removed_parameter_is_named() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with marking_replaced(model, by="pruning"):
        model.register_parameter("bias", None)
    with pytest.raises(RuntimeError, match=r"'bias' .* replaced by nothing"):
        optimizer.step()


def test_marks_do_not_travel_with_copies_and_files() -> None:
    _, stale = _stale()
    old = stale.param_groups[0]["params"][0]
    file = io.BytesIO()
    torch.save(old, file)
    file.seek(0)
    for other in (copy.deepcopy(old), torch.load(file)):
        torch.optim.SGD([other]).step()


def test_a_mark_ends_with_the_model() -> None:
    model, optimizer = nn.Linear(2, 2), None
    old = model.weight
    mark_replaced(old, nn.Linear(1, 1), "weight", by="pruning")
    optimizer = torch.optim.SGD([old])
    optimizer.step()


@each("how", ["parallelize_module", "distribute_module", "shard_parameter"])
def test_optimizers_made_before_sharding_raise_on_all_ranks(how: str) -> None:
    def program(rank: int) -> str:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        if how == "parallelize_module":
            parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
        elif how == "distribute_module":
            distribute_module(model, init_device_mesh("cpu", (2,)))
        else:
            spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
            shard_parameter(model[0], "weight", spec)
        dist.barrier()
        with pytest.raises(RuntimeError, match=f"weight'.*{how} has replaced") as caught:
            optimizer.step()
        torch.optim.AdamW(model[1].parameters()).step()
        return str(caught.value)

    assert all("Make the optimizer after" in text for text in run_ranks(2, program))
