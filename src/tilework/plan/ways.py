"""The ways to share a model among ranks: one entry of a registry for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from tilework.mesh import DeviceMesh
from tilework.parallel import (
    DistributedDataParallel,
    apply_activation_checkpointing,
    fully_shard,
    parallelize,
)


@dataclass(frozen=True)
class Sizes:
    """The bytes of a rank, and what decides how they shrink.

    Attributes:
        parameters: Of all parameters; gradients are as many, states of an optimizer ``states``.
        states: Of the states.
        activations: Of all that lives between forward and backward.
        buffers: Of memory for moving data.
        block: Of the parameters of the largest block.
        blocks: The number of blocks in a row.
        in_linear: The part of parameters in linear layers.
        rows: The rows of a batch.
        moved: The bytes that a rank moves in a step.
        work: The arithmetic, relative to one forward and backward of a rank alone.
    """

    parameters: float
    states: float
    activations: float
    block: float
    blocks: int
    in_linear: float
    rows: int
    buffers: float = 0.0
    moved: float = 0.0
    work: float = 1.0

    @property
    def total(self) -> float:
        """The bytes of a rank at the peak."""
        return 2 * self.parameters + self.states + self.activations + self.buffers


@dataclass(frozen=True)
class SharingWay:
    """A way to share a model among ranks.

    Attributes:
        name: The name, and the axis of the mesh.
        shares_batch: True if the ranks have different rows of a batch.
        shrink: The sizes of a rank with ``degree`` ranks.
        apply: Changes a model; called with the model, the axis's mesh, and an example.
        why_not: The reason why it cannot be with so many ranks; "" if it can.
    """

    name: str
    shares_batch: bool
    shrink: Callable[[Sizes, int], Sizes]
    apply: Callable[[nn.Module, DeviceMesh | None, Any], nn.Module]
    why_not: Callable[[Sizes, int], str] = lambda sizes, degree: ""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules of the longest list or sequence in a model; the model's children without one."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m)]
    longest = max(lists, key=len, default=model)
    return list(longest.children()) or [model]


def _replicate(model: nn.Module, mesh: DeviceMesh | None, example: Any) -> nn.Module:
    return DistributedDataParallel(model, device_mesh=mesh)


def _shard(model: nn.Module, mesh: DeviceMesh | None, example: Any) -> nn.Module:
    for block in blocks_of(model):
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    sharded: nn.Module = fully_shard(model, mesh=mesh)
    return sharded


def _cut(model: nn.Module, mesh: DeviceMesh | None, example: Any) -> nn.Module:
    parallelize(model, mesh, example)  # in place
    return model


def _recompute(model: nn.Module, mesh: DeviceMesh | None, example: Any) -> nn.Module:
    chosen = {id(block) for block in blocks_of(model)}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)
    return model


def _of_batch(sizes: Sizes, degree: int) -> Sizes:
    return replace(sizes, activations=sizes.activations / degree, work=sizes.work / degree)


def _replicated(sizes: Sizes, degree: int) -> Sizes:
    sizes = _of_batch(sizes, degree)
    moved = 2 * sizes.parameters * (degree - 1) / degree
    return replace(sizes, buffers=sizes.buffers + sizes.parameters, moved=sizes.moved + moved)


def _sharded(sizes: Sizes, degree: int) -> Sizes:
    sizes = _of_batch(sizes, degree)
    return replace(
        sizes,
        parameters=sizes.parameters / degree,
        states=sizes.states / degree,
        buffers=sizes.buffers + 3 * sizes.block,
        moved=sizes.moved + 3 * sizes.parameters * (degree - 1) / degree,
    )


def _cut_sizes(sizes: Sizes, degree: int) -> Sizes:
    left = 1 - sizes.in_linear * (degree - 1) / degree
    return replace(
        sizes,
        parameters=sizes.parameters * left,
        states=sizes.states * left,
        block=sizes.block * left,
        activations=sizes.activations * left,
        work=sizes.work * left,
        moved=sizes.moved + sizes.activations * (degree - 1) / degree / 4,
    )


def _recomputed(sizes: Sizes, degree: int) -> Sizes:
    # A block's input is a small part of what the block keeps.
    kept = sizes.activations * (1 / sizes.blocks + 1 / 16)
    return replace(sizes, activations=min(sizes.activations, kept), work=sizes.work * 4 / 3)


def _too_few_rows(sizes: Sizes, degree: int) -> str:
    return f"a batch of {sizes.rows} rows is less than {degree}" if degree > sizes.rows else ""


def _nothing_to_cut(sizes: Sizes, degree: int) -> str:
    return "" if sizes.in_linear else "no linear layer can be cut"


#: All ways, in the order in which they are applied to a model.
WAYS: Final[dict[str, SharingWay]] = {
    way.name: way
    for way in (
        SharingWay("tp", False, _cut_sizes, _cut, _nothing_to_cut),
        SharingWay("recompute", False, _recomputed, _recompute),
        SharingWay("fsdp", True, _sharded, _shard, _too_few_rows),
        SharingWay("ddp", True, _replicated, _replicate, _too_few_rows),
    )
}
