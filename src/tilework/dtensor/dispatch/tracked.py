"""Handlers that make DTensors by themselves, with the provenance of what they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilework.comm import provenance_digest
from tilework.dtensor.dispatch.checked_writes import check_writable
from tilework.dtensor.dispatch.results import came_from
from tilework.dtensor.propagation.pytree import Args, Kwargs, tensors_in
from tilework.dtensor.provenance.digests import digest_of, note_write, seeds_in, stable_digest
from tilework.dtensor.provenance.meaning import moving
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views.places import count_write
from tilework.mesh import DeviceMesh
from tilework.tiled import Handler

#: Random fills, which leave nothing of the values before.
_OVERWRITE = frozenset(
    f"{name}_"
    for name in (
        *("uniform", "normal", "log_normal", "exponential", "cauchy", "geometric", "random"),
        *("bernoulli", "constant", "kaiming_uniform"),
    )
)
#: In place, but they only change dims, or the place in the graph.
_WRITES_NOTHING = frozenset(
    f"{name}_"
    for name in (
        *("transpose", "t", "squeeze", "unsqueeze", "as_strided", "resize", "resize_as"),
        *("detach", "requires_grad", "set"),
    )
)


def tracked(name: str, handler: Handler) -> Handler:
    """A handler whose collectives and results carry the digest of the operator and the operands.

    Args:
        name: torch's name of the operator; with a final "_" it writes to the first argument.
        handler: Runs it.
    """
    own = stable_digest(name)
    writes = name.endswith("_") and not name.endswith("__")  # as __float__ does
    first = int(name in _OVERWRITE)

    def run(func: Any, args: Args, kwargs: Kwargs) -> Any:
        if writes and name not in _WRITES_NOTHING and args:
            check_writable(name[:-1], args[0], args[1:])
            if args[0].__class__ is DTensor:
                count_write(args[0])
        operands = tensors_in((args, [*kwargs.values()]))
        by_mesh = _digests_by_mesh(own, operands)
        seeds = [own] if by_mesh else seeds_in(kwargs, seeds_in(args[first:], [own]))
        with moving(hash(tuple(seeds)), name):
            result = handler(func, args, kwargs)
            digest = provenance_digest.digest()  # with the keys of random numbers that it drew
        if writes:
            for number, tensor in enumerate(tensors_in(args[0] if args else ())):
                if isinstance(tensor, DTensor):
                    if by_mesh:
                        digest = by_mesh.get(tensor.device_mesh, digest)
                    note_write(tensor, hash((digest, number)))
            return result
        if not by_mesh:
            return came_from(result, operands, digest)
        for number, tensor in enumerate(tensors_in(result)):
            if isinstance(tensor, DTensor):
                came_from(tensor, operands, hash((by_mesh.get(tensor.device_mesh, digest), number)))
        return result

    return run


def _digests_by_mesh(own: int, operands: Sequence[Tensor]) -> dict[DeviceMesh, int]:
    """The digest of the operands on each mesh; empty if all operands are on one mesh.

    Digests must agree on the ranks of a mesh. These ranks may have other operands on other meshes,
    as each row of data parallel ranks has a mesh of its own.
    """
    distributed = [tensor for tensor in operands if isinstance(tensor, DTensor)]
    if not distributed:
        return {}
    mesh = distributed[0].device_mesh
    if all(tensor.device_mesh is mesh for tensor in distributed):
        return {}
    seeds: dict[DeviceMesh, list[int]] = {}
    for tensor in distributed:
        seeds.setdefault(tensor.device_mesh, [own]).append(digest_of(tensor))
    return {each: hash(tuple(its)) for each, its in seeds.items()} if len(seeds) > 1 else {}
