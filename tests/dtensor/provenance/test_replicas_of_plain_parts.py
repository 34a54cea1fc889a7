"""Modules of a plan with plain tensors between them: ranks that are not alike all raise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilework.distributed as dist
from tests.tables import each
from tilework.dtensor import Replicate, Shard, init_device_mesh
from tilework.errors import DistError
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    parallelize_module,
)
from tilework.testing import run_ranks

Plan = Mapping[str, ParallelStyle]
WIDTH = 4
torch.manual_seed(3)


class Model(nn.Module):
    """An embedding, a norm, two linear layers, and what is plain between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH, bias=False))

    def forward(self, tokens: Any) -> Any:
        x = self.words(tokens)
        return x + self.mlp(self.norm(x))


MODEL = Model()
_OUT: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
PLANS: dict[str, Callable[[], Plan]] = {
    "plain between": lambda: {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()},
    "words too": lambda: {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(),
    },
    "words by column": lambda: {"words": ColwiseParallel(output_layouts=Replicate())},
    "gathered output": lambda: {"mlp.0": ColwiseParallel(output_layouts=Replicate())},
    "a DTensor between": lambda: {
        "mlp.0": ColwiseParallel(use_local_output=False),
        "mlp.2": RowwiseParallel(),
    },
    "a prepared input": lambda: {
        "mlp": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True
        ),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(),
    },
    "a prepared output": lambda: {
        "words": RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
        "mlp.0": ColwiseParallel(use_local_output=False),
        "mlp.2": RowwiseParallel(use_local_output=False),
        "mlp": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
        ),
        "": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate()),
    },
    "a sequence": lambda: {
        "words": RowwiseParallel(input_layouts=Replicate(), **_OUT),
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.0": ColwiseParallel(use_local_output=False),
        "mlp.2": RowwiseParallel(**_OUT),
    },
}


def _step(model: Any, tokens: Tensor, labels: Tensor, scale: float) -> float:
    loss: Any = F.cross_entropy(model(tokens).flatten(0, 1) * scale, labels.flatten())
    loss.backward()
    return float(loss.detach())


DEVIATIONS = ("none", "tokens", "labels", "scale")


@settings(max_examples=20)
@given(
    st.sampled_from(sorted(PLANS)),
    st.sampled_from(DEVIATIONS),
    st.integers(0, 2),
    st.sampled_from([(2,), (2,), (3,), (2, 2), (1, 2)]),
    st.data(),
)
def test_one_rank_whose_data_differ(
    name: str, how: str, step: int, shape: tuple[int, ...], data: st.DataObject
) -> None:
    """All raise within the steps of an optimizer, and none where none differs."""
    if name == "a sequence":
        shape = shape[-1:]  # its labels are plain tensors beside DTensors, no rows
    ranks = torch.Size(shape).numel()
    deviant = data.draw(st.integers(0, ranks - 1))

    def program(rank: int) -> Any:
        names = ("dp", "tp")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = parallelize_module(copy.deepcopy(MODEL), mesh, PLANS[name]())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # Elsewhere modules that no style names take plain tensors, too, which are no rows.
        has_rows = len(shape) > 1 and name == "a prepared output"
        rows = mesh.get_local_rank(0) if has_rows else 0
        try:
            for number in range(3):
                differs = number == step and rank == deviant
                tokens = (torch.arange(6).view(2, 3) + number + rows) % 6
                labels = (tokens * 3 + 1) % WIDTH
                if differs and how == "tokens":
                    tokens = tokens.flip(1)
                if differs and how == "labels":
                    labels = (labels + 1) % WIDTH
                _step(model, tokens, labels, 2.0 if differs and how == "scale" else 1.0)
                optimizer.step()
                optimizer.zero_grad()
            dist.barrier()
        except DistError as error:
            return error
        return "fine"

    found = run_ranks(ranks, program)
    if how == "none":
        assert found == ["fine"] * ranks, found
    else:
        assert all(isinstance(each, DistError) for each in found), (name, how, found)


#: What one rank alone does to a module that hands out a plain tensor.
ALONE: dict[str, Callable[[Any], Any]] = {
    "a write": lambda m: m.weight.data.mul_(2),
    "a write to its detached form": lambda m: m.weight.detach().fill_(1),
    "other values": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "no bias": lambda m: setattr(m, "bias", None),
    "other initial values": lambda m: nn.init.ones_(m.weight),
}


@each("with_grad", [True, False])
@each("what", ALONE)
def test_one_rank_that_changes_a_module_before_plain_operators(what: str, with_grad: bool) -> None:
    def program(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model: Any = parallelize_module(copy.deepcopy(MODEL.mlp), mesh, plan)
        if rank == 1:
            ALONE[what](model[0])
        with torch.set_grad_enabled(with_grad), pytest.raises(DistError) as told:
            model(torch.ones(2, WIDTH))
        return str(told.value)

    assert all(
        "they differ in how their tensors came about" in each for each in run_ranks(2, program)
    )


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_rows_that_differ_along_data_parallel_ranks_are_no_fault(wrap: Any) -> None:
    """Each group of the plan's ranks has a batch of its own; within one all have the same."""

    def program(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(copy.deepcopy(MODEL.mlp), mesh["tp"], plan)
        data = mesh["dp"]
        if wrap is fully_shard:
            model = fully_shard(model, mesh=data)
        else:
            model = DistributedDataParallel(model, process_group=data.get_group())
        optimizer = torch.optim.AdamW(model.parameters())
        told = []
        for own in (rank // 2, rank // 2, rank):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(own))
            try:
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                told.append("fine")
            except DistError:
                told.append("raised")
        return told

    assert run_ranks(4, program) == [["fine", "fine", "raised"]] * 4
