"""Plans for a model, a number of ranks and their memory: found by formulas, then pretended."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from math import prod
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tilework.dtensor.internal import tensors_in
from tilework.models import check_is_module
from tilework.parallel import derive_plan
from tilework.plan.cluster import Cluster
from tilework.plan.job import PlannedJob, pretend
from tilework.plan.model_plan import ModelPlan, backward, rows_of
from tilework.plan.report import PlanReport
from tilework.plan.timing import begin_step
from tilework.plan.ways import AXES, WAYS, Sizes, blocks_of, experts_of
from tilework.show import Page, Shown, TextTable, bytes_text

#: The most plans that are pretended, and that are given.
_MOST_TRIED, _MOST = 8, 5
#: The most passes through blocks that are pretended, of a plan and of all: minutes of a CPU.
_MOST_PASSES, _MOST_OF_ALL = 400, 1000
#: The most plans that are named for a reason.
_MOST_NAMED = 3
_SLOWER = "others promise to be faster"
_LONG = "takes long to pretend ({} blocks, {} microbatches): pretend it alone"
#: The part by which a formula may be wrong before a plan is left out for memory.
_SLACK = 1.3


@dataclass(frozen=True)
class Suggestions(Shown, Sequence[ModelPlan]):
    """Plans, the fastest first, and why others were left out. Prints as tables."""

    plans: tuple[ModelPlan, ...]
    #: By plan, the reason.
    left_out: tuple[tuple[str, str], ...]
    #: If memory suffices for no plan, the plan that lacks the least; the report names changes.
    nearest: ModelPlan | None = None

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, place: Any) -> Any:
        return self.plans[place]

    def __rich__(self) -> Page:
        shown = self.plans or ((self.nearest,) if self.nearest else ())
        reports = [(plan, plan.report) for plan in shown if plan.report is not None]
        parts: list[str | TextTable] = []
        if not self.plans:
            parts = ["no plan is good enough", *(["the nearest:"] if reports else [])]
        if reports:
            rows = [_row(plan, report) for plan, report in reports]
            table = TextTable(("plan", "peak", "moves", "a step"), rows, {1, 2})
            parts += [table, *_notes(report for _, report in reports)]
        if self.left_out:
            parts += ["", "left out:", TextTable(("plan", "why"), _grouped(self.left_out))]
        return Page(*parts)


def _row(plan: ModelPlan, report: PlanReport) -> tuple[str, ...]:
    slowest = max(report.kinds, key=lambda each: each.time.seconds)
    peak = bytes_text(report.worst.peak.bytes)
    return str(plan), peak, bytes_text(slowest.nbytes), str(slowest.time)


def _notes(reports: Iterable[PlanReport]) -> list[str]:
    """The facts behind the numbers, and changes with which a job fits."""
    found: dict[str, None] = {}
    for report in reports:
        found |= dict.fromkeys([*report.notes, *report.lacks])
    return list(found)


def _grouped(left_out: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """A row for each kind of reason: plans, and the reason of the first."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for plan, why in left_out:
        groups.setdefault(re.split(r"\d", why)[0], []).append((plan, why))
    rows = []
    for each in groups.values():
        names = ", ".join(plan for plan, _ in each[:_MOST_NAMED])
        more = f" and {len(each) - _MOST_NAMED} more" if len(each) > _MOST_NAMED else ""
        rows.append((names + more, each[0][1]))
    return rows


