"""Reading by index tensors that are DTensors, from tensors of every kind."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dtensor.op_checks import check_op, torch_computes
from tests.tables import each
from tilework.dtensor import DTensor, Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks

TABLE = torch.arange(12.0).view(4, 3)
INDEX = torch.tensor([0, 2, 1])
MASK = INDEX > 0
#: Indices of ``take_along_dim`` count from the end, too, but not with torch 2.6.
FROM_END = 2 if torch_computes(lambda: torch.ones(2).take_along_dim(torch.tensor([-1]))) else 0
READS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "one index": lambda x, i: x[i],
    "two indices": lambda x, i: x[i, i],
    "the second dim": lambda x, i: x[:, i],
    "after ...": lambda x, i: x[..., i],
    "with a new dim": lambda x, i: x[None, i],
    "with a number": lambda x, i: x[i, 1],
    "with a range": lambda x, i: x[i, 1:],
    "with a list": lambda x, i: x[i, [0, 1, 2]],
    "negative": lambda x, i: x[-i],
    "of two dims": lambda x, i: x[i.reshape(3, 1), i],
    "a mask": lambda x, i: x[:3][i > 0],
    "a mask of rows and columns": lambda x, i: x[:, i > 0],
    "a number in a tensor": lambda x, i: x[i[1]],
    "indices of a mask": lambda x, i: x[:3][(i > 0).nonzero(as_tuple=True)],
    "where a mask is": lambda x, i: x[:3][torch.where(i > 0)],
    "index_select": lambda x, i: x.index_select(0, i),
    "index_select of columns": lambda x, i: torch.index_select(x, 1, i),
    "take": lambda x, i: x.take(i),
    "gather": lambda x, i: x[:3].gather(1, i.reshape(3, 1)),
    "take_along_dim": lambda x, i: x[:3].take_along_dim(i.reshape(3, 1) - FROM_END, 1),
    "take_along_dim of all": lambda x, i: x.take_along_dim(i),
    "masked_select": lambda x, i: x[:3].masked_select((i > 0).reshape(3, 1)),
    "index_add": lambda x, i: x.index_add(0, i, torch.ones(3, 3)),
    "index_copy": lambda x, i: x.index_copy(0, i, torch.ones(3, 3)),
    "index_fill": lambda x, i: x.index_fill(1, i, 5.0),
    "index_put": lambda x, i: x.index_put((i,), torch.tensor(1.0)),
    "put": lambda x, i: x.put(i, torch.ones(3)),
    "put of nothing": lambda x, i: x.put(i[:0], torch.ones(0)),
    "scatter": lambda x, i: x[:3].scatter(1, i.reshape(3, 1), 5.0),
    "repeat_interleave": lambda x, i: x[:3].repeat_interleave(i, 0),
}


@each("name", READS)
def test_indices_that_are_dtensors(name: str) -> None:
    """``plain[index]`` with an index that lies on a mesh, and every other mixture."""
    check_op(READS[name], TABLE, INDEX, meshes=[(2,)], plain=True, most=12, partial=())


def test_elements_of_a_list_by_number() -> None:
    def program(rank: int) -> int:
        index = distribute_tensor(INDEX, init_device_mesh("cpu", (2,)), [Shard(0)])
        return operator.getitem([5, 6, 7], index[1])

    assert run_ranks(2, program) == [7, 7]


@pytest.mark.parametrize("size", [1, 2])
def test_augmented_assignment_to_an_element(size: int) -> None:
    """Which reads a view, writes to it, and writes it to where it is."""

    def change(x: Any) -> None:
        x[1] += 1
        x[0:2] *= 3
        x[-1] -= 4
        x[1:, None][0] += 5
        x[x > 4] /= 2

    def program(rank: int) -> None:
        plain = torch.arange(5.0)
        mesh = init_device_mesh("cpu", (size,))
        x = distribute_tensor(plain, mesh, [Shard(0)])
        grid = distribute_tensor(plain.reshape(1, 5), mesh, [Shard(0)])
        change(x)
        change(plain)
        grid[0, 1] += 1
        assert x.full_tensor().tolist() == plain.tolist()
        assert isinstance(grid, DTensor)
        assert grid.full_tensor().tolist() == [[0, 2, 2, 3, 4]]

    run_ranks(size, program)
