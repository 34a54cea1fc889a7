"""Running a pipeline: each rank does the actions of the schedule, and messages go between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from tilework.comm.contract import ProcessGroup, Work
from tilework.comm.operations.internal import irecv, isend
from tilework.dtensor import DTensor
from tilework.parallel.data_parallel.ddp import DistributedDataParallel
from tilework.parallel.data_parallel.leaves import local_tensors
from tilework.parallel.fully_sharded.module import FSDPModule, units_of
from tilework.parallel.pipelines.batches import check_made, joined
from tilework.parallel.pipelines.captured import CapturedStages, stage_forward
from tilework.parallel.pipelines.schedule import Action, ActionStep, Schedule, StageMessage
from tilework.parallel.pipelines.stage import Crossing, Route, Writable

#: The loss of a microbatch, from the model's result and the target.
Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Microbatch:
    """The inputs of a microbatch."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    rows: int
    #: The factor of the microbatch's loss in the loss of the batch.
    weight: float
    route: Route


@dataclass
class _Kept:
    """Values that a forward keeps for backward."""

    received: tuple[Tensor, ...]
    #: The values for the next stage; of the last stage, the loss.
    sent: tuple[Tensor, ...]
    #: The captured call, if the backward pass is cut.
    call: Any = None
    #: Of the last stage, the results of such a call, each with the leaf that the loss took instead.
    results: Sequence[tuple[Tensor, Tensor]] = ()
    #: The tensors at which backward starts, with gradients.
    ends: Sequence[tuple[Tensor, Tensor | None]] = ()


@dataclass(frozen=True)
class RunOptions:
    """The way in which microbatches run."""

    #: The loss of a microbatch; None: without.
    loss: Loss | None
    #: True to run backward.
    trains: bool
    scaler: GradScaler | None = None
    #: Runs stages as programs; None: as they are.
    captured: CapturedStages | None = None
    #: True to keep results.
    keeps: bool = False


