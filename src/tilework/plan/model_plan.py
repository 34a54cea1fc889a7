"""Plans for a model: the ways that share it, as a value that can be applied and edited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor, nn

from tilework.comm.world import get_rank, get_world_size
from tilework.dtensor.internal import tensors_in
from tilework.mesh import init_device_mesh
from tilework.parallel import Stages
from tilework.plan.report import PlanReport
from tilework.plan.ways import AXES, WAYS, Setting


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
        for name in self.degrees:
            for other, why in WAYS[name].apart_from.items():
                if other in self.degrees:
                    raise ValueError(f"{name} and {other} are not for one plan: {why}")
        if not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise ValueError(f"microbatches is a whole number from 1, got {self.microbatches!r}")

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
        return rows_of(batch, count, place)

    def __str__(self) -> str:
        return " + ".join(
            name if degree == 1 and name not in AXES else f"{name} {degree}"
            for name, degree in self.degrees.items()
        ) + (f" ({self.microbatches} microbatches)" if "pp" in self.degrees else "")


def backward(model: nn.Module, example: Any) -> Tensor:
    """Forward and backward of a model that a plan has changed; return the loss of these rows."""
    args, kwargs = ((), example) if isinstance(example, Mapping) else (example, {})
    if isinstance(model, Stages):
        return model.step(*args, **kwargs, loss=_loss, weight="rows")
    loss = _loss(model(*args, **kwargs))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _loss(result: Any) -> Tensor:
    """The loss that a model gives, or the mean of the squares of the first tensor."""
    loss: Tensor | None = getattr(result, "loss", None)
    return tensors_in(result)[0].float().square().mean() if loss is None else loss


def rows_of(value: Any, count: int, place: int) -> Any:
    """A part of the rows of all tensors in a batch."""
    if isinstance(value, Tensor) and value.dim():
        return value.tensor_split(count)[place]
    if isinstance(value, Mapping):
        return {name: rows_of(each, count, place) for name, each in value.items()}
    return (
        tuple(rows_of(each, count, place) for each in value) if isinstance(value, tuple) else value
    )
