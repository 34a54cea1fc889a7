"""The ways to share a model among ranks: one entry of a registry for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Final

from torch import nn

import tilework.parallel
from tilework.mesh import DeviceMesh
from tilework.parallel import (
    ContextParallel,
    DistributedDataParallel,
    ExpertParallel,
    Schedule,
    apply_activation_checkpointing,
    derive_plan,
    fully_shard,
    parallelize_module,
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
        in_experts: The part of parameters in stacks of experts.
        experts: The experts of a stack.
        rows: The rows of a batch.
        sequence: The length of the sequence that attention looks at; 0 without attention.
        rows_each: The rows of a rank.
        microbatches: The parts of these rows in a pipeline.
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
    in_experts: float = 0.0
    experts: int = 0
    sequence: int = 0
    rows_each: int = 1
    microbatches: int = 1
    buffers: float = 0.0
    moved: float = 0.0
    work: float = 1.0

    @property
    def total(self) -> float:
        """The bytes of a rank at the peak."""
        return 2 * self.parameters + self.states + self.activations + self.buffers


@dataclass(frozen=True)
class Setting:
    """The ranks that a plan is applied on.

    Attributes:
        axes: By way, the axis of the mesh.
        batch: The axes of the ways that share a batch, as a single axis.
        example: The arguments of a forward.
        microbatches: The parts of a batch in a pipeline.
    """

    axes: Mapping[str, DeviceMesh]
    batch: DeviceMesh | None
    example: Any
    microbatches: int


#: A change of a model, or of a stage's module.
Change = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class SharingWay:
    """A way to share a model among ranks, named as the axis of the mesh.

    ``shares_batch``: ranks have different rows of a batch. ``shrink`` gives the sizes of a rank
    with ``degree`` ranks; ``apply`` changes a model, for the axis's mesh and an example;
    ``why_not`` is the reason why it cannot be with so many ranks ("" if it can).
    """

    name: str
    shares_batch: bool
    shrink: Callable[[Sizes, int], Sizes]
    change: Callable[[nn.Module, Setting], Change]
    why_not: Callable[[Sizes, int], str] = lambda sizes, degree: ""
    apart_from: Mapping[str, str] = field(default_factory=dict)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules of the longest list or sequence in a model; the model's children without one."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m)]
    longest = max(lists, key=len, default=model)
    return list(longest.children()) or [model]


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules that ``ExpertParallel`` may share: stacks, called with three tensors."""
    return [each for each in model.modules() if _is_experts(each)]


def _is_experts(module: nn.Module) -> bool:
    stacks, own = list(module.parameters()), list(module.parameters(recurse=False))
    if not own or len(own) < len(stacks) or min(each.dim() for each in own) < 2:
        return False
    counts = {len(each) for each in own}
    return len(counts) == 1 and len(signature(type(module).forward).parameters) == 4


def _replicate(model: nn.Module, setting: Setting) -> Change:
    return lambda part: DistributedDataParallel(part, device_mesh=setting.axes["ddp"])


def _shard(model: nn.Module, setting: Setting) -> Change:
    def change(part: nn.Module) -> nn.Module:
        experts = experts_of(part) if "ep" in setting.axes else []
        for each in experts:
            fully_shard(each, mesh=setting.axes["fsdp"])
        apart = [parameter for each in experts for parameter in each.parameters()]
        for block in blocks_of(part):
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=setting.batch, ignored_params=apart)
        sharded: nn.Module = fully_shard(part, mesh=setting.batch, ignored_params=apart)
        return sharded

    return change


def _cut(model: nn.Module, setting: Setting) -> Change:
    mesh = setting.axes["tp"]
    plan = derive_plan(model, mesh, setting.example)

    def change(part: nn.Module) -> nn.Module:
        # A stage has stand-ins for other stages' modules.
        own = {n for n, each in part.named_modules() if any(True for _ in each.parameters())}
        return parallelize_module(part, mesh, {n: way for n, way in plan.items() if n in own})

    return change


def _share_sequence(model: nn.Module, setting: Setting) -> Change:
    return lambda part: parallelize_module(part, setting.axes["cp"], ContextParallel())


def _share_experts(model: nn.Module, setting: Setting) -> Change:
    def change(part: nn.Module) -> nn.Module:
        for experts in experts_of(part):
            parallelize_module(experts, setting.axes["ep"], ExpertParallel())
        return part

    return change


def _cut_into_stages(model: nn.Module, setting: Setting) -> Change:
    mesh = setting.axes["pp"]
    schedule = Schedule.one_forward_one_backward(mesh.size(), setting.microbatches)
    return lambda whole: tilework.parallel.pipeline(whole, mesh, schedule=schedule)


