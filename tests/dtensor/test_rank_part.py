"""Plain parameters and tensors that meet each rank's part of a sharded activation."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilework.distributed as dist
from tests.tables import each
from tilework.dtensor import DTensor, init_device_mesh
from tilework.dtensor.rank_part import RankPart
from tilework.errors import CollectiveMismatchError
from tilework.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tilework.testing import run_ranks


class Between(nn.Module):
    """A sharded layer, plain operators and parameters, and a sharded layer; a plain norm behind."""

    def __init__(self, act: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.act = act
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm, self.last = nn.RMSNorm(2), nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.gate = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(x)
        result: Tensor = self.down(self.act(self, self.up(x), x))
        outside: Tensor = self.last(result + x)
        return outside


def _heads(part: Any) -> Any:
    return part.unflatten(-1, (-1, 2))


def _in_place(module: Any, part: Tensor, x: Tensor) -> Any:
    filled = torch.zeros_like(part)
    filled[:] = part
    return filled.view(3, -1, 2).mul_(module.scale).flatten(1)


def _into_slices(module: Any, part: Tensor, x: Tensor) -> Any:
    filled = part.new_empty(3, _heads(part).shape[1], 4)
    filled[..., :2].copy_(_heads(part))
    filled[..., 2:].copy_(module.scale)
    return (filled[..., :2] * filled[..., 2:]).flatten(1)


ACTS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "norm of heads": lambda module, part, x: module.norm(_heads(part)).flatten(-2),
    "scale": lambda module, part, x: (module.scale * _heads(part).relu()).flatten(-2),
    "gate of all ranks": lambda module, part, x: part * module.gate(x).sigmoid(),
    "stacked": lambda module, part, x: (
        torch.stack([_heads(part), module.scale.expand_as(_heads(part))]).sum(0).flatten(-2)
    ),
    "in place": _in_place,
    "into slices": _into_slices,
    "checkpointed": lambda module, part, x: checkpoint(
        lambda y: module.norm(_heads(y)).flatten(-2), part, use_reentrant=False
    ),
    "attribute": lambda module, part, x: (module.scale.view(2, 1) * _heads(part).mT).mT.flatten(-2),
    "twice": lambda module, part, x: (
        module.scale * module.norm(module.scale + _heads(part))
    ).flatten(-2),
    "into out": lambda module, part, x: (
        part
        + (
            torch.mul(_heads(part.detach()), 2, out=torch.empty_like(_heads(part.detach())))
            * module.scale
        ).flatten(-2)
    ),
    "none": lambda module, part, x: part,
}


@each("act", ACTS)
@each("trains_layers", [True, False])
def test_gradients_are_those_of_the_plain_model(act: str, trains_layers: bool) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))

    def program(rank: int, ranks: int) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Between(ACTS[act])
        for layer in (model.up, model.down):
            layer.requires_grad_(trains_layers)
        if ranks > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
        loss: Any = model(x).pow(3).sum()
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
        return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]

    expected = program(0, 1)
    for grads in run_ranks(2, program, 2):
        for grad, right in zip(grads, expected, strict=True):
            assert (grad is None) == (right is None)
            if grad is not None:
                torch.testing.assert_close(grad, right)


def _part(rank: int) -> Tensor:
    """The output of a sharded layer."""
    mesh = init_device_mesh("cpu", (2,))
    layer = parallelize_module(nn.Linear(2, 4), mesh, ColwiseParallel())
    part: Tensor = layer(torch.ones(3, 2))
    assert type(part) is RankPart
    return part


def test_plain_tensors_that_differ_between_ranks_raise() -> None:
    def program(rank: int) -> None:
        own = torch.full((2,), float(rank), requires_grad=True)
        loss: Any = (_part(rank) * own).as_subclass(Tensor).sum()
        with pytest.raises(CollectiveMismatchError, match="gradient of a plain tensor, float32"):
            loss.backward()

    run_ranks(2, program)


def test_a_part_that_is_taken_out_has_gradients_of_this_rank_alone() -> None:
    def program(rank: int) -> float:
        own = torch.full((2,), 1.0, requires_grad=True)
        part = _part(rank).as_subclass(Tensor)
        assert type(part) is Tensor
        loss: Any = (torch.ones_like(part) * (rank + 1) * own).sum()
        loss.backward()
        assert own.grad is not None
        return float(own.grad[0])

    assert run_ranks(2, program) == [3.0, 6.0]


def test_a_write_of_a_part_into_a_tensor_of_all_ranks_is_refused() -> None:
    def program(rank: int) -> None:
        shared = torch.ones(2, requires_grad=True) * 2
        with pytest.raises(RuntimeError, match="add_ would write this rank's part"):
            shared.add_(_part(rank)[0])
        with pytest.raises(RuntimeError, match="add_ would write this rank's part"):
            torch.ops.aten.add_.Tensor(shared, _part(rank)[0])

    run_ranks(2, program)


class _Empty(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@each("inference", [False, True])
def test_operators_that_a_dispatch_mode_calls_are_not_followed(inference: bool) -> None:
    def program(rank: int) -> None:
        part, kinds = _part(rank), list[type]()
        part.register_hook(lambda grad: kinds.append(type(grad)))  # type: ignore[no-untyped-call]
        with _Empty():  # type: ignore[no-untyped-call]
            loss: Any = (part * part).as_subclass(Tensor).sum()
            loss.backward()
            with torch.inference_mode(inference):
                assert type(part * 2) is RankPart
        assert kinds == [Tensor]

    run_ranks(2, program)


def test_parts_leave_operators_as_plain_tensors() -> None:
    def program(rank: int) -> None:
        part = _part(rank).detach()
        assert "RankPart" not in repr(part)
        assert type(copy.deepcopy(part)) is Tensor
        file = io.BytesIO()
        torch.save(part, file)
        file.seek(0)
        assert type(torch.load(file)) is Tensor
        assert part.numpy().shape == (3, 2)
        dist.all_reduce(part)
        gathered = [torch.zeros(3, 2) for _ in range(2)]
        dist.all_gather(gathered, part)
        assert gathered[0].equal(gathered[1])

    run_ranks(2, program)


def test_without_gradients_tensors_are_plain_after_the_first_calls() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        layer = parallelize_module(nn.Linear(2, 4), mesh, ColwiseParallel())
        with torch.no_grad():
            kinds = [type(layer(torch.ones(3, 2))) for _ in range(6)]
        assert kinds == [RankPart] * 4 + [Tensor] * 2

    run_ranks(2, program)
