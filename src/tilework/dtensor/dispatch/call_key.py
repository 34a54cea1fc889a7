"""The key of a call: everything that the sharding depends on, in a list of hashable values."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from operator import index
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.propagation.pytree import Kwargs
from tilework.dtensor.provenance.content import content_digest
from tilework.dtensor.provenance.digests import digest_of, number_seed
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views import moved_views
from tilework.mesh import DeviceMesh
from tilework.tiled import OpEntry, TiledTensor, aten_parameters

NUMBERS = frozenset({int, float, bool, complex})
_SEQUENCES = frozenset({list, tuple, torch.Size})
#: Ends a sequence in a key.
END = object()


def add_to_key(
    arg: Any, key: list[Any], tensors: list[Tensor], seeds: list[Any], values_matter: bool
) -> bool:
    """Add an argument to the key, and its tensors to ``tensors``; True if it has no tensors.

    Args:
        arg: The argument.
        key: The key so far.
        tensors: The call's tensors so far.
        seeds: Their digests, and numbers that are not in the key.
        values_matter: True if the values of numbers belong to the key, not only their types.
    """
    if isinstance(arg, Tensor):
        _add_tensor(arg, key, tensors, seeds)
        return False
    kind = arg.__class__
    key.append(kind)
    if kind in NUMBERS:
        if values_matter:
            key.append(arg if arg and kind is not complex else repr(arg))  # 0.0 equals -0.0
        else:
            seeds.append(number_seed(arg))
        return True
    if kind in _SEQUENCES or kind is dict:
        items = arg if kind is not dict else [part for item in arg.items() for part in item]
        plain = [add_to_key(item, key, tensors, seeds, values_matter) for item in items]
        key.append(END)
        return all(plain)
    if kind is slice:  # slices have no hash, and a tensor in one stands for a number
        ends = (arg.start, arg.stop, arg.step)
        arg = tuple([end if end is None else index(end) for end in ends])
    elif isinstance(arg, float | complex):  # numpy's
        arg = repr(arg)
    key.append(arg)
    return True


def _add_tensor(arg: Tensor, key: list[Any], tensors: list[Tensor], seeds: list[Any]) -> None:
    kind = arg.__class__
    if kind is DTensor:
        dtensor: Any = arg
        if dtensor._view_of is not None:
            moved_views.check_fresh(dtensor)
        tensors.append(arg)
        seeds.append(digest_of(dtensor))
        key.append(id(dtensor._spec))
        key.append(dtensor._local_tensor.dtype)
        return
    if kind is not Tensor and isinstance(arg, TiledTensor):
        raise RuntimeError(
            f"a {kind.__name__} and a DTensor meet in one operator: convert the {kind.__name__} "
            f"with to_dtensor(), or the DTensor with to_sharded()"
        )
    tensors.append(arg)
    seeds.append(content_digest(arg))
    key += (kind, arg.shape, arg.dtype)
    if arg.layout is torch.strided and not arg.is_contiguous():
        key.append(arg.stride())


def parameter_names(entry: OpEntry) -> tuple[str, ...]:
    """The names of an operator's arguments in order, as in the rules and in torch.

    The names of positional arguments come first, for every form of the call.
    """
    by_rules = [
        list(signature(rule).parameters.values())
        for rule in (entry.dtensor_rule, entry.rule)
        if rule is not None
    ]
    of_torch = ["input" if name == "self" else name for name in aten_parameters(entry.name)]
    positions = next(
        (each for each in by_rules if each and all(p.kind is not p.VAR_POSITIONAL for p in each)),
        None,
    )
    names = [name for name in of_torch if name != "dtype"]
    if positions is not None:
        names = [parameter.name for parameter in positions]
    others = [parameter.name for each in by_rules for parameter in each]
    return tuple(dict.fromkeys([*names, *others, "input", *of_torch]))


def in_order(kwargs: Kwargs, names: Sequence[str]) -> Kwargs:
    """Arguments in the order of ``names``, others last: rules count tensors by their place."""
    return {name: kwargs[name] for name in names if name in kwargs} | kwargs


def mesh_of(tensors: Sequence[Tensor]) -> DeviceMesh:
    """The mesh of a call's DTensors.

    Raises:
        ValueError: They are on different meshes.
    """
    mesh: DeviceMesh | None = None
    for tensor in tensors:
        if tensor.__class__ is DTensor:
            other = tensor._spec.mesh
            if mesh is None:
                mesh = other
            elif other is not mesh and other != mesh:
                raise ValueError(
                    f"DTensors on different meshes meet in one operator: {mesh} and {other}; make "
                    f"one of them plain with full_tensor(), and a DTensor on the other's mesh"
                )
    assert mesh is not None
    return mesh
