"""How operators run on DTensors: once a decision for each kind of call, then the local operator.

What a call comes to is decided when it is first made: its rule is asked, the cheapest way is
chosen, and the shapes of results are found. The decision is kept by the operator, the layouts of
its tensors, and its other arguments; the next such call only looks it up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from operator import index
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd import gradients, local_graph, partial_grads
from tilework.dtensor.base import wrap_as
from tilework.dtensor.debug import explain
from tilework.dtensor.dispatch.foreach import FUSED, foreach
from tilework.dtensor.dispatch.op_names import GETTERS, HANDLERS, SPECIAL, body_of, canonical
from tilework.dtensor.propagation.op_table import RULES, Rule
from tilework.dtensor.propagation.propagation import OpSharding, ShardingPropagator
from tilework.dtensor.propagation.pytree import (
    Args,
    Kwargs,
    rebuilt,
    replaced,
    replaced_one,
    replicated,
    tensors_in,
    whole_spec,
    wrapped,
)
from tilework.dtensor.random.generator import draw_alike
from tilework.dtensor.redistribution.redistribute import redistribute_local
from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.dtensor.tensor import DTensor, wrap
from tilework.dtensor.views import copied_views
from tilework.layout import Placement, Shard
from tilework.mesh import DeviceMesh

_grad_enabled = torch.is_grad_enabled
#: How many decisions a mesh keeps before it forgets all.
_MOST_DECISIONS = 1 << 14
_NUMBERS = frozenset({int, float, bool, complex})
#: Ends a sequence in a key.
_END = object()
_SEQUENCES = frozenset({list, tuple, torch.Size})


def run(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """What a function of torch's does where some of its arguments are DTensors."""
    handler = HANDLERS.get(func)
    if handler is None:
        handler = HANDLERS[func] = _handler(func)
    return handler(func, args, kwargs)


def _handler(func: Any) -> Callable[[Any, Args, Kwargs], Any]:
    name, in_place = canonical(func)
    if name.startswith("_foreach_") or f"{name}_" in FUSED:
        return foreach
    rule = RULES.get(func) or RULES.get(getattr(func, "overloadpacket", func))
    if rule is None:
        if (special := SPECIAL.get(name + "_" if in_place else name)) is not None:
            return special
        if (getter := GETTERS.get(name)) is not None:
            return lambda func, args, kwargs: getter(args[0])
        if name.endswith((".__get__", ".__set__")):
            return _of_local
        rule = RULES.get(name)
    body = None if in_place else body_of(func)
    # With inplace= it calls one of two operators, of which each has a rule.
    if body is not None and (rule is None or "inplace" in body.__code__.co_varnames):
        return lambda func, args, kwargs: body(*args, **kwargs)
    return Operator(name, in_place, rule)


