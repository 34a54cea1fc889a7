"""ContextParallel: models whose ranks share the sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.tables import each
from tilework.dtensor import DTensor, Shard, capture, explain, init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    ContextParallel,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
)
from tilework.testing import run_ranks

WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    """Causal attention that knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, WIDTH // HEADS)
        q, k, v = (
            torch.unflatten(part(x), -1, shape).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        done: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return done


class Model(nn.Module):
    """Tokens, positions, a block, and a loss."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(20, WIDTH), nn.Embedding(32, WIDTH)
        self.attention, self.head = Attention(), nn.Linear(WIDTH, 20)
        self.again = again

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        attend = self.attention
        x = x + (checkpoint(attend, x, use_reentrant=False) if self.again else attend(x))
        logits = self.head(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.transpose(1, 2), targets)}


def batch() -> Tensor:
    return torch.randint(0, 20, (2, 11), generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module, ids: Tensor, step: Any = None) -> list[float]:
    """The losses of three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def plain_step(ids: Tensor) -> Tensor:
        loss = model(ids, ids)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done: Tensor = loss.detach()
        return done

    run = plain_step if step is None else step(plain_step)
    return [float(run(ids)) for _ in range(3)]


@each("way", ["auto", "ring", "heads", "gather"])
@each("again", [False, True])
def test_training_is_that_of_one_process(way: str, again: bool) -> None:
    want = trained(Model(), batch())

    def program(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (4,))
        model = parallelize_module(Model(again), mesh, ContextParallel(way=way))
        return trained(model, batch())

    assert run_ranks(4, program)[0] == pytest.approx(want, abs=1e-6)


def test_outputs_and_messages() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        model = parallelize_module(Model(), mesh, ContextParallel(way="ring"))
        with explain() as log:
            out = model(batch(), targets=batch())
        assert type(out["loss"]) is Tensor
        assert isinstance(out["logits"], DTensor)
        assert out["logits"].placements == (Shard(1),)
        assert [event.collective for event in log.events[:1]] == ["message"]

    run_ranks(2, program)


def test_a_captured_step() -> None:
    want = trained(Model(), batch())

    def program(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2,))
        model = parallelize_module(Model(), mesh, ContextParallel(way="ring"))
        return trained(model, batch(), capture)

    assert run_ranks(2, program)[0] == pytest.approx(want, abs=1e-6)


def test_heads_and_features_are_sharded_along_another_axis() -> None:
    want = trained(Model(), batch())

    def program(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        plan = {
            "": ContextParallel(way="ring"),
            "attention.[qkv]*": ColwiseParallel(use_local_output=False),
            "attention.out": RowwiseParallel(use_local_output=False),
        }
        return trained(parallelize_module(Model(), mesh, plan), batch())

    assert run_ranks(4, program)[0] == pytest.approx(want, abs=1e-6)


def test_parameters_are_sharded_along_another_axis() -> None:
    want = trained(Model(), batch())

    def program(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model = parallelize_module(Model(), mesh["cp"], ContextParallel(way="ring"))
        fully_shard(model, mesh=mesh["dp"])
        rows = batch()[mesh["dp"].get_local_rank()].unsqueeze(0)
        return trained(model, rows)[-1]

    losses = run_ranks(4, program)
    assert (losses[0] + losses[2]) / 2 == pytest.approx(want[-1], abs=1e-6)


def test_checkpoints_interchange() -> None:
    def program(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (2,))
        model = parallelize_module(Model(), mesh, ContextParallel())
        trained(model, batch())
        names = {name: value.full_tensor() for name, value in model.state_dict().items()}
        plain = Model()
        plain.load_state_dict(copy.deepcopy(names))
        out = model(batch(), batch())["loss"]
        return bool((plain(batch(), batch())["loss"] - out).abs() < 1e-6)

    assert run_ranks(2, program)[0]


def test_other_tokens_on_each_rank_are_refused() -> None:
    def program(rank: int) -> None:
        model = parallelize_module(Model(), init_device_mesh("cpu", (2,)), ContextParallel())
        model(batch() * 0 + rank, batch())["loss"].backward()

    with pytest.raises(Exception, match="differ"):
        run_ranks(2, program)


def test_inputs_without_a_dim_for_the_sequence_are_refused() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(Model(), mesh, ContextParallel(sequence_dim=5))(batch(), batch())

    with pytest.raises(ValueError, match=r"no input has this dim: their shapes are \[\[2, 11\]"):
        run_ranks(2, program)


def test_a_mesh_of_several_axes_needs_none_for_a_plan_of_this_style_alone() -> None:
    def program(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        return trained(parallelize_module(Model(), mesh, ContextParallel(sequence_dim=-1)), batch())

    assert run_ranks(4, program)[0] == pytest.approx(trained(Model(), batch()), abs=1e-6)
