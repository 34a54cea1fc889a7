"""Plain tensors and plain modules that meet DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.dtensor.op_checks import check_op
from tests.dtensor.sharded_values import cut
from tests.rounding import assert_close
from tilework.dtensor import Partial, Replicate, Shard, init_device_mesh
from tilework.dtensor.propagation.dtensor_call import content_hash
from tilework.testing import run_ranks

GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def test_plain_tensors_meet_dtensors() -> None:
    """The most copied error, "Got mixed torch.Tensor and DTensor", is none here."""

    def mixed(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x + y, y - x, torch.cat([x, y]), x @ y.t(), torch.where(x > 0, y, x), x.lerp(y, 2)]

    def layouts(shape: tuple[int, ...]) -> list[list[Any]]:
        every = [(Shard(0),), (Shard(1),), (Replicate(),), (Partial(),)]
        return [pair for one in every for pair in ([one, None], [None, one])]

    check_op(mixed, GRID, GRID.flip(0).contiguous(), meshes=((2,),), layouts=layouts)


def test_one_element_of_any_stride_is_hashed() -> None:
    element = torch.arange(6.0).view(1, 6).t()[2:3]
    assert element.stride() == (1, 6)
    assert content_hash(element) == content_hash(torch.tensor([[2.0]]))


def test_modules_with_plain_weights_take_dtensors() -> None:
    """physicsnemo#1682: as they are; their gradients are those of one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8)
    )
    tokens = torch.randint(11, (4, 5))
    model(tokens).square().mean().backward()
    wanted = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        mine = nn.Sequential(
            nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8)
        )
        mine.load_state_dict(state)
        mine(cut(tokens, mesh, [Shard(0)])).square().mean().backward()
        for param, grad in zip(mine.parameters(), wanted, strict=True):
            assert param.grad is not None
            assert type(param.grad) is Tensor
            assert_close(param.grad, grad)

    run_ranks(2, program)
