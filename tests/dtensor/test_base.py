"""torch.utils.swap_tensors of DTensors, which exchanges the fields of two objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.rounding import assert_close
from tilework.dtensor import DeviceMesh, Shard, distribute_tensor, init_device_mesh
from tilework.parallel import fully_shard
from tilework.testing import run_ranks

X = torch.ones(2, 4)


@pytest.fixture
def swapping() -> Iterator[None]:
    """Loading and casting swap tensors within the test."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def distribute(model: Any) -> Any:
    """Distribute the parameters of a linear layer."""
    mesh: DeviceMesh = init_device_mesh("cpu", (2,))
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
    return model


def load(model: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def load_full(model: Any) -> None:
    full = {name: torch.full(value.shape, 0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(full, assign=True)


def load_again(model: Any) -> None:
    for _ in range(3):
        model.load_state_dict(model.state_dict())


def cast(model: Any) -> None:
    model.double().float().float()


ACTS = [load, load_again, cast]
CASES = [(fully_shard, act) for act in [*ACTS, load_full]] + [(distribute, act) for act in ACTS]


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize(("shard", "act"), CASES)
def test_modules_train_after_loading_and_casting(
    shard: Callable[[Any], Any], act: Callable[[Any], None]
) -> None:
    def program(shard: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        model = shard(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters())
        act(model)
        for _ in range(2):
            optimizer.zero_grad()
            model(X).sum().backward()
            optimizer.step()
        return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]

    wanted = program(lambda model: model)
    for got in run_ranks(2, lambda rank: program(shard)):
        assert_close(got, wanted)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("shard", [fully_shard, distribute])
def test_a_swap_between_forward_and_backward_raises(shard: Callable[[Any], Any]) -> None:
    def program(rank: int) -> None:
        model = shard(nn.Linear(4, 4))
        output = model(X)
        cast(model)
        output.sum().backward()

    with pytest.raises(RuntimeError, match="has swapped since forward"):
        run_ranks(2, program)


def test_a_full_parameter_that_is_swapped_in_is_sharded() -> None:
    def program(rank: int) -> Any:
        model = fully_shard(nn.Linear(4, 4, bias=False))
        swap: Any = torch.utils.swap_tensors
        swap(model.weight, nn.Parameter(torch.ones(4, 4)))
        return model(X)[0, 0].item(), model.weight.to_local().shape

    assert run_ranks(2, program) == [(4, (2, 4)), (4, (2, 4))]
