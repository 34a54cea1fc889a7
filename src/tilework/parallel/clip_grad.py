"""Clipping of gradients by their norm, whatever their layouts."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup, ReduceOp
from tilework.comm.groups import new_group
from tilework.comm.operations.internal import all_gather_object, all_reduce
from tilework.comm.world import current_world, get_default_group, get_rank, get_world_size
from tilework.dtensor import DTensor
from tilework.dtensor.internal import is_torch_dtensor, layout_of
from tilework.mesh import DeviceMesh


class PartOfParameters(list[Tensor]):
    """Some of a model's parameters, while other ranks have others: the stages of a pipeline.

    ``elsewhere`` has the identities of those that another rank of the group counts.
    """

    def __init__(
        self, parameters: Iterable[Tensor], elsewhere: Container[int], group: ProcessGroup
    ) -> None:
        super().__init__(parameters)
        self.elsewhere, self.group = elsewhere, group


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients down together if their norm is above ``max_norm``; returns the norm.

    torch's function of this name serves where all gradients are plain, or DTensors on one mesh.
    Here plain tensors, DTensors, and torch's DTensors may be mixed, also on meshes of different
    ranks; and ``parameters()`` of a pipeline's stages stand for the parameters of all stages.
    Collective over the ranks of all meshes of DTensors, once for each mesh, and over the stages;
    blocks.

    Args:
        parameters: The parameters; those without a gradient are left out. The same on all ranks.
        max_norm: The largest norm that stays unchanged.
        norm_type: The p of the p-norm; ``inf`` for the largest element.
        error_if_nonfinite: Raise if the norm is infinite or not a number.

    Returns:
        The norm before clipping: a plain tensor, the same on all ranks of the meshes. A rank that
        has no gradients and is outside of all meshes gets 0.

    Raises:
        RuntimeError: The norm is infinite or not a number, with ``error_if_nonfinite``; or this
            rank cannot know a part of the norm: gradients on a mesh that it is outside of.
        ValueError: Ranks pass parameters on different meshes.

    Example:
        >>> import torch
        >>> from tilework.parallel import clip_grad_norm_
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], max_norm=1.0).item()
        5.0
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    norm_type = float(norm_type)
    part = parameters if isinstance(parameters, PartOfParameters) else None
    counted = None if part is None else [x for x in part if id(x) not in part.elsewhere]
    by_mesh = _grads_by_mesh(parameters if counted is None else counted)
    norms = _norms_here(by_mesh, norm_type)
    if not norms and part is None:
        return torch.tensor(0.0)
    every = torch.cat(_of_one_dtype(norms)) if norms else torch.zeros(1)
    total = cast(Tensor, torch.linalg.vector_norm(every, norm_type))
    if part is not None:
        total, by_mesh = _norm_of_parts(total, norm_type, part.group), _grads_by_mesh(part)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite ({total.item()}), so "
            f"they are not clipped: skip this step, or pass error_if_nonfinite=False"
        )
    _scale(by_mesh, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def _norm_of_parts(mine: Tensor, norm_type: float, group: ProcessGroup) -> Tensor:
    """The norm over the parts of all ranks. Collective over the group; blocks."""
    is_max = norm_type == float("inf")
    power = (mine if is_max else mine**norm_type).double().clone()
    all_reduce(power, ReduceOp.MAX if is_max else ReduceOp.SUM, group)
    return (power if is_max else power ** (1 / norm_type)).to(mine.dtype)


def _norms_here(by_mesh: Mapping[Any, list[Tensor]], norm_type: float) -> list[Tensor]:
    """The norms for each mesh of gradients, and for plain ones. Collective over the meshes."""
    meshes = [mesh for mesh in by_mesh if mesh is not None]
    ranks = sorted({rank for mesh in meshes for rank in _ranks_of(mesh)})
    if any(getattr(mesh, "made_by_all", False) and mesh.size() < len(ranks) for mesh in meshes):
        return _norms_of_ranks(by_mesh, ranks, norm_type)
    _check_here(by_mesh)
    here = [mesh for mesh, grads in by_mesh.items() if grads and _is_here(mesh)]
    return [_norms(by_mesh[mesh], norm_type) for mesh in here]


def _grads_by_mesh(parameters: Tensor | Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """The gradients on each mesh of parameters, which may have none; None: plain gradients."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        grad = parameter.grad
        of_mesh = by_mesh.setdefault(_mesh_of(parameter if grad is None else grad), [])
        if grad is not None:
            of_mesh.append(grad)
    return by_mesh


