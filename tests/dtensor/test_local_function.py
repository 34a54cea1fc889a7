"""Tensors without a gradient, however they are moved, have none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tests.dtensor.op_checks import Layout, distributed
from tests.tables import each
from tilework.dtensor import DTensor, distribute_tensor
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.testing import run_ranks

WAYS: dict[str, tuple[Placement, Callable[[DTensor], Tensor]]] = {
    "redistributed": (Shard(0), lambda x: x.redistribute(placements=[Replicate()])),
    "as a full tensor": (Shard(0), lambda x: x.full_tensor()),
    "as its own part": (Replicate(), lambda x: x.to_local(grad_placements=[Partial()])),
    "partial": (Partial(), lambda x: x.redistribute(placements=[Shard(0)])),
    "normalised": (Shard(0), lambda x: functional.batch_norm(x, None, None, training=True)),
    "its greatest": (Shard(0), lambda x: x.amax(0)),
}


class _Stop(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> None:
        return None


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


@each("way", WAYS)
def test_no_gradient_stays_none(way: str) -> None:
    placement, move = WAYS[way]

    def program(rank: int) -> None:
        x = distributed(torch.arange(8.0).view(4, 2), _mesh(), Layout((placement,)))
        x.requires_grad_()
        moved = move(x)
        local = moved.to_local() if isinstance(moved, DTensor) else moved
        stopped = _Stop.apply(local)  # type: ignore[no-untyped-call]
        stopped.sum().backward()
        assert x.grad is None

    run_ranks(2, program)


def test_second_gradients_that_depend_on_nothing_are_none() -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(torch.randn(4, 3), _mesh(), [Shard(0)]).requires_grad_()
        bias = distribute_tensor(torch.randn(3), _mesh(), [Replicate()]).requires_grad_()
        linear = functional.layer_norm(x, (3,), None, bias).sum()
        (grad,) = torch.autograd.grad(linear, x, create_graph=True)
        second = torch.autograd.grad(grad.square().sum(), [x, bias], allow_unused=True)
        assert second[0] is not None
        assert second[1] is None

    run_ranks(2, program)


def test_gradients_of_absolute_values_are_zeros_that_can_be_moved() -> None:
    """torch has zeros without memory there, which have no address to hash or to send."""

    def program(rank: int) -> None:
        x = distribute_tensor(torch.tensor([-1.0, 2.0, -3.0]), _mesh(), [Replicate()])
        x.requires_grad_()
        (grad,) = torch.autograd.grad(x.abs().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert isinstance(second, DTensor)
        assert second.redistribute(placements=[Shard(0)]).full_tensor().tolist() == [0, 0, 0]
        plain = DTensor.from_local(torch._efficientzerotensor(3), _mesh(), run_check=True)
        total = plain + x.detach()
        assert isinstance(total, DTensor)
        assert total.full_tensor().tolist() == [-1, 2, -3]

    run_ranks(2, program)
