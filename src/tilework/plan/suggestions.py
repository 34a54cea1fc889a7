"""Plans for a model, a number of ranks and their memory: found by formulas, then pretended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tilework.comm.world import get_rank, get_world_size
from tilework.dtensor.internal import tensors_in
from tilework.mesh import init_device_mesh
from tilework.parallel import Stages
from tilework.plan.cluster import Cluster
from tilework.plan.job import PlannedJob, pretend
from tilework.plan.report import PlanReport
from tilework.plan.ways import AXES, WAYS, Setting, Sizes, blocks_of
from tilework.show import Page, TextTable, bytes_text

#: The most plans that are pretended, and that are given.
_MOST_TRIED, _MOST = 8, 5
#: The part by which a formula may be wrong before a plan is left out for memory.
_SLACK = 1.3


@dataclass(frozen=True)
class ModelPlan:
    """A plan for a model: the ways, with the number of ranks of each.

    ``dataclasses.replace(plan, degrees={"fsdp": 4, "tp": 8})`` is another plan.

    Attributes:
        degrees: By way, the number of ranks; 1 for ways that need no ranks.
        microbatches: The parts of a batch in a pipeline (``pp``).
        report: What the plan needs, if it was pretended.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> plan = ModelPlan({"fsdp": 2, "recompute": 1})
        >>> def program(rank):
        ...     model = plan.apply(torch.nn.Sequential(torch.nn.Linear(2, 1)))
        ...     return model(plan.rows(torch.ones(4, 2))).shape
        >>> run_ranks(2, program)
        [torch.Size([2, 1]), torch.Size([2, 1])]
    """

    degrees: Mapping[str, int]
    microbatches: int = 1
    report: PlanReport | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        unknown = set(self.degrees) - set(WAYS)
        if unknown or not all(degree >= 1 for degree in self.degrees.values()):
            raise ValueError(f"ways are {', '.join(WAYS)}, with degrees from 1; got {self.degrees}")

    @property
    def _axes(self) -> dict[str, int]:
        """By way, the lengths of the mesh's axes."""
        known = {name: self.degrees[name] for name in AXES if name in self.degrees}
        return {name: n for name, n in known.items() if n > 1 or WAYS[name].shares_batch}

    def apply(self, model: nn.Module, example: Any = None, device_type: str = "cpu") -> nn.Module:
        """Share a model as planned. Collective over all ranks; blocks.

        Args:
            model: The model, whole and the same on all ranks. It is changed.
            example: The arguments of a forward, which ``tp`` needs.
            device_type: The kind of device.

        Returns:
            The model, for which each rank has :meth:`rows` of a batch. With ``pp`` it is
            :class:`~tilework.parallel.Stages`, which trains by ``step(...)``.

        Raises:
            ValueError: The plan is for another number of ranks.
        """
        axes = self._axes
        if prod(axes.values()) != get_world_size():
            raise ValueError(f"{self} is not for {get_world_size()} ranks")
        setting = Setting({}, None, example, self.microbatches)
        if axes:
            mesh = init_device_mesh(device_type, (*axes.values(),), mesh_dim_names=(*axes,))
            batch = tuple(name for name in axes if WAYS[name].shares_batch)
            shared = mesh[batch].flatten() if batch else None
            setting = replace(setting, axes={name: mesh[name] for name in axes}, batch=shared)
        ways = [way for name, way in WAYS.items() if self.degrees.get(name) == 1 or name in axes]
        for change in [way.change(model, setting) for way in ways]:
            if isinstance(model, Stages):
                model.parts[:] = map(change, model.parts)
            else:
                model = change(model)
        return model

    def rows(self, batch: Any) -> Any:
        """This rank's rows of a batch: of the tensors in it, along dim 0. Local."""
        count, place, rest = 1, 0, get_rank()
        for name, degree in reversed(self._axes.items()):
            rest, here = divmod(rest, degree)
            if WAYS[name].shares_batch:
                place, count = place + here * count, count * degree
        return _rows(batch, count, place)

    def __str__(self) -> str:
        return " + ".join(
            name if degree == 1 and name not in AXES else f"{name} {degree}"
            for name, degree in self.degrees.items()
        ) + (f" ({self.microbatches} microbatches)" if "pp" in self.degrees else "")


@dataclass(frozen=True)
class Suggestions(Sequence[ModelPlan]):
    """Plans, the fastest first, and why others were left out. Prints as tables."""

    plans: tuple[ModelPlan, ...]
    #: By plan, the reason.
    left_out: tuple[tuple[str, str], ...]

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, place: Any) -> Any:
        return self.plans[place]

    def __rich__(self) -> Page:
        rows = []
        for plan in self.plans:
            report = plan.report
            assert report is not None
            slowest = max(report.kinds, key=lambda each: each.time.seconds)
            peak = report.worst.peak.bytes
            rows.append(
                (str(plan), bytes_text(peak), bytes_text(slowest.nbytes), str(slowest.time))
            )
        parts: list[str | TextTable] = [
            TextTable(("plan", "peak", "moves", "two steps"), rows, {1, 2}),
            "",
            "left out:",
            TextTable(("plan", "why"), list(self.left_out)),
        ]
        return Page(*(parts if self.left_out else parts[:1]))

    def __str__(self) -> str:
        return str(self.__rich__())