def _of_local(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A property that is the same for the local tensor."""
    return func(*[local_graph.plain(arg) for arg in args], **kwargs)


DTensor._run = staticmethod(run)


class Operator(ShardingPropagator):
    """Runs one operator on DTensors."""

    def __init__(self, name: str, in_place: bool, rule: Rule | None) -> None:
        super().__init__(name, in_place, rule)
        self._values_matter = rule is None or rule.values_matter
        self._parameters = _parameters(name, rule)

    def __call__(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if kwargs:
            if kwargs.get("out") is not None:
                return self._into(func, args, dict(kwargs))
            if len(kwargs) > 1:  # rules take tensors by their place
                order = self._parameters
                kwargs = {name: kwargs[name] for name in order if name in kwargs} | kwargs
        leaves: list[Tensor] = []
        key: list[Any] = [func]
        # What the local operator is called with, if all tensors are taken as they are.
        flat: list[Any] = []
        plain = True
        graded = _grad_enabled()
        asked = False  # whether any tensor requires a gradient
        for arg in args:
            kind = arg.__class__
            if kind is DTensor:
                if arg._view_of is not None:
                    copied_views.refresh(arg)
                local = arg._local_tensor
                if graded:
                    if arg._made_without_grad:
                        local = local_graph.local_of(arg)
                    asked = asked or local.requires_grad
                leaves.append(arg)
                key.append(id(arg._spec))  # which the decision keeps alive
                key.append(local.dtype)
                flat.append(local)
            elif kind in _NUMBERS:
                key.append(kind)
                if self._values_matter:
                    key.append(arg)
                flat.append(arg)
            else:
                plain = self._read(arg, key, leaves) and plain
                flat.append(arg)
        named = kwargs
        if kwargs:
            named = dict(kwargs)
            for name, arg in kwargs.items():
                key.append(name)
                if not self._read(arg, key, leaves):
                    if arg.__class__ is DTensor:
                        named[name] = local = local_graph.local_of(arg)
                        asked = asked or local.requires_grad
                    else:
                        plain = False
        mesh = leaves[0]._spec.mesh if plain and len(leaves) == 1 else _mesh_of(leaves)  # type: ignore[attr-defined]
        decisions: dict[Any, OpSharding] = mesh.decisions
        try:
            decision = decisions.get(tuple(key))
        except TypeError:  # an argument without a hash: a decision for this call alone
            decision, key = None, []
        if decision is None:
            decision = self.decide(func, args, kwargs, leaves, mesh)
            if key:
                if len(decisions) >= _MOST_DECISIONS:
                    decisions.clear()
                decisions[tuple(key)] = decision
        if decision.composed is not None:
            if self.in_place:
                return _composed_in_place(decision.composed, args, kwargs)
            return decision.composed(*args, **kwargs)
        if not mesh.here:
            return self._outside(decision, args, mesh)
        if plain and (decision.still or (decision.unmoved and not (graded and asked))):
            result = func(*flat, **named)
        else:
            if explain.watchers:
                gathers = decision.outputs is None and any(decision.ways)
                explain.begins(self.name, gathers)
            locals_ = self._locals(decision, leaves, mesh)
            if decision.rewrite and graded and locals_[0].requires_grad:
                # What is kept for its gradient must not be what is then written to.
                locals_[0] = locals_[0].clone()
            versions = _versions(locals_) if decision.outputs is None else ()
            if decision.run is not None:
                result = decision.run(*locals_)
            else:
                parts = iter(locals_)
                told = replaced(args, parts)
                named = {name: replaced_one(arg, parts) for name, arg in kwargs.items()}
                if self.draws and decision.outputs is None:
                    result = draw_alike(mesh, func, *told, **named)
                else:
                    result = func(*told, **named)
            if decision.outputs is None:
                self._write_back(decision, leaves, locals_, versions, result)
        if self.in_place and result is not None:
            return self._written(decision, args[0], result)
        outputs = decision.outputs
        if decision.view:
            result = wrapped(result, outputs, mesh)
            return copied_views.viewed(result, decision.copied, func, self.name, args, kwargs)
        if outputs is not None and result.__class__ is Tensor:
            if result.requires_grad and not graded:
                result = result.detach()
            return wrap_as(DTensor, result, outputs[0])
        return wrapped(result, outputs, mesh)

    def _read(self, arg: Any, key: list[Any], leaves: list[Tensor]) -> bool:
        """Write to ``key`` what the decision depends on; whether there is no tensor in it."""
        kind = arg.__class__
        if kind is DTensor:
            if arg._view_of is not None:
                copied_views.refresh(arg)
            leaves.append(arg)
            key.append(id(arg._spec))
            key.append(arg._local_tensor.dtype)
            return False
        key.append(kind)
        if kind in _NUMBERS:
            if self._values_matter:
                key.append(arg)
            return True
        if kind in _SEQUENCES:
            found = [self._read(one, key, leaves) for one in arg]
            key.append(_END)
            return all(found)
        if isinstance(arg, Tensor):
            leaves.append(arg)
            key.append(arg.shape)
            key.append(arg.dtype)
            return False
        if kind is dict:
            found = [self._read(one, key, leaves) for item in arg.items() for one in item]
            key.append(_END)
            return all(found)
        if kind is slice:  # slices have no hash, and a tensor in one tells a number
            ends = (arg.start, arg.stop, arg.step)
            arg = tuple([one if one is None else index(one) for one in ends])
        key.append(arg)
        return True

    def _locals(
        self, decision: OpSharding, leaves: Sequence[Tensor], mesh: DeviceMesh
    ) -> list[Tensor]:
        """This rank's part of each tensor, as the decision wants it."""
        graded = _grad_enabled()
        locals_ = []
        for leaf, way in zip(leaves, decision.ways, strict=True):
            if leaf.__class__ is not DTensor:
                leaf = replicated(leaf, mesh)
            assert isinstance(leaf, DTensor)
            if way is not None:
                locals_.append(self._moved(leaf, *way))
                continue
            local = leaf._local_tensor
            if graded and leaf._made_without_grad:
                local = local_graph.local_of(leaf)
            locals_.append(local)
        return locals_

    def _moved(self, leaf: DTensor, target: DTensorSpec, axes: Ints) -> Tensor:
        """The part of a tensor in another layout, or with a gradient in terms."""
        source = leaf._spec
        if target is source or target == source:
            made = partial_grads.alias(leaf, axes)
        elif axes:
            made = partial_grads.moved(leaf, target, axes)
        else:
            made = redistribute_local(local_graph.local_of(leaf), source, target)
        if explain.watchers:
            explain.tag(made)
        return made

    # -- results -----------------------------------------------------------------------------

    def _write_back(
        self,
        decision: OpSharding,
        leaves: Sequence[Tensor],
        locals_: Sequence[Tensor],
        versions: Sequence[int],
        result: Any,
    ) -> None:
        """Give tensors what the operator wrote to whole copies of them, but what it returns."""
        now = _versions(locals_)
        for number in range(1 if self.in_place and result is not None else 0, len(leaves)):
            way, leaf = decision.ways[number], leaves[number]
            # Running statistics are written to without being counted as written to.
            quietly = "batch_norm" in self.name and not leaf.requires_grad
            if way is not None and (quietly or now[number] != versions[number]):
                assert isinstance(leaf, DTensor)
                write(leaf, locals_[number], way[0], self.name)

    def _written(self, decision: OpSharding, target: Any, result: Tensor) -> Any:
        """The first argument, which the operator has written to or which gets the result."""
        if not isinstance(target, DTensor):
            raise TypeError(
                f"{self.name}_ would write the values of DTensors to a plain tensor, which has no "
                f"layout: make them plain with full_tensor(), or the tensor a DTensor"
            )
        if decision.outputs is None and result.shape != target._spec.size:
            return gradients.become(target, _as_before(target, result))
        if decision.rewrite and result is not target._local_tensor:
            outputs = decision.outputs
            have = (
                outputs[0]
                if outputs
                else spec_of(target._spec.mesh, target._spec.replicated.placements, result.shape)
            )
            write(target, result, have, self.name)
        if target._local_tensor.requires_grad:
            local_graph.flag(target)
        if target._view_of is not None:
            copied_views.written(target)
        return target

    def _into(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """An operator with ``out=``: computed, then written."""
        out = kwargs.pop("out")
        result = func(*args, **kwargs)
        if isinstance(out, Tensor):
            into(out, result, self.name)
            return out
        for one, value in zip(out, result, strict=True):
            into(one, value, self.name)
        if self.name.endswith("_copy"):  # unbind_copy and split_copy, which return nothing
            return None
        kind = getattr(torch.return_types, f"{type(result).__name__}_out", type(out))
        return kind(out)

    def _outside(self, decision: OpSharding, args: Args, mesh: DeviceMesh) -> Any:
        """What a rank outside the mesh gets: nothing, in the right shape."""
        if self.in_place:
            return args[0]
        if decision.shown is None:
            raise RuntimeError(
                f"the result of {self.name} depends on elements, and this rank is outside the mesh "
                f"that has them: ask mesh.get_coordinate() first, which is None here"
            )
        parts = [torch.empty(0, dtype=one.dtype) for one in tensors_in(decision.shown)]
        outputs = decision.outputs or [whole_spec(one, mesh) for one in tensors_in(decision.shown)]
        return rebuilt(
            decision.shown, iter([wrap(p, s) for p, s in zip(parts, outputs, strict=True)])
        )


def _parameters(name: str, rule: Rule | None) -> tuple[str, ...]:
    """Names of an operator's arguments in their order, as its rule and torch have them."""
    if rule is None:
        return ()
    packet: Any = getattr(torch.ops.aten, name, None)
    schemas = [getattr(packet, one)._schema for one in packet.overloads()] if packet else []
    told = [argument.name for schema in schemas for argument in schema.arguments]
    return tuple(dict.fromkeys([*signature(rule.answer).parameters, "input", *told]))


def _composed_in_place(composed: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Compute anew what an operator writes to its first argument, and write it."""
    target = args[0]
    # What is kept for its gradient must not be what is then written to.
    kept = target.clone() if target.requires_grad and _grad_enabled() else target
    result = composed(kept, *args[1:], **kwargs)
    return target if result is target else target.copy_(result)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was written to."""
    return [0 if one.is_inference() else one._version for one in tensors]


def _as_before(target: DTensor, whole: Tensor) -> DTensor:
    """A whole result of another shape as a DTensor, cut as ``target`` is if that can be."""
    made = replicated(whole, target._spec.mesh)
    if made.ndim != target.ndim:
        return made
    return made.redistribute(placements=[_even(one) for one in target.placements])


def _even(placement: Placement) -> Placement:
    return Shard(placement.dim) if isinstance(placement, Shard) else placement


def write(target: DTensor, value: Tensor, have: DTensorSpec, name: str) -> None:
    """Make ``value``, which lies as ``have``, what ``target`` holds, in its layout."""
    if have.shape != target._spec.shape:
        raise RuntimeError(
            f"{name} would write a result of shape {list(have.shape)} to a tensor of shape "
            f"{list(target.shape)}"
        )
    target._local_tensor.copy_(redistribute_local(value, have, target._spec))


def into(out: Any, value: Any, name: str) -> None:
    """Write a result to what was given as ``out=``."""
    if not isinstance(out, DTensor) or not isinstance(value, DTensor):
        raise TypeError(
            f"{name} with out= needs a DTensor there if its inputs are DTensors, got "
            f"{type(out).__name__}"
        )
    if not torch.can_cast(value.dtype, out.dtype):
        raise RuntimeError(
            f"result type {value.dtype} of {name} can't be cast to the desired output type "
            f"{out.dtype}"
        )
    if out.requires_grad or (value.requires_grad and torch.is_grad_enabled()):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, "
            f"but one of the arguments requires grad"
        )
    if out.shape != value.shape:
        replacement = (
            value.redistribute(placements=out.placements) if out.ndim == value.ndim else value
        )
        gradients.set_data(out, replacement.to(out.dtype))
        return
    write(out, value._local_tensor, value._spec, name)


def _mesh_of(leaves: Sequence[Tensor]) -> DeviceMesh:
    mesh: DeviceMesh | None = None
    for leaf in leaves:
        if leaf.__class__ is DTensor:
            its = leaf._spec.mesh
            if mesh is None:
                mesh = its
            elif its is not mesh and its != mesh:
                raise ValueError(
                    f"DTensors on different meshes meet in one operator: {mesh} and {its}; "
                    f"redistribute one of them, or make it plain with full_tensor()"
                )
    assert mesh is not None
    return mesh