def _scale(by_mesh: Mapping[Any, list[Tensor]], factor: Tensor) -> None:
    for mesh, grads in by_mesh.items():
        locals_: dict[torch.device, list[Tensor]] = {}
        for grad in grads if _is_here(mesh) else ():
            local = grad if mesh is None else cast(Any, grad).to_local()
            locals_.setdefault(local.device, []).append(local)
        for device, mine in locals_.items():
            torch._foreach_mul_(mine, factor.to(device))


def _norms(grads: list[Tensor], norm_type: float) -> Tensor:
    """The norms of gradients on one mesh, or of plain gradients, as a plain vector. Collective."""
    each: Sequence[Tensor] = torch._foreach_norm(grads, norm_type)
    if all(isinstance(norm, DTensor) and layout_of(norm).is_replicated for norm in each):
        each = [cast(DTensor, norm).to_local() for norm in each]
    norms = torch.stack(_of_one_dtype(each))
    full: Tensor = cast(Any, norms).full_tensor() if _is_distributed(norms) else norms
    return full


def _of_one_dtype(tensors: Sequence[Tensor]) -> list[Tensor]:
    dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return [tensor.to(tensors[0].device, dtype) for tensor in tensors]


def _norms_of_ranks(
    by_mesh: Mapping[Any, list[Tensor]], ranks: Sequence[int], norm_type: float
) -> list[Tensor]:
    """The norms for each mesh with gradients, and for plain ones. Collective over ``ranks``."""
    if get_rank() not in ranks:
        raise RuntimeError(_outside(next(mesh for mesh in by_mesh if mesh is not None)))
    own: list[tuple[Any, Tensor | None]] = []
    for mesh, grads in by_mesh.items():
        norm = _norms(grads, norm_type) if grads and _is_here(mesh) else None
        own.append(
            (None if mesh is None else _ranks_of(mesh), None if norm is None else norm.cpu())
        )
    group = current_world().state(GroupsOfRanks).of(ranks)
    everyone: list[Any] = [None] * len(ranks)
    all_gather_object(everyone, own, group=group)
    lists = [[of for of, _ in each] for each in everyone]
    other = next((number for number, each in enumerate(lists) if each != lists[0]), None)
    if other is not None:
        raise ValueError(
            f"clip_grad_norm_ takes the same parameters on all ranks: on rank {ranks[0]} they lie "
            f"on the ranks {lists[0]}, on rank {ranks[other]} on {lists[other]} (None: plain). "
            f"Pass only parameters that all ranks have; combine norms of pipeline stages by "
            f"all_reduce"
        )
    place = dict(zip(ranks, everyone, strict=True))
    found = [
        place[ranks[0] if of is None else min(of)][number][1] for number, of in enumerate(lists[0])
    ]
    return [norm for norm in found if norm is not None]


@dataclass(eq=False)
class GroupsOfRanks:
    """The groups in which ranks of several meshes, or stages, meet; by the groups' global ranks."""

    #: The keys are sorted global ranks. The default group, which has all ranks, is never in here.
    known: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def of(self, ranks: Sequence[int]) -> Any:
        """The group of these global ranks, made at the first call: collective over them; blocks."""
        if len(ranks) == get_world_size():
            return get_default_group()
        key = tuple(ranks)
        if key not in self.known:
            self.known[key] = new_group(ranks, use_local_synchronization=True)
        return self.known[key]

    def forget_groups(self) -> None:
        self.known.clear()


def _check_here(by_mesh: Mapping[Any, list[Tensor]]) -> None:
    """Raise if this rank has gradients, but is outside of a mesh whose gradients count as well."""
    outside = [mesh for mesh in by_mesh if not _is_here(mesh)]
    if outside and any(grads and _is_here(mesh) for mesh, grads in by_mesh.items()):
        raise RuntimeError(_outside(outside[0]))


def _outside(mesh: Any) -> str:
    return (
        f"clip_grad_norm_ has gradients on {mesh}, and this rank is outside of the mesh: "
        f"it does not know the norm of these gradients, and cannot scale others by the total. "
        f"Clip the parameters of that mesh separately, on the ranks of the mesh"
    )


def _mesh_of(tensor: Tensor) -> Any:
    return cast(Any, tensor).device_mesh if _is_distributed(tensor) else None


def _is_here(mesh: Any) -> bool:
    """True if this rank is in the mesh, or if ``mesh`` is None, which stands for plain tensors."""
    return mesh is None or mesh.get_coordinate() is not None


def _ranks_of(mesh: Any) -> tuple[int, ...]:
    if isinstance(mesh, DeviceMesh):
        return mesh.spec.ranks
    return tuple(mesh.mesh.flatten().tolist())


def _is_distributed(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) or is_torch_dtensor(tensor)
