"""Handlers that make DTensors by themselves, with the provenance of what they make."""

from __future__ import annotations

from typing import Any

from tilework.comm import provenance
from tilework.dtensor.dispatch.results import came_from
from tilework.dtensor.propagation.pytree import Args, Kwargs, tensors_in
from tilework.dtensor.provenance.digests import note_write, seeds_in, stable_digest
from tilework.dtensor.provenance.meaning import moving
from tilework.dtensor.tensor import DTensor
from tilework.tiled.op_table import Handler

#: Random fills, which leave nothing of the values before.
_OVERWRITE = frozenset(
    f"{name}_"
    for name in (
        *("uniform", "normal", "log_normal", "exponential", "cauchy", "geometric", "random"),
        *("bernoulli", "constant", "kaiming_uniform"),
    )
)


def tracked(name: str, handler: Handler) -> Handler:
    """A handler whose collectives carry the operator and its operands, and whose results too.

    Args:
        name: torch's name of the operator; with "_" at its end it writes to its first argument.
        handler: Runs it.
    """
    own = stable_digest(name)
    writes = name.endswith("_")
    first = int(name in _OVERWRITE)

    def run(func: Any, args: Args, kwargs: Kwargs) -> Any:
        seeds = seeds_in(kwargs, seeds_in(args[first:], [own]))
        with moving(hash(tuple(seeds)), name):
            result = handler(func, args, kwargs)
            digest = provenance.digest()  # with the keys of random numbers that it drew
        if writes:
            for number, tensor in enumerate(tensors_in(args[0] if args else ())):
                if isinstance(tensor, DTensor):
                    note_write(tensor, hash((digest, number)))
            return result
        return came_from(result, tensors_in((args, [*kwargs.values()])), digest)

    return run
