"""Gradients of full parameters on their way to gradients of shards, in common messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tilework.comm.provenance_digest import OF_A_UNIT, carrying
from tilework.dtensor.internal import call_counts_of, carried, digest_of
from tilework.parallel.fully_sharded.flat import Flat, Gradient, reduce
from tilework.parallel.fully_sharded.gather_nodes import GatherParameters
from tilework.parallel.fully_sharded.policies import Purpose
from tilework.parallel.fully_sharded.sharded_param import ShardedParam

Unit: TypeAlias = Any  # the classes of unit.py, which imports this module
GatheredParameters: TypeAlias = Any

#: Parameters of a unit, which were gathered in the flats, each with the full gradient.
Gradients = tuple[Unit, Sequence[Flat], Sequence[tuple[ShardedParam, Tensor | None]]]
#: Facts of a shard that decide on the gradient. Releases of torch before 2.9 lack ``grad_dtype``.
_facts = attrgetter("requires_grad", "grad_dtype" if hasattr(Tensor, "grad_dtype") else "dtype")


class Node:
    """A node of the graph, whose results are the full trained parameters of some units."""

    def __init__(self, units: Sequence[tuple[Unit, GatheredParameters]], run: Any) -> None:
        #: The forward pass that has made the node.
        self.run = run
        #: The units that compute with the results; gradients of others are not reduced.
        self.users: set[Unit] = set()
        self._of: list[tuple[Unit, Sequence[Flat], slice]] = []
        params: list[ShardedParam] = []
        fulls: list[Tensor] = []
        leaves: list[Tensor] = []
        shards: list[tuple[list[Tensor], list[Any]]] = []
        for unit, gathered in units:
            own, before = unit.shards(), len(params)
            facts = list(map(_facts, own))
            shards.append((own, facts))
            for (param, full), shard, (is_trained, _) in zip(
                gathered.fulls, own, facts, strict=True
            ):
                if is_trained:
                    params.append(param)
                    fulls.append(full)
                    leaves.append(shard)
            self._of.append((unit, gathered.flats, slice(before, len(params))))
        made = iter(GatherParameters.apply(self._reduce, params, fulls, *leaves) if params else ())
        for (_, gathered), (own, facts) in zip(units, shards, strict=True):
            results = [next(made) if is_trained else None for is_trained, _ in facts]
            gathered.made = Made(self, results, own, facts)

    def _reduce(
        self, wanted: Sequence[bool], params: Sequence[ShardedParam], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of shards; None for frozen parameters and unasked units. Collective."""
        given = list[Gradients]()
        for unit, flats, at in self._of:
            if unit in self.users and any(wanted[at]):
                pairs = zip(params[at], grads[at], strict=True)
                trained = [(param, grad) for param, grad in pairs if param.local.requires_grad]
                given.append((unit, flats, trained))
        shards = reduced(given)
        return [shards.get(id(param)) for param in params]


class Made(NamedTuple):
    """Results of a node for a unit, None for frozen parameters, and the shards at that time."""

    node: Node
    results: list[Tensor | None]
    shards: list[Tensor]
    facts: list[Any]

    def is_of(self, shards: list[Tensor]) -> bool:
        """True if the unit has the same shards now, of which the same want a gradient."""
        same = all(map(is_, shards, self.shards))
        return same and list(map(_facts, shards)) == self.facts


def reduced(given: Iterable[Gradients]) -> dict[int, Tensor | None]:
    """The gradients of this rank's shards, by id of the parameter, unless they wait. Collective."""
    kinds: dict[Any, list[tuple[Unit, Gradient]]] = {}
    for unit, flats, own in given:
        found = unit.due(own)
        for flat in flats if found else ():
            of_flat: dict[Any, list[tuple[Unit, Gradient]]] = {}
            for param in flat.params:
                if id(param) in found:
                    dtype = param.grad_dtype
                    if dtype not in of_flat:
                        of_flat[dtype] = kinds.setdefault(_kind(unit, flat, dtype), [])
                    of_flat[dtype].append((unit, Gradient(flat, param, dtype, found[id(param)])))
    shards: dict[int, Tensor | None] = {}
    for pairs in kinds.values():
        units, gradients = list(dict.fromkeys(unit for unit, _ in pairs)), [g for _, g in pairs]
        passes = call_counts_of(gradients[0].param.spec.mesh).passes
        text = units[0].text_with(len(units) - 1)
        what = Purpose(f"the gradients of {text} {OF_A_UNIT} backward")
        digest = hash(tuple([unit.digest(passes) for unit in units]))
        with carrying(carried(digest), what):
            made = reduce(gradients, units[0].reduction)
        for (_, param, _, _), shard in zip(gradients, made, strict=True):
            shards[id(param)] = shard
            call_counts_of(param.spec.mesh).note_gradient(digest_of(param.sharded))
    return shards


def _kind(unit: Unit, flat: Flat, dtype: torch.dtype | None) -> Any:
    """A key, equal for gradients that travel together."""
    how = unit.reduction
    kind = flat.reduce_dtype(dtype), flat.device, flat.shard_group, flat.replicate_group
    return *kind, how.divide_factor, how.sums, None if how.hook is None else unit