def suggest(
    build: Callable[[], nn.Module],
    example: tuple[Any, ...] | Mapping[str, Any],
    ranks: int,
    hosts: int = 1,
    memory: str | int | None = None,
    cluster: Cluster | None = None,
) -> Suggestions:
    """Plans for a model on a number of ranks, proven by pretending them. Blocks for some seconds.

    All combinations of the ways (``ddp``, ``fsdp``, ``tp``, recomputing) are judged by formulas;
    the best eight are pretended, with AdamW, and two steps.

    Args:
        build: Makes the model. It is called on ranks without memory.
        example: The arguments of a forward for the whole batch: rows are dim 0 of tensors.
        ranks: The number of ranks.
        hosts: The number of hosts.
        memory: The memory of a rank; None: that of ``cluster``.
        cluster: The machines; None: an estimate.

    Raises:
        PretendError: The model needs a value that only a real run has.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> def build():
        ...     return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        >>> found = suggest(build, (torch.ones(8, 64),), ranks=4, memory="1 MB")
        >>> len(found) > 0 and found[0].report.is_good
        True
    """
    with pretend(1, 1, None, cluster) as alone:
        sizes, seconds = _alone(alone, build, example)
    judged, left_out = [], []
    with pretend(ranks, hosts, memory, cluster) as job:
        for degrees in _combinations(ranks):
            plan = ModelPlan(degrees)
            shrunk, why = _shrunk(sizes, degrees, job)
            if why:
                left_out.append((str(plan), why))
            else:
                judged.append((_price(shrunk, seconds, job), plan))
        judged.sort(key=lambda pair: pair[0])
        left_out += [(str(plan), "others promise to be faster") for _, plan in judged[_MOST_TRIED:]]
        found = []
        for _, plan in judged[:_MOST_TRIED]:
            with redirect_stdout(StringIO()):  # what parallelize() prints
                report = job.run(_step, plan, build, example)
            if report.is_good:
                found.append(replace(plan, report=report))
            else:
                why = f"needs {bytes_text(report.worst.peak.bytes)}" if not report.fits else ""
                left_out.append((str(plan), why or str(report.mismatches[0])))
    found.sort(key=lambda plan: _seconds_of(plan.report))
    left_out += [(str(plan), "slower than those above") for plan in found[_MOST:]]
    return Suggestions(tuple(found[:_MOST]), tuple(left_out))


def _seconds_of(report: PlanReport | None) -> float:
    return 0.0 if report is None else max(each.time.seconds for each in report.kinds)


def _combinations(ranks: int) -> Iterator[dict[str, int]]:
    """All plans: the ranks divided among a way for the batch and a way for the model."""
    for degree in range(1, ranks + 1):
        if ranks % degree:
            continue
        for name in ("ddp", "fsdp"):
            for more in ({}, {"recompute": 1}):
                inner = {"tp": degree} if degree > 1 else {}
                yield {name: ranks // degree, **inner, **more}


def _shrunk(sizes: Sizes, degrees: Mapping[str, int], job: PlannedJob) -> tuple[Sizes, str]:
    """The sizes with a plan, and the reason why the plan cannot be; "" if it can."""
    if degrees.get("tp", 1) > -(-job.ranks // job.hosts):
        return sizes, "tp would cross hosts, at each layer"
    for name, way in WAYS.items():
        if name in degrees:
            why = way.why_not(sizes, degrees[name])
            if why:
                return sizes, why
            sizes = way.shrink(sizes, degrees[name])
    limit = job.cluster.memory
    if limit is not None and sizes.total > _SLACK * limit:
        return sizes, f"needs some {bytes_text(sizes.total)}"
    return sizes, ""


def _price(sizes: Sizes, seconds: float, job: PlannedJob) -> float:
    """The expected seconds of a step, for the choice of plans to pretend."""
    return seconds * sizes.work + job.cluster.collective_seconds(sizes.moved, 2, job.hosts > 1)


def _alone(job: PlannedJob, build: Callable[[], nn.Module], example: Any) -> tuple[Sizes, float]:
    """The sizes and the seconds of a model on one rank."""
    facts: dict[str, Any] = {}

    def program() -> None:
        model = build()
        blocks = blocks_of(model)
        facts["block"] = max(sum(p.nbytes for p in block.parameters()) for block in blocks)
        facts["blocks"] = len(blocks)
        linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
        whole = sum(p.nbytes for p in model.parameters())
        facts["in_linear"] = min(1.0, sum(weight.nbytes for weight in linear) / max(whole, 1))
        facts["whole"] = whole
        _train(model, example)

    report = job.run(program)
    by = report.worst.peak.by_use()
    rows = min((t.shape[0] for t in tensors_in(example) if t.dim()), default=1)
    rest = by["activations"] + by["temporary"]
    whole = facts.pop("whole")
    sizes = Sizes(whole, 2 * whole, rest, rows=rows, **facts)
    return sizes, report.worst.time.computing


def _step(plan: ModelPlan, build: Callable[[], nn.Module], example: Any) -> None:
    """Two steps with a plan, on this rank's rows."""
    example = plan.rows(example)
    _train(plan.apply(build(), example), example)


def _train(model: nn.Module, example: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        backward(model, example)
        optimizer.step()
        optimizer.zero_grad()


def backward(model: nn.Module, example: Any) -> Tensor:
    """Forward and backward of a model that a plan has changed; return the loss of these rows."""
    args, kwargs = ((), example) if isinstance(example, Mapping) else (example, {})
    if isinstance(model, Stages):
        return model.step(*args, **kwargs, loss=_loss, weight="rows")
    loss = _loss(model(*args, **kwargs))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _loss(result: Any) -> Tensor:
    """The loss that a model gives, or the mean of the squares of the first tensor."""
    loss: Tensor | None = getattr(result, "loss", None)
    return tensors_in(result)[0].float().square().mean() if loss is None else loss


def _rows(value: Any, count: int, place: int) -> Any:
    if isinstance(value, Tensor) and value.dim():
        return value.tensor_split(count)[place]
    if isinstance(value, Mapping):
        return {name: _rows(each, count, place) for name, each in value.items()}
    return tuple(_rows(each, count, place) for each in value) if isinstance(value, tuple) else value