def _recompute(model: nn.Module, setting: Setting) -> Change:
    def change(part: nn.Module) -> nn.Module:
        chosen = {id(block) for block in blocks_of(part)}
        apply_activation_checkpointing(part, check_fn=lambda module: id(module) in chosen)
        return part

    return change


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


def _staged(sizes: Sizes, degree: int) -> Sizes:
    in_blocks = min(1.0, sizes.block * sizes.blocks / max(sizes.parameters, 1))
    here = 1 - in_blocks * (1 - 1 / degree)
    parts = sizes.microbatches
    return replace(
        sizes,
        parameters=sizes.parameters * here,
        states=sizes.states * here,
        activations=sizes.activations / degree * min(degree, parts) / parts,
        blocks=-(-sizes.blocks // degree),
        work=sizes.work / degree * (parts + degree - 1) / parts,
    )


def _of_sequence(sizes: Sizes, degree: int) -> Sizes:
    away = (degree - 1) / degree
    moved = 2 * sizes.parameters * away + sizes.activations * away / 8
    return replace(_of_batch(sizes, degree), moved=sizes.moved + moved)


def _of_experts(sizes: Sizes, degree: int) -> Sizes:
    sizes, away = _of_batch(sizes, degree), (degree - 1) / degree
    gathered = 1 - sizes.in_experts
    moved = 3 * sizes.parameters * gathered * away + sizes.activations * away / 4
    return replace(
        sizes,
        parameters=sizes.parameters / degree,
        states=sizes.states / degree,
        block=sizes.block * (gathered + sizes.in_experts / degree),
        moved=sizes.moved + moved,
    )


def _recomputed(sizes: Sizes, degree: int) -> Sizes:
    # A block's input is a small part of what the block keeps.
    kept = sizes.activations * (1 / sizes.blocks + 1 / 16)
    return replace(sizes, activations=min(sizes.activations, kept), work=sizes.work * 4 / 3)


def _too_few_rows(sizes: Sizes, degree: int) -> str:
    return f"a batch of {sizes.rows} rows is less than {degree}" if degree > sizes.rows else ""


def _nothing_to_cut(sizes: Sizes, degree: int) -> str:
    return "" if sizes.in_linear else "no linear layer can be cut"


def _no_sequence(sizes: Sizes, degree: int) -> str:
    if not sizes.sequence:
        return "the model has no attention, whose sequence ranks could share"
    if sizes.rows_each > 1:
        return "rows are left to share, which spares as much memory and is faster"
    few = f"a sequence of {sizes.sequence} is less than {2 * degree}, two tokens for each rank"
    return few if sizes.sequence < 2 * degree else ""


def _no_experts(sizes: Sizes, degree: int) -> str:
    if not sizes.in_experts:
        return "the model has no stacks of experts, called with rows, experts and weights"
    few = f"{sizes.experts} experts are less than {degree} ranks" if degree > sizes.experts else ""
    return few or _too_few_rows(sizes, degree)


def _no_stages(sizes: Sizes, degree: int) -> str:
    if degree > sizes.blocks:
        return f"{sizes.blocks} blocks in a row are less than {degree} stages"
    return "" if sizes.microbatches > 1 else "a rank's rows are no two microbatches"


_NO_MESH = "both make DTensors, of which each needs both axes: write one plan for both by hand"

#: All ways, in the order in which they are applied to a model.
WAYS: Final[dict[str, SharingWay]] = {
    way.name: way
    for way in (
        SharingWay("pp", False, _staged, _cut_into_stages, _no_stages),
        SharingWay("tp", False, _cut_sizes, _cut, _nothing_to_cut),
        SharingWay(
            "cp",
            False,
            _of_sequence,
            _share_sequence,
            _no_sequence,
            {"pp": "DTensors do not cross stages", "tp": _NO_MESH, "ep": _NO_MESH},
        ),
        SharingWay(
            "ep",
            True,
            _of_experts,
            _share_experts,
            _no_experts,
            {"ddp": "ranks of ddp would not average the experts' gradients: take fsdp"},
        ),
        SharingWay("recompute", False, _recomputed, _recompute),
        SharingWay("fsdp", True, _sharded, _shard, _too_few_rows),
        SharingWay("ddp", True, _replicated, _replicate, _too_few_rows),
    )
}
#: The axes of a mesh, the outermost first: ranks that talk most are next to each other.
AXES: Final[tuple[str, ...]] = ("pp", "ddp", "fsdp", "ep", "cp", "tp")
