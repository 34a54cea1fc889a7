"""Views by strides of the memory that a tensor would have, and their copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tables import each
from tilework.dtensor import DTensor, distribute_tensor, init_device_mesh
from tilework.layout import Placement, Replicate, Shard
from tilework.testing import run_ranks

LAYOUTS = [[Replicate()], [Shard(0)], [Shard(1)]]


def values() -> tuple[Tensor, Tensor]:
    return torch.arange(12.0).view(4, 3), -torch.ones(2, 2)


@each("placements", LAYOUTS)
@each("plain_source", [True, False])
def test_gradients_of_a_scatter(placements: list[Placement], plain_source: bool) -> None:
    """Against indexing: torch's own gradient of the input is not the derivative."""
    x, source = values()
    places = torch.tensor([[1, 3], [4, 6]])

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        expected = x.clone().requires_grad_(), source.clone().requires_grad_()
        result = expected[0].reshape(-1).index_put((places,), expected[1]).view(4, 3)
        torch.autograd.backward(result.square().sum())
        ours = distribute_tensor(x, mesh, placements).requires_grad_()
        other = source.clone() if plain_source else distribute_tensor(source, mesh, [Shard(0)])
        other.requires_grad_()
        scattered = torch.as_strided_scatter(ours, other, (2, 2), (3, 2), 1)
        torch.autograd.backward(scattered.square().sum())
        for tensor, plain in ((ours, expected[0]), (other, expected[1])):
            grad = tensor.grad
            assert grad is not None
            assert plain.grad is not None
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad
            assert torch.equal(full, plain.grad)

    run_ranks(2, program)


@each("placements", LAYOUTS)
def test_a_copy_is_written_where_it_is_asked_for(placements: list[Placement]) -> None:
    x, _ = values()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        ours = distribute_tensor(x, mesh, placements)
        out = distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)])
        result = torch.as_strided_copy(ours, (2, 2), (3, 2), 1, out=out)
        assert result is out
        assert torch.equal(out.full_tensor(), x.as_strided((2, 2), (3, 2), 1))

    run_ranks(2, program)


@each("placements", LAYOUTS)
@each(
    "scatter",
    [
        lambda x, s: torch.as_strided_scatter(x[:1].expand(3, 3), s, (2, 2), (1, 2), 1),
        lambda x, s: torch.as_strided_scatter(x[1:2].expand(3, 3), s, (2, 2), (1, 2)),
        lambda x, s: torch.as_strided_scatter(torch.arange(12.0)[3:], x[:2, :2], (2, 2), (1, 2)),
        lambda x, s: torch.select_scatter(x[:1].expand(3, 3), s[0, :1].expand(3), 0, -1),
        lambda x, s: torch.slice_scatter(x[:, :1].expand(4, 3), s[:1].repeat(4, 1), 1, 0, 2),
        lambda x, s: torch.diagonal_scatter(x[:, :1].expand(4, 3), s.view(-1)[:3]),
    ],
)
def test_scatters_to_what_is_expanded_or_plain(
    scatter: Callable[[Tensor, Tensor], Tensor], placements: list[Placement]
) -> None:
    """torch copies the elements of what is expanded, and else the memory."""
    x, source = values()
    expected = scatter(x, source)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        result: Any = scatter(
            distribute_tensor(x, mesh, placements), distribute_tensor(source, mesh, [Replicate()])
        )
        assert torch.equal(result.full_tensor(), expected)
        assert result.stride() == expected.stride()

    run_ranks(2, program)


@each("view", [lambda x: x[1:], lambda x: x.t()[:2], lambda x: x.unfold(0, 2, 1)])
def test_only_elements_of_the_tensor_itself_are_moved(view: Callable[[Tensor], Tensor]) -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(values()[0], init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(RuntimeError, match="elements of the memory that the tensor does not"):
            view(x).as_strided((2, 2), (3, 1), 0)
        shown = x[1:].as_strided((2, 2), (3, 1))
        shown.zero_()
        assert x.full_tensor().tolist() == [[0, 1, 2], [0, 0, 5], [0, 0, 8], [9, 10, 11]]

    run_ranks(2, program)
