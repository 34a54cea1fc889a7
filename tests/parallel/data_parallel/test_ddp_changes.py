"""What programs do to a wrapped module between steps: casts, other parameters, ties."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tilework.parallel import DistributedDataParallel
from tilework.testing import run_ranks

Change = Callable[[Any], object]


def _model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))


def _set_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def _swap(model: Any) -> None:
    other = nn.Parameter(torch.ones(4, 4))
    torch.utils.swap_tensors(model[0].weight, other)  # type: ignore[no-untyped-call]


def _assign(model: Any) -> None:
    model.load_state_dict({k: v.clone() * 2 for k, v in model.state_dict().items()}, assign=True)


def _replace(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.ones(4, 4))


def _drop(model: Any) -> None:
    model[0].register_parameter("bias", None)


def _tie(model: Any) -> None:
    model[3].weight = model[2].weight


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _parametrize(model: Any) -> None:
    parametrize.register_parametrization(model[2], "weight", _Doubled())


def _replace_module(model: Any) -> None:
    model[2] = copy.deepcopy(model[0])


CHANGES: dict[str, Change] = {
    "half and back": lambda model: model.half().float(),
    "double": lambda model: model.double(),
    "bfloat16 and back": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "data": _set_data,
    "swap_tensors": _swap,
    "assign": _assign,
    "another parameter": _replace,
    "no bias": _drop,
    "tied": _tie,
    "parametrized": _parametrize,
    "another module": _replace_module,
    "frozen": lambda model: model[0].requires_grad_(False),
}


def _gradients(
    model: nn.Sequential, x: Tensor, forward: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    model.zero_grad()
    dtype: Any = model[0].weight.dtype
    loss: Any = forward(x.to(dtype)).square().mean()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_gradients_are_those_of_the_whole_batch_after(change: str, steps_before: int) -> None:
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

    def program(rank: int, ranks: int) -> list[Tensor]:
        model = _model()
        x = rows.chunk(ranks)[rank]
        forward = DistributedDataParallel(model) if ranks > 1 else model
        for _ in range(steps_before):
            _gradients(model, x, forward)
        CHANGES[change](model)
        _gradients(model, x, forward)
        return _gradients(model, x, forward)

    expected = program(0, 1)
    for gradients in run_ranks(2, program, 2):
        torch.testing.assert_close(gradients, expected)


def test_an_optimizer_of_replaced_parameters_raises() -> None:
    def program(rank: int) -> None:
        model: Any = DistributedDataParallel(_model())
        optimizer = torch.optim.SGD(model.parameters())
        _assign(model.module)
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(RuntimeError, match="which an assignment has replaced"):
            optimizer.step()
        torch.optim.SGD(model.parameters()).step()

    run_ranks(2, program)


def test_another_module_in_the_wrapper_is_averaged() -> None:
    def program(rank: int) -> float:
        model: Any = DistributedDataParallel(nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        torch.manual_seed(0)
        model.module = nn.Linear(4, 2)
        model(torch.ones(2, 4) * (1 + rank)).sum().backward()
        return float(model.module.weight.grad[0, 0])

    assert run_ranks(2, program) == [3.0, 3.0]


def test_other_values_on_one_rank_raise_when_they_are_assigned() -> None:
    def program(rank: int) -> None:
        model: Any = DistributedDataParallel(_model())
        model.module[0].weight = nn.Parameter(torch.full((4, 4), float(rank)))
        with pytest.raises(ValueError, match=r"0\.weight .* elements with hash"):
            model(torch.ones(1, 4))

    run_ranks(2, program)


def test_computed_tensors_in_the_place_of_parameters_are_refused() -> None:
    def program(rank: int) -> None:
        model: Any = DistributedDataParallel(_model())
        x = torch.full((1, 4), rank + 1.0)
        faster = {name: p - p.sum() * 0.1 for name, p in model.named_parameters()}
        with pytest.raises(TypeError, match=r"0\.weight of Sequential was computed from other"):
            torch.func.functional_call(model, faster, x)
        inner = {name.removeprefix("module."): tensor for name, tensor in faster.items()}
        torch.func.functional_call(model.module, inner, x).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()
        model(x).sum().backward()

    run_ranks(2, program)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_transforms_whose_gradients_nobody_averages_are_refused(transform: Any) -> None:
    def program(rank: int) -> None:
        model: Any = DistributedDataParallel(_model())
        x = torch.ones(4)
        with pytest.raises(RuntimeError, match=r"within torch\.func\.grad.*: call ddp\.module\n"):
            transform(lambda x: model(x).sum())(x)
        assert transform(lambda x: model.module(x).sum())(x).shape[0] == 4
        torch.func.vmap(model)(torch.ones(3, 4)).sum().backward()
        assert model.module[0].weight.grad is not None

    run_ranks(2, program)