def suggest(
    build: Callable[[], nn.Module],
    example: tuple[Any, ...] | Mapping[str, Any],
    ranks: int,
    hosts: int = 1,
    memory: str | int | None = None,
    cluster: Cluster | None = None,
) -> Suggestions:
    """Plans for a model on a number of ranks, proven by pretending them. Blocks for some seconds.

    All combinations of the ways (``ddp``, ``fsdp``, ``tp``, ``cp``, ``ep``, ``pp``, recomputing)
    are judged by formulas; the best are pretended with a step of AdamW, until five are good, and at
    most eight.

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
    if not isinstance(example, tuple | Mapping):
        raise TypeError(
            f"example is a tuple of the arguments of a forward, or a dict by name, got "
            f"{type(example).__name__}"
        )
    with pretend(1, 1, None, cluster) as alone:
        sizes, seconds = _alone(alone, build, example, ranks)
    with pretend(ranks, hosts, memory, cluster) as job:
        judged, left_out = _judged(sizes, seconds, job)
        found: list[tuple[ModelPlan, PlanReport]] = []
        near: list[tuple[ModelPlan, PlanReport]] = []
        for plan in _to_pretend(judged, sizes.blocks, left_out):
            if len(found) == _MOST:
                left_out.append((str(plan), _SLOWER))
                continue
            try:
                with redirect_stdout(StringIO()):  # what models print
                    report = job.run(step, plan, build, example, alike=True)
            except Exception as error:  # the model does not take this way
                text = str(error).partition("\n")[0]
                left_out.append((str(plan), f"raises {type(error).__name__}: {text}"))
                continue
            (found if report.is_good else near).append((plan, report))
    left_out += [(str(plan), _fault(report)) for plan, report in near]
    found.sort(key=lambda each: max(rank.time.seconds for rank in each[1].kinds))
    near.sort(key=lambda each: each[1].worst.peak.bytes)
    plans, others = ([replace(p, report=r) for p, r in some] for some in (found, near))
    return Suggestions(tuple(plans), tuple(left_out), others[0] if others and not plans else None)


def _to_pretend(
    judged: Sequence[ModelPlan], blocks: int, left_out: list[tuple[str, str]]
) -> list[ModelPlan]:
    """The plans that are worth the time of pretending them; the others get a reason."""
    passes = [blocks * plan.microbatches for plan in judged]  # of all stages together
    limit, left = max(_MOST_PASSES, min(passes, default=0)), _MOST_OF_ALL
    chosen: list[ModelPlan] = []
    for plan, count in zip(judged, passes, strict=True):
        if count > limit:
            left_out.append((str(plan), _LONG.format(blocks, plan.microbatches)))
        elif (chosen and count > left) or len(chosen) == _MOST_TRIED:
            left_out.append((str(plan), _SLOWER))
        else:
            chosen.append(plan)
            left -= count
    return chosen


def _fault(report: PlanReport) -> str:
    if not report.fits:
        return f"needs {bytes_text(report.worst.peak.bytes)}"
    if report.mismatches:
        return str(report.mismatches[0]).partition("\n")[0]
    others = ((each.site, each.report) for each in report.branches if each.report is not None)
    site, other = next((site, other) for site, other in others if not other.is_good)
    return f"{_fault(other)} (on the other way at {site})"


def _combinations(ranks: int, rows: int) -> Iterator[tuple[ModelPlan, int]]:
    """All plans, the ranks divided among a way for the batch and ways for the model; the rows of a
    rank.
    """
    for degrees in _shares(ranks, ("pp", "ep", "cp", "tp")):
        rest = ranks // prod(degrees.values())
        each = rows // (rest * degrees.get("ep", 1))
        for batch in ("fsdp",) if "ep" in degrees else ("ddp", "fsdp") if rest > 1 else ("",):
            known = degrees | ({batch: rest} if batch else {})
            shares: dict[str, int] = {name: known[name] for name in AXES if name in known}
            apart = {other for name in shares for other in WAYS[name].apart_from}
            if apart.isdisjoint(shares):
                parts = max(1, min(each, 2 * shares["pp"])) if "pp" in shares else 1
                yield ModelPlan(shares or {"ddp": 1}, parts), each
                yield ModelPlan(shares | {"recompute": 1}, parts), each


def _shares(ranks: int, names: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """All ways to give some of the ranks to some of the names, by whole factors above 1."""
    if not names:
        yield {}
        return
    for degree in range(1, ranks + 1):
        if ranks % degree == 0:
            for more in _shares(ranks // degree, names[1:]):
                yield {names[0]: degree, **more} if degree > 1 else more


def _judged(
    sizes: Sizes, seconds: float, job: PlannedJob
) -> tuple[list[ModelPlan], list[tuple[str, str]]]:
    """The plans that formulas allow, the fastest first, and the others with reasons."""
    judged: list[tuple[float, int, str, ModelPlan]] = []
    large: list[tuple[float, int, str, ModelPlan]] = []
    left_out = []
    for plan, rows in _combinations(job.ranks, sizes.rows):
        of_rank = replace(sizes, rows_each=rows, microbatches=plan.microbatches)
        shrunk, why = _shrunk(of_rank, plan, job)
        if why:
            left_out.append((str(plan), why))
        elif shrunk.total > _SLACK * (job.cluster.memory or math.inf):
            large.append((shrunk.total, len(plan.degrees), str(plan), plan))
        else:
            judged.append((_price(shrunk, seconds, job), len(plan.degrees), str(plan), plan))
    large.sort()
    if not judged:  # then the nearest is pretended, for what would help
        judged, large = large[:1], large[1:]
    left_out += [(name, f"needs some {bytes_text(total)}") for total, _, name, _ in large]
    return [plan for *_, plan in sorted(judged)], left_out


def _shrunk(sizes: Sizes, plan: ModelPlan, job: PlannedJob) -> tuple[Sizes, str]:
    """The sizes with a plan, and the reason why the plan cannot be; "" if it can."""
    degrees = plan.degrees
    if degrees.get("tp", 1) > -(-job.ranks // job.hosts):
        return sizes, "tp would cross hosts, at each layer"
    for name, way in WAYS.items():
        if name in degrees:
            why = way.why_not(sizes, degrees[name])
            if why:
                return sizes, why
            sizes = way.shrink(sizes, degrees[name])
    return sizes, ""


def _price(sizes: Sizes, seconds: float, job: PlannedJob) -> float:
    """The expected seconds of a step, for the choice of plans to pretend."""
    return seconds * sizes.work + job.cluster.collective_seconds(sizes.moved, 2, job.hosts > 1)


def _alone(
    job: PlannedJob, build: Callable[[], nn.Module], example: Any, parts: int
) -> tuple[Sizes, float]:
    """The sizes and the seconds of a model on one rank, from a part of the rows."""
    facts: dict[str, Any] = {}
    rows = min((t.shape[0] for t in tensors_in(example) if t.dim()), default=1)
    parts = max(1, min(parts, rows))
    example = rows_of(example, parts, 0)

    def program() -> None:
        model = build()
        check_is_module(model, "suggest")
        blocks = blocks_of(model)
        facts["block"] = max(sum(p.nbytes for p in block.parameters()) for block in blocks)
        facts["blocks"] = len(blocks)
        facts["parameters"] = whole = sum(p.nbytes for p in model.parameters())
        cut = [model.get_submodule(name) for name in derive_plan(model, None, example)]
        experts = experts_of(model)
        facts["experts"] = min((len(next(each.parameters())) for each in experts), default=0)
        for name, part in (("in_linear", cut), ("in_experts", experts)):
            inside = sum(p.nbytes for module in part for p in module.parameters())
            facts[name] = min(1.0, inside / max(whole, 1))
        with _AttentionLengths() as attention:
            _train(model, example)
        along = {t.shape[1] for t in tensors_in(example) if t.dim() > 1}
        facts["sequence"] = max(attention.lengths & along, default=0)

    report = job.run(program)
    by = report.worst.peak.by_use()
    rest = parts * (by["activations"] + by["temporary"])
    sizes = Sizes(states=2 * facts["parameters"], activations=rest, rows=rows, **facts)
    return sizes, parts * report.worst.time.computing


class _AttentionLengths(TorchFunctionMode):
    """The lengths of the sequences that attention looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.lengths.add((args or tuple((kwargs or {}).values()))[0].shape[-2])
        return func(*args, **(kwargs or {}))


def step(plan: ModelPlan, build: Callable[[], nn.Module], example: Any) -> None:
    """Two steps with a plan, on this rank's rows."""
    example = plan.rows(example)
    _train(plan.apply(build(), example), example)


def _train(model: nn.Module, example: Any) -> None:
    """A step of AdamW, whose states are there. Only this step counts for time and memory."""
    optimizer = torch.optim.AdamW([{"params": model.parameters()}])  # a stage may have none
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    begin_step()
    backward(model, example)
    optimizer.step()
