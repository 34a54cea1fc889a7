"""Writes that are refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fuzz.programs import compare
from tests.tables import each
from tilework.dtensor import distribute_tensor
from tilework.layout import Placement, Replicate, Shard
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks


@each(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.copy_(torch.ones(3, 4)),
        lambda x: torch._foreach_mul_([x], 2.0),
        lambda x: torch.add(torch.ones(3, 4), 1, out=x.detach()),
        lambda x: x.uniform_(),
        lambda x: x.__setitem__(slice(None), 1.0),
        lambda x: x.index_add_(0, torch.tensor([0]), torch.ones(1, 4)),
        lambda x: x.zero_(),
        lambda x: x[:, 1].fill_(2.0),
        lambda x: x[:1].unfold(1, 2, 1).mul_(2),
    ],
)
@each("placement", [Shard(0), Shard(1), Replicate()])
def test_what_repeats_is_written_by_no_rank(
    write: Callable[[Tensor], object], placement: Placement
) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        base = distribute_tensor(torch.arange(4.0).view(1, 4), mesh, [placement])
        with pytest.raises(RuntimeError, match="single place in memory"):
            write(base.expand(3, 4))
        assert base.full_tensor().tolist() == [[0, 1, 2, 3]]

    run_ranks(2, program)


@each(
    ("call", "refused"),
    [
        (lambda x, i: torch.max(x, 0, out=(x[1], i)), True),
        (lambda x, i: torch.mode(x, 0, out=(x[1], i)), True),
        (lambda x, i: torch.gather(x[1], 0, i, out=x[1]), True),
        (lambda x, i: torch.cumsum(x[:2], 0, out=x[1:]), True),
        (lambda x, i: torch.cumsum(x[1:], 0, out=x[1:]), False),
    ],
)
@each("placement", [Shard(0), Shard(1), Replicate()])
def test_out_may_not_be_read_where_torch_reads_after_it_writes(
    call: Callable[[Any, Any], object], refused: bool, placement: Placement
) -> None:
    def outcome(x: Any, index: Any) -> list[Any] | str:
        try:
            call(x, index)
        except RuntimeError:
            return "refused"
        return x.tolist()  # type: ignore[no-any-return]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x, index = torch.arange(9.0).view(3, 3), torch.zeros(3, dtype=torch.int64)
        made = distribute_tensor(x, mesh, [placement])
        expected = outcome(x, index.clone())
        assert outcome(made, distribute_tensor(index, mesh)) == expected
        assert (expected == "refused") == refused

    run_ranks(2, program)


WRITES: dict[str, Callable[[Any], object]] = {
    "mul_": lambda view: view.mul_(2),
    "zero_": lambda view: view.zero_(),
    "one row": lambda view: view.__setitem__(0, 1.0),
    "some rows": lambda view: view.__setitem__(slice(0, 2), 1.0),
    "foreach": lambda view: torch._foreach_add_([view], 1.0),
    "a view of it": lambda view: view[0].add_(1),
}


@each("is_leaf", [True, False])
@each("name", list(WRITES))
def test_views_made_without_gradients_are_written_without_them(name: str, is_leaf: bool) -> None:
    """Else the gradient of what they show would lack the change, in silence."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        leaf: Any = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
        leaf.requires_grad_()
        base = leaf if is_leaf else leaf * 1
        before = base.full_tensor().tolist()
        with torch.no_grad():
            view = base[1:]
        with pytest.raises(RuntimeError, match="made under no_grad"):
            WRITES[name](view)
        assert base.full_tensor().tolist() == before
        with torch.no_grad():
            WRITES[name](view)
            WRITES[name](base.detach()[1:])
        WRITES[name](base.detach()[1:])

    run_ranks(2, program)


@each(
    "write",
    [
        "v0.fill_(v0[1])",
        "v0[:2].fill_(v0[1])",
        "v0.masked_fill_(v0 > 2, v0[1])",
        "v0.index_fill_(0, torch.tensor([0, 2]), v0[1])",
    ],
)
@each("lies", ["R", "S0", "PA"])
def test_a_number_of_a_tensor_is_filled_into_it(write: str, lies: str) -> None:
    compare(f"v0 = data((4,), 3, '{lies}')\n{write}\nv1 = v0 * 2")


def test_a_limit_by_name_is_no_view_of_what_is_limited() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x: Any = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="by way of another view"):
            x.clamp_(min=x[1])
        assert x.full_tensor().tolist() == [0, 1, 2, 3]

    run_ranks(2, program)