@dataclass
class Execution:
    """A step or an evaluation on this rank."""

    schedule: Schedule
    group: ProcessGroup
    device: torch.device
    parts: Mapping[int, nn.Module]
    microbatches: Sequence[Microbatch]
    options: RunOptions
    #: By microbatch, on the rank of the last stage.
    results: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kept: dict[tuple[int, int], _Kept] = {}
        #: Values for another stage of this rank: by stage and microbatch that made them, and True
        #: for activations, False for gradients.
        self._local: dict[tuple[int, int, bool], tuple[Tensor, ...]] = {}
        self._posted: dict[StageMessage, list[tuple[Tensor, Work | None]]] = {}
        self._sending: list[tuple[Tensor, Work | None]] = []
        self.steps = self.schedule.steps(self.group.rank())
        actions = [step.action for step in self.steps]
        #: By stage, the microbatch whose backward is the last.
        self._last = {a.stage: a.microbatch for a in actions if a.kind in ("backward", "weights")}
        #: The stages whose gradients are reduced by an action.
        self._reduces = {action.stage for action in actions if action.kind == "reduce"}
        #: By stage, what fully_shard has sharded.
        self._sharded = {
            stage: [each for each in part.modules() if isinstance(each, FSDPModule)]
            for stage, part in self.parts.items()
        }
        sharded = [stage for stage, modules in self._sharded.items() if modules]
        if sharded and self.options.captured is not None:
            raise ValueError(
                f"stage {sharded[0]} is captured, and fully_shard has sharded it: each program "
                f"would gather and reduce. Leave out capture= of pipeline(), or capture the whole "
                f"step"
            )

    def run(self) -> None:
        """Do all actions of this rank. Collective; blocks."""
        with ExitStack() as around:
            for part in self.parts.values():
                if self.options.trains and isinstance(part, DistributedDataParallel):
                    around.enter_context(part.buffers_sent())
            self._run()

    def together(self) -> Any:
        """The results of all microbatches as those of the batch. Local."""
        return joined(self.results, [each.weight for each in self.microbatches])

    def _run(self) -> None:
        for step in self.steps:
            for message in step.receives:
                if self._runs(message.made_by):
                    self._post(message)
            if not self._runs(step.action):
                continue
            made = self._act(step.action, self._given(step))
            if made is not None and step.sends is not None:
                self._send(step.sends, made)
            elif made is not None:
                kind, stage, number = step.action
                self._local[stage, number, kind == "forward"] = made
        for _, work in self._sending:
            if work is not None:
                work.wait()

    def _runs(self, action: Action) -> bool:
        if action.microbatch >= len(self.microbatches):  # a short batch, without backward
            return False
        return self.options.trains or action.kind in ("forward", "gather", "free")

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

    def _given(self, step: ActionStep) -> tuple[Tensor, ...]:
        """The values that another stage made for an action."""
        if step.takes is None:
            kind, stage, number = step.action
            before = stage - 1 if kind == "forward" else stage + 1
            return self._local.pop((before, number, kind == "forward"), ())
        posted = self._posted.pop(step.takes)
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

    def _act(self, action: Action, values: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The values that an action makes for another stage; None for none."""
        if action.kind == "forward":
            return self._forward(action, values)
        if action.kind in ("backward", "input_gradient"):
            return self._backward(action, values)
        if action.kind == "weights":
            self._weights(action)
        else:
            self._whole_stage(action.kind, action.stage)
        return None

    def _forward(self, action: Action, values: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        _, stage, number = action
        mine, part = self.microbatches[number], self.parts[stage]
        before = mine.route.cuts[stage - 1] if stage else ()
        for value, crossing in zip(values, before, strict=True):
            value.requires_grad_(crossing.has_gradient and self.options.trains)
        given = *values, *mine.args
        with self._without_sync(part, stage, number):
            if self.options.trains and self.options.captured is not None:
                made, call = self.options.captured.run(part, stage, mine.route, given, mine.kwargs)
            else:
                forward = stage_forward(part, stage, mine.route, self.options.trains)
                made, call = forward(*given, **mine.kwargs), None
        kept = _Kept(values, made, call)
        is_last = stage + 1 == self.schedule.stages
        if is_last:
            if call is not None:
                made, kept.results = _cut_off(made)
            kept.sent = (self._end(number, made),)
        if self.options.trains:
            self._kept[stage, number] = kept
        return None if is_last else tuple(each.detach() for each in made)

    def _end(self, number: int, result: Any) -> Tensor:
        """The loss of a microbatch, or zero."""
        mine = self.microbatches[number]
        if self.options.keeps:
            self.results[number] = tree_map_only(Tensor, Tensor.detach, result)
        if self.options.loss is None:
            return torch.zeros(())
        check_made(result, mine.route)
        if mine.weight:
            loss = self.options.loss(result, *(() if mine.target is None else (mine.target,)))
        else:
            loss = _zero_of(result)
        self.losses[number] = loss.detach().clone()  # mse_loss gives numbers a batch's memory
        weighted = loss if mine.weight == 1 else loss * mine.weight
        scaler = self.options.scaler
        return weighted if scaler is None else scaler.scale(weighted)

    def _backward(self, action: Action, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        kind, stage, number = action
        kept = self._kept[stage, number]
        kept.ends = self._ends(stage, number, kept, grads)
        leaves = [each for each in kept.received if each.requires_grad]
        if kind == "backward":
            self._weights(action)
            found: Sequence[Tensor | None] = [each.grad for each in leaves]
        else:
            found = _input_gradients(kept, leaves)
        if not stage:
            return None
        pairs = zip(leaves, found, strict=True)
        return tuple(torch.zeros_like(x) if grad is None else grad for x, grad in pairs)

    def _ends(
        self, stage: int, number: int, kept: _Kept, grads: tuple[Tensor, ...]
    ) -> list[tuple[Tensor, Tensor | None]]:
        """The tensors at which a stage's backward starts, with gradients."""
        if stage + 1 < self.schedule.stages:
            cut = self.microbatches[number].route.cuts[stage]
            trained = [x for x, c in zip(kept.sent, cut, strict=True) if c.has_gradient]
            pairs = zip(trained, grads, strict=True)
            return [(each, grad) for each, grad in pairs if each.requires_grad]
        (loss,) = kept.sent
        if not loss.requires_grad:
            return []
        if kept.call is None:
            return [(loss, torch.ones_like(loss))]
        torch.autograd.backward(loss)
        return [(made, leaf.grad) for made, leaf in kept.results]

    def _weights(self, action: Action) -> None:
        """Add a stage's gradients to the parameters'; of whole backwards to the values', too."""
        _, stage, number = action
        self._prepare(self.parts[stage], stage, number)
        ends = [each for each in self._kept.pop((stage, number)).ends if each[1] is not None]
        if ends:
            outputs, gradients = zip(*ends, strict=True)
            torch.autograd.backward(outputs, gradients)

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
        for each in self._sharded[stage]:
            each.set_requires_gradient_sync(is_last and stage not in self._reduces, recurse=False)
            each.set_is_last_backward(is_last)

    def _whole_stage(self, kind: str, stage: int) -> None:
        """Gather or free a stage's sharded parameters, or reduce the gradients. Collective."""
        for each in self._sharded[stage]:
            if kind == "gather":
                each.set_reshard_after_forward(False, recurse=False)
                each.set_reshard_after_backward(False, recurse=False)
                each.unshard()
            elif kind == "free":
                each.reshard()
            else:
                for unit in units_of(each, recurse=False):
                    unit.reduce_deferred()


def _input_gradients(kept: _Kept, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of the values that a stage received; parameters stay as they are."""
    if not kept.ends or not leaves:
        return [None] * len(leaves)
    outputs, gradients = zip(*kept.ends, strict=True)
    if kept.call is None:
        return torch.autograd.grad(outputs, leaves, gradients, retain_graph=True, allow_unused=True)
    found = {id(tensor): grad for tensor, grad in kept.call.input_gradients(gradients)}
    return [found.get(id(each)) for each in leaves]


def _cut_off(result: Any) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """A result whose graph begins here; and each tensor that has a graph, with the new leaf."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def own(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.requires_grad):
            return x
        leaf = x.detach().requires_grad_()
        pairs.extend(zip(local_tensors(x), local_tensors(leaf), strict=True))
        return leaf if isinstance(x, DTensor) else Writable.apply(leaf)  # type: ignore[no-untyped-call]

    return tree_map(own, result), pairs


def _zero_of(result: Any) -> Tensor:
    """Zero, whose gradients are zeros: the mean of no elements is no number."""
    leaves = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor) and x.requires_grad]
    return sum((x.mul(0).nan_to_num().sum() for x in leaves), start=torch.zeros(()))
