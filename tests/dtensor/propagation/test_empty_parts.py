"""What torch refuses for dtypes is refused on all ranks, also on those without elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dtensor.sharded_values import cut
from tilework.dtensor import Shard, init_device_mesh
from tilework.layout import Placement
from tilework.testing import run_ranks

A = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
B = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))

REFUSED: dict[str, Any] = {
    "matmul": lambda a, b: a @ b.double(),
    "mm": lambda a, b: a.bool().mm(b.bool()),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b.double()),
    "baddbmm": lambda a, b: torch.baddbmm(a[None], a[None], (b @ a)[None].double()),
    "cdist": lambda a, b: torch.cdist(a, a.double()),
    "gather": lambda a, b: a.gather(0, torch.zeros(3, 4)),
    "softmax": lambda a, b: F.softmax(a.int(), 0),
    "bilinear": lambda a, b: F.bilinear(a, a, torch.ones(2, 4, 4).double()),
    "avg_pool1d": lambda a, b: F.avg_pool1d(a[:0][None], 2),
    "max_pool1d": lambda a, b: F.max_pool1d(a[:, :0][None], 2),
    "add_": lambda a, b: a.int().add_(a),
}
#: What torch takes, of other dtypes and where not all that is in the tensors is.
TAKEN: dict[str, Any] = {
    "index_select": lambda a, b: a.index_select(0, torch.tensor([1])),
    "embedding": lambda a, b: F.embedding(torch.tensor([2, 2]), a),
    "gather": lambda a, b: a.gather(0, torch.full((3, 4), 2)),
    "floor_divide": lambda a, b: a.int() // (a.int() * 0 + 2),
    "matmul": lambda a, b: a.int() @ b.int(),
    "softmax": lambda a, b: F.softmax(a.double(), 0),
}
LAYOUTS = [
    (Shard(0, (0, 3)), Shard(0, (0, 4))),
    (Shard(1, (0, 4)), Shard(0, (0, 4))),
    (Shard(1, (4, 0)), Shard(1, (0, 3))),
]


def _ran(operator: Any, layouts: tuple[Placement, Placement]) -> list[Any]:
    """What an operator gives on each of two ranks, or its error."""

    def program(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        a, b = (cut(full, mesh, [its]) for full, its in zip((A, B), layouts, strict=True))
        result: Any = operator(a, b)
        full: Tensor = result.full_tensor()
        return full

    return list(run_ranks(2, program, return_exceptions=True))


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_are_refused_on_ranks_without_elements(
    name: str, layouts: tuple[Placement, Placement]
) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        REFUSED[name](A, B)
    errors = _ran(REFUSED[name], layouts)
    assert all(isinstance(error, (RuntimeError, NotImplementedError)) for error in errors), errors
    assert len({str(error) for error in errors}) == 1  # none waits for another


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_no_others_are(name: str, layouts: tuple[Placement, Placement]) -> None:
    expected = TAKEN[name](A, B)
    for result in _ran(TAKEN[name], layouts):
        assert isinstance(result, Tensor), result
        torch.testing.assert_close(result, expected)


def test_kron_refuses_strides_as_torch_does() -> None:
    a = torch.empty_strided((1, 2, 2, 2), (4, 2, 1, 4)).fill_(1)
    b = a.mT.clone()
    with pytest.raises(RuntimeError, match="view size"):
        torch.kron(a, b)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(torch.ones(2, 2, 2), mesh, [Shard(1)]).unfold(0, 2, 1)
        with pytest.raises(RuntimeError, match="view size"):
            torch.kron(x.clone(), x.mT.clone())

    run_ranks(2, program)
