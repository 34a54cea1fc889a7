"""Running a pipeline: each rank does the actions of the schedule, and messages go between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from tilework.comm.contract import ProcessGroup, Work
from tilework.comm.operations.internal import irecv, isend
from tilework.dtensor import DTensor
from tilework.parallel.data_parallel.ddp import DistributedDataParallel
from tilework.parallel.fully_sharded.module import FSDPModule, units_of
from tilework.parallel.pipeline.results import check_made
from tilework.parallel.pipeline.schedule import Action, Schedule, StageMessage
from tilework.parallel.pipeline.stage import Crossing, Route

#: The loss of a microbatch, from the model's result and the target.
Loss = Callable[..., Tensor]


class Scaler(Protocol):
    """The part of a GradScaler that a pipeline needs."""

    def scale(self, outputs: Tensor) -> Tensor:
        """The tensor times the scale."""


@dataclass(frozen=True)
class Microbatch:
    """The inputs of a microbatch.

    Attributes:
        args: The model's arguments.
        kwargs: The model's arguments by name.
        target: The target.
        weight: The factor of the microbatch's loss in the loss of the batch.
        route: What crosses the cuts.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    weight: float
    route: Route


@dataclass
class _Kept:
    """Values that forward keeps for backward."""

    received: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]


@dataclass
class Execution:
    """A step or an evaluation on this rank.

    Attributes:
        schedule: The schedule.
        group: The ranks of the pipeline.
        device: The device of values.
        parts: By stage, this rank's modules.
        microbatches: The microbatches.
        loss: The loss of a microbatch; None: results are kept instead.
        trains: True to run backward.
        scaler: Scales losses before backward.
    """

    schedule: Schedule
    group: ProcessGroup
    device: torch.device
    parts: Mapping[int, nn.Module]
    microbatches: Sequence[Microbatch]
    loss: Loss | None
    trains: bool
    scaler: Scaler | None = None
    #: By microbatch, on the rank of the last stage.
    results: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rank = self.group.rank()
        self._kept: dict[tuple[int, int], _Kept] = {}
        #: Values for another stage of this rank, by the action that made them.
        self._local: dict[Action, tuple[Tensor, ...]] = {}
        self._posted: dict[StageMessage, list[tuple[Tensor, Work | None]]] = {}
        self._sending: list[tuple[Tensor, Work | None]] = []
        self.steps = self.schedule.steps(rank)
        ends = [s.action for s in self.steps if s.action.kind in ("backward", "weights")]
        #: By stage, the microbatch whose backward is the last.
        self._last = {action.stage: action.microbatch for action in ends}
        self._gathers = {s.action.stage for s in self.steps if s.action.kind == "gather"}
        self._reduces = {s.action.stage for s in self.steps if s.action.kind == "reduce"}

    def run(self) -> None:
        """Do all actions of this rank. Collective; blocks."""
        with ExitStack() as around:
            for part in self.parts.values():
                if self.trains and isinstance(part, DistributedDataParallel):
                    around.enter_context(part.buffers_sent())
            self._run()

    def _run(self) -> None:
        for step in self.steps:
            for message in step.receives:
                if self._runs(message.made_by):
                    self._post(message)
            if not self._runs(step.action):
                continue
            taken = None if step.takes is None else self._take(step.takes)
            made = self._act(step.action, taken)
            if step.sends is not None and made is not None:
                self._send(step.sends, made)
            elif made is not None:
                self._local[step.action] = made
        for _, work in self._sending:
            if work is not None:
                work.wait()

    def _runs(self, action: Action) -> bool:
        if action.microbatch >= len(self.microbatches):  # a short batch, without backward
            return False
        return self.trains or action.kind in ("forward", "gather", "free")

    # -- messages ------------------------------------------------------------------------

    def _crossing(self, made_by: Action) -> tuple[Crossing, ...]:
        """The values that an action makes for another stage."""
        cuts = self.microbatches[made_by.microbatch].route.cuts
        if made_by.kind == "forward":
            return cuts[made_by.stage] if made_by.stage < len(cuts) else ()
        return tuple(each for each in cuts[made_by.stage - 1] if each.has_gradient)

    def _post(self, message: StageMessage) -> None:
        self._posted[message] = posted = []
        for each in self._crossing(message.made_by):
            buffer = torch.empty(each.shape, dtype=each.dtype, device=self.device)
            source = message.source
            work = irecv(buffer, group=self.group, tag=message.number, group_src=source)
            posted.append((buffer, work))

    def _take(self, message: StageMessage) -> tuple[Tensor, ...]:
        posted = self._posted.pop(message)
        for _, work in posted:
            if work is not None:
                work.wait()
        return tuple(buffer for buffer, _ in posted)

    def _send(self, message: StageMessage, values: Sequence[Tensor]) -> None:
        self._sending = [each for each in self._sending if each[1] and not each[1].is_completed()]
        for value in values:
            own, to = value.detach().contiguous(), message.target
            work = isend(own, group=self.group, tag=message.number, group_dst=to)
            self._sending.append((own, work))

    # -- actions -------------------------------------------------------------------------

    def _act(self, action: Action, taken: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
        """The values that an action makes for another stage; None for none."""
        kind, stage, _ = action
        if kind == "forward":
            before = action._replace(stage=stage - 1)
            values = self._local.pop(before, ()) if taken is None else taken
            return self._forward(action, values)
        if kind in ("backward", "input_gradient"):
            after = action._replace(stage=stage + 1)
            values = self._local.pop(after, ()) if taken is None else taken
            return self._backward(action, values)
        if kind != "weights":
            self._whole_stage(kind, self.parts[stage])
        return None

    def _forward(self, action: Action, values: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        _, stage, number = action
        mine, part = self.microbatches[number], self.parts[stage]
        before = mine.route.cuts[stage - 1] if stage else ()
        for value, crossing in zip(values, before, strict=True):
            value.requires_grad_(crossing.has_gradient and self.trains)
        with self._without_sync(part, stage, number):
            made = part((mine.route, *values), *mine.args, **mine.kwargs)
        if stage + 1 == self.schedule.stages:
            made = self._end(number, made)
        else:
            made = self._checked(stage, made, mine.route.cuts[stage])
        if self.trains:
            self._kept[stage, number] = _Kept(values, made)
        is_last = stage + 1 == self.schedule.stages
        return None if is_last else tuple(each.detach() for each in made)

    def _end(self, number: int, result: Any) -> tuple[Tensor, ...]:
        """The loss of a microbatch, or nothing."""
        mine = self.microbatches[number]
        if self.loss is None:
            self.results[number] = result
            return ()
        check_made(result, mine.route, exactly=False)
        if mine.weight:
            loss = self.loss(result, *(() if mine.target is None else (mine.target,)))
        else:
            loss = _zero_of(result)
        self.results[number] = result
        self.losses[number] = loss.detach()
        weighted = loss if mine.weight == 1 else loss * mine.weight
        return (weighted if self.scaler is None else self.scaler.scale(weighted),)

    def _checked(
        self, stage: int, made: Sequence[Tensor], crossings: Sequence[Crossing]
    ) -> tuple[Tensor, ...]:
        """The values of a stage, compared with the route; in the route's dtype, where that loses
        nothing, as after a policy of mixed precision.
        """
        pairs = [
            (_in_dtype(value, each.dtype), each)
            for value, each in zip(made, crossings, strict=True)
        ]
        for value, each in pairs:
            if isinstance(value, DTensor):
                raise TypeError(
                    f"a DTensor crosses the cut after stage {stage}: {each}. Plain tensors go "
                    f"between stages: let a style give local tensors there (use_local_output=True)"
                )
            if tuple(value.shape) != each.shape or value.dtype != each.dtype:
                raise RuntimeError(
                    f"stage {stage} made {list(value.shape)} {value.dtype} for {each}: stages can "
                    f"follow a forward only if shapes of inputs decide the shapes of results"
                )
            if self.trains and value.requires_grad and not each.has_gradient:
                raise RuntimeError(
                    f"parameters of stage {stage} or before require gradients, and none did when "
                    f"pipeline() was called: unfreeze them before pipeline()"
                )
        return tuple(value for value, _ in pairs)

    def _backward(self, action: Action, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        _, stage, number = action
        kept = self._kept.pop((stage, number))
        mine, part = self.microbatches[number], self.parts[stage]
        self._prepare(part, stage, number)
        if stage + 1 == self.schedule.stages:
            pairs = [(each, None) for each in kept.sent if each.requires_grad]
        else:
            trained = [
                each
                for each, c in zip(kept.sent, mine.route.cuts[stage], strict=True)
                if c.has_gradient
            ]
            both = zip(trained, grads, strict=True)
            pairs = [(each, grad) for each, grad in both if each.requires_grad]  # type: ignore[misc]
        if pairs:
            outputs, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, gradients)
        if not stage:
            return None
        leaves = [each for each in kept.received if each.requires_grad]
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)

    # -- wrappers of stages --------------------------------------------------------------

    def _without_sync(
        self, part: nn.Module, stage: int, number: int
    ) -> AbstractContextManager[None]:
        """The context of a forward: all but the last backward of a stage accumulate gradients."""
        is_last = self._last.get(stage) == number
        if isinstance(part, DistributedDataParallel) and not is_last:
            return part.no_sync()
        return nullcontext()

    def _prepare(self, part: nn.Module, stage: int, number: int) -> None:
        """Tell wrappers if a backward is the last of the step."""
        is_last = self._last[stage] == number
        if isinstance(part, DistributedDataParallel):
            part.reducer.accumulating = not is_last
        for each in part.modules():
            if isinstance(each, FSDPModule):
                reduces = is_last and stage not in self._reduces
                each.set_requires_gradient_sync(reduces, recurse=False)
                each.set_is_last_backward(is_last)
                if stage in self._gathers:
                    each.set_reshard_after_forward(False, recurse=False)
                    each.set_reshard_after_backward(False, recurse=False)

    def _whole_stage(self, kind: str, part: nn.Module) -> None:
        """Gather or free a stage's sharded parameters, or reduce the gradients. Collective."""
        for each in [x for x in part.modules() if isinstance(x, FSDPModule)]:
            if kind == "gather":
                each.set_reshard_after_forward(False, recurse=False)
                each.set_reshard_after_backward(False, recurse=False)
                each.unshard()
            elif kind == "free":
                each.reshard()
            else:
                for unit in units_of(each, recurse=False):
                    unit.reduce_deferred()


def _in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    is_wider = torch.promote_types(value.dtype, dtype) == dtype
    return value.to(dtype) if is_wider and value.is_floating_point() else value


def _zero_of(result: Any) -> Tensor:
    """Zero, whose gradients are zeros: the mean of no elements is no number."""
    leaves = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor) and x.requires_grad]
    return sum((x.mul(0).nan_to_num().sum() for x in leaves), start=torch.zeros(()))
