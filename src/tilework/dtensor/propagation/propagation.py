"""Sharding propagation: from an operator's rule and its inputs' layouts to local calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilework.dtensor.base import DTensorBase
from tilework.dtensor.debug import explain
from tilework.dtensor.propagation import strides
from tilework.dtensor.propagation.call import Call, unseen
from tilework.dtensor.propagation.placed_call import DTensorArg, PlacedCall
from tilework.dtensor.propagation.plain_inputs import replicated_spec
from tilework.dtensor.propagation.pytree import tensors_in, with_tensors
from tilework.dtensor.propagation.refusals import (
    empty_parts_refusal,
    meta_refusal,
    raise_if_certain,
    refusals,
    seems_refused,
)
from tilework.dtensor.propagation.strategy import Strategy, choose
from tilework.dtensor.provenance.digests import plain_number
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.tiled.factors import DimFactors, volume
from tilework.tiled.op_rules import Decomposition, LocalCall, RuleResult
from tilework.tiled.op_table import OpEntry, aten_parameters

#: The layout that an input must have, and the axes along which its gradient is then partial.
InputLayout = tuple[DTensorSpec, Ints]


@dataclass(eq=False, slots=True)
class OpSharding:
    """The sharding of calls of one signature, as a mesh caches it."""

    #: For each tensor the layout that it must have; None if it is taken as it is.
    inputs: list[InputLayout | None]
    #: The layouts of results; None: replicated, with shapes that are known afterwards.
    outputs: list[DTensorSpec] | None
    #: Called with the local tensors; None: the operator is called, with its other arguments.
    run: Callable[..., Any] | None = None
    #: True if the operator runs on the local tensors as they are: always, or while none of them
    #: requires a gradient. Never so on a rank outside the mesh.
    as_is: bool = False
    as_is_without_grad: bool = False
    #: The layout of the only result, if nothing else is to be done with it.
    output: DTensorSpec | None = None
    #: The layouts in the cache's key, which has no more than their ids: kept alive here.
    specs: Sequence[DTensorSpec] = ()
    #: Computes it from the call's own arguments, by other operators on DTensors.
    composed: Callable[..., Any] | None = None
    #: For an operator that writes to its first argument: the result is computed anew, then written.
    rewrite: bool = False
    #: True if results share memory with the first argument in torch; and if they are copies here.
    view: bool = False
    copied: bool = False
    #: True if a result is partial in a reduction that is no sum, and no input is.
    reduces_nonlinearly: bool = False
    #: True if the result is a copy in torch, though the local operator may give a view.
    fresh: bool = False
    #: True if it is a view in torch, of which the local operator may give a copy.
    may_copy_locally: bool = False
    #: True if the result may be the input itself.
    may_be_input: bool = False
    #: True if its local results have no elements where the full ones have: torch must then keep how
    #: they were made, to make them again where their base is written to. The gradient of what it
    #: makes otherwise, ``as_strided``, has no graph for them, unlike the other ranks'.
    replays: bool = False
    #: The strides of composed results, where they are not those that the composition gives.
    strides: Sequence[Ints] | None = None
    knows_strides: bool = False
    #: True if a result is a partial sum that numbers scale, which must be finite: infinity times a
    #: part of the sum that is zero, or of the other sign, is no part of infinity.
    scales_sums: bool = False
    #: Numbers of the tensors that it writes to without torch counting it as a write.
    silent_writes: frozenset[int] = frozenset()
    #: True if it writes what may require a gradient to what can have none, integers or bools.
    ungraded: bool = False
    #: True if nothing depends on what the plain tensor that is written to held before.
    overwrites: bool = False
    #: Everything about the call but its tensors and the numbers that the cache's key lacks.
    digest: int = 0
    #: The result without memory, for ranks outside the mesh.
    meta_result: Any = None


class ShardingPropagator:
    """Finds the shardings of one operator's calls.

    Args:
        entry: Everything that is known of it.
        in_place: True if it writes to its first argument.
    """

    def __init__(self, entry: OpEntry, in_place: bool) -> None:
        self.entry, self.in_place = entry, in_place
        self.name, self.draws = entry.name, entry.draws
        #: True if kernels may look at dtypes only where there are elements.
        self._may_skip_checks = not (entry.is_elementwise or entry.is_view or entry.draws)

    def propagate(self, call: Call) -> OpSharding:
        """The sharding of calls like this one, which write to no plain tensor. Local."""
        with unseen():
            return self._propagated(call)

    def _propagated(self, call: Call) -> OpSharding:
        sharding = self._sharding(call)
        sharding.ungraded = self.in_place and _has_graded_operands(call)
        if sharding.ungraded:
            sharding.as_is = False
        sharding.view = self.entry.is_view and sharding.composed is None
        if sharding.composed is None and not self.in_place:
            self._add_strides(sharding, call)
            sharding.may_copy_locally = sharding.view and sharding.run is not None
        sharding.copied = sharding.view and _moves_elements(sharding, call.tensors)
        sharding.replays = sharding.view and not sharding.copied and _has_empty_shard(sharding)
        if sharding.replays:
            sharding.as_is = sharding.as_is_without_grad = False
        sharding.silent_writes = self._silent_writes(call)
        sharding.specs = call.specs
        if not call.mesh.here:
            sharding.as_is = sharding.as_is_without_grad = False
        sharding.reduces_nonlinearly = _reduces_nonlinearly(sharding, call)
        sharding.scales_sums = self._scales_sums(sharding, call)
        if sharding.scales_sums and self.in_place:  # else the result is thrown away
            sharding.as_is = sharding.as_is_without_grad = False
        special = sharding.view or sharding.fresh or sharding.may_be_input or self.in_place
        special = special or sharding.reduces_nonlinearly or sharding.scales_sums
        if sharding.outputs and not special:
            sharding.output = sharding.outputs[0]
        return sharding

    def _add_strides(self, sharding: OpSharding, call: Call) -> None:
        """Add the strides of results, and whether they are views, where strides decide that."""
        sharding.may_be_input = self.entry.may_be_input
        if sharding.outputs is None:
            return
        if self.entry.may_copy:
            found = self._view_or_copy(sharding, call)
        else:
            found = strides.result_strides(self.entry, call, sharding.outputs)
        if found is not None:
            sharding.outputs = [
                spec.with_strides(its) for spec, its in zip(sharding.outputs, found, strict=True)
            ]

    def _view_or_copy(self, sharding: OpSharding, call: Call) -> list[Ints] | None:
        """The strides of the result of an operator that may copy; note whether it does."""
        assert sharding.outputs is not None
        tensors = strides.without_memory(call.tensors)
        shown = strides.called(call, tensors)
        found = strides.meta_strides(shown, sharding.outputs)
        if shown is tensors[0]:
            sharding.composed, sharding.view = _first_tensor, False
            sharding.as_is = sharding.as_is_without_grad = False
        elif found is not None and strides.storage_of(shown) != strides.storage_of(tensors[0]):
            sharding.fresh, sharding.view = True, False
        return found

    def _sharding(self, call: Call) -> OpSharding:
        args = [
            DTensorArg(
                number,
                tensor._spec
                if isinstance(tensor, DTensorBase)
                else replicated_spec(tensor, call.mesh),
                tensor.dtype,
            )
            for number, tensor in enumerate(call.tensors)
        ]
        result = self._ask_rule(call, args)
        if self._may_skip_checks and _is_unchecked(result) and seems_refused(call):
            result = None  # torch raises, now or where it is run
        if isinstance(result, Decomposition):
            return OpSharding([], None, composed=result.run)
        # Meta tensors cost torch slow imports, at times: only where nothing else tells shapes.
        known = not (
            isinstance(result, LocalCall) and result.shapes is None and _lacks_sizes(result)
        )
        meta_result = None if known and call.mesh.here else _meta_result(call)
        if isinstance(result, PlacedCall):
            self._refuse_as_others(call, result.inputs, runs_on_locals=False)
            inputs: list[InputLayout | None] = [
                None if needed == arg.spec else (needed, ())
                for needed, arg in zip(result.inputs, args, strict=True)
            ]
            return OpSharding(inputs, list(result.outputs), result.run, meta_result=meta_result)
        if isinstance(result, LocalCall):
            sharding = self._local_call(call, result, args, meta_result)
            if sharding is not None:
                return sharding
        refusal = meta_refusal(call)
        if refusal is not None and not self.draws:
            raise_if_certain(refusal, call)
        if not self.entry.has_rule or refusal is None:
            dtypes = [arg.dtype for arg in args]
            explain.warn_gather(self.name, [arg.spec for arg in args], dtypes)
        return self._gathered(args, meta_result)

    def _refuse_as_others(
        self, call: Call, specs: Sequence[DTensorSpec], runs_on_locals: bool
    ) -> None:
        """Raise what ranks that have elements do, where others would go on. Local."""
        if self._may_skip_checks:
            refusal = empty_parts_refusal(call, specs, runs_on_locals)
            if refusal is not None:
                raise refusal

    def _scales_sums(self, sharding: OpSharding, call: Call) -> bool:
        """True if a result is a partial sum, and a number may be infinite or divide by zero."""
        if not any(spec.reduce_op in ("sum", "avg") for spec in sharding.outputs or ()):
            return False
        kinds = (int, float, complex) if self.name == "div" else (float, complex)
        return any(
            isinstance(plain_number(arg), kinds)
            for arg in (*call.args, *call.kwargs.values())
            if not isinstance(arg, Tensor)
        )

    def _silent_writes(self, call: Call) -> frozenset[int]:
        """The numbers of the tensors that are written to without torch counting it."""
        if not self.entry.silent_writes:
            return frozenset()
        by_name = {**dict(zip(aten_parameters(self.name), call.args, strict=False)), **call.kwargs}
        written = [by_name.get(name) for name in self.entry.silent_writes]
        return frozenset(
            number for number, x in enumerate(call.tensors) if any(x is arg for arg in written)
        )

    def _ask_rule(self, call: Call, args: Sequence[DTensorArg]) -> RuleResult:
        """The result of the rule for DTensors, else of the general one; None if both have none."""
        positional, named = with_tensors(call.args, call.kwargs, iter(args))
        named.pop("out", None)  # it is None
        for rule in (self.entry.dtensor_rule, self.entry.rule):
            if rule is None:
                continue
            try:
                with refusals(call):
                    result = rule(*positional, **named)
            except TypeError as error:
                if _raised_within(error, rule):
                    raise
                continue  # called with arguments that the rule does not know
            if result is not None:
                return result
        return None

    def _local_call(
        self, call: Call, local_call: LocalCall, args: Sequence[DTensorArg], meta_result: Any
    ) -> OpSharding | None:
        """The operator on local tensors in the cheapest layouts; None if there are none."""
        shapes = local_call.shapes
        if shapes is None and meta_result is not None:
            shapes = [tuple(tensor.shape) for tensor in tensors_in(meta_result)]
            if len(shapes) != len(local_call.map.outputs):
                return None
        if shapes is None and _lacks_sizes(local_call):
            return None
        if len(local_call.map.inputs) != len(args) or not all(
            map(_fits, local_call.map.inputs, args)
        ):
            return None
        specs = [arg.spec for arg in args]
        sizes = [arg.dtype.itemsize for arg in args]
        fixed = (0,) if self.in_place else ()
        strategy = choose(local_call.map, specs, sizes, shapes, fixed)
        rewrite = False
        if strategy is None and self.in_place:
            strategy, rewrite = choose(local_call.map, specs, sizes, shapes), True
        if strategy is None or (self.in_place and strategy.outputs[0].shape != specs[0].shape):
            return None
        self._refuse_as_others(call, strategy.inputs, local_call.run is None)
        inputs = _input_layouts(strategy, specs)
        run = None if local_call.run is None else local_call.run(strategy)
        return OpSharding(
            inputs,
            list(strategy.outputs),
            run,
            as_is=run is None and not any(inputs),
            as_is_without_grad=run is None and list(strategy.inputs) == specs,
            rewrite=rewrite or (self.in_place and run is not None),
            meta_result=meta_result,
        )

    def _gathered(self, args: Sequence[DTensorArg], meta_result: Any) -> OpSharding:
        """The operator on full tensors, which every rank gets."""
        inputs: list[InputLayout | None] = [
            None if arg.spec.replicated == arg.spec else (arg.spec.replicated, ()) for arg in args
        ]
        rewrite = self.in_place and inputs[0] is not None
        as_is = not (any(inputs) or self.draws)
        return OpSharding(inputs, None, as_is=as_is, rewrite=rewrite, meta_result=meta_result)


def _is_unchecked(result: RuleResult) -> bool:
    """True if other code runs than the function of a call, which might refuse it."""
    if isinstance(result, LocalCall):
        return result.run is not None
    return result is not None and not (isinstance(result, Decomposition) and result.is_checked)


def written_to(call: Call) -> Any:
    """The argument that an operator in place writes to."""
    return call.args[0] if call.args else call.kwargs.get("input", call.kwargs.get("self"))


def _reduces_nonlinearly(sharding: OpSharding, call: Call) -> bool:
    """True if some result, but no input as it is read, is partial in a reduction that is no sum."""
    if all(spec.reduce_op in (None, "sum") for spec in sharding.outputs or ()):
        return False
    read = []
    for tensor, layout in zip(call.tensors, sharding.inputs, strict=True):
        if layout is not None:
            read.append(layout[0])
        elif isinstance(tensor, DTensorBase):
            read.append(tensor._spec)
    return all(spec.reduce_op in (None, "sum") for spec in read)


def _first_tensor(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else kwargs["input"]


def _input_layouts(strategy: Strategy, specs: Sequence[DTensorSpec]) -> list[InputLayout | None]:
    return [
        None if needed == spec and not axes else (needed, axes)
        for needed, spec, axes in zip(strategy.inputs, specs, strategy.partial_grads, strict=True)
    ]


def _has_graded_operands(call: Call) -> bool:
    """True if an operand can require a gradient, and what is written to, the first, cannot."""
    if not call.args or _can_have_grad(call.args[0]):
        return False
    return any(map(_can_have_grad, call.tensors))


def _can_have_grad(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def _moves_elements(sharding: OpSharding, tensors: Sequence[Tensor]) -> bool:
    """True if elements have to be moved before the operator runs."""
    return any(
        layout is not None
        and isinstance(tensor, DTensorBase)
        and layout[0].tiling != tensor._spec.tiling
        for tensor, layout in zip(tensors, sharding.inputs, strict=True)
    )


def _has_empty_shard(sharding: OpSharding) -> bool:
    """True if some result has elements, and none of them is on this rank."""
    return any(0 in spec.local_shape and 0 not in spec.shape for spec in sharding.outputs or ())


def _raised_within(error: TypeError, function: Any) -> bool:
    """True if an error came from a function's body, not from calling it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
        if trace.tb_frame.f_code is getattr(function, "__code__", None):
            return True
    return False


def _fits(dims: DimFactors, arg: DTensorArg) -> bool:
    """True if a tensor has the dims that the rule says: else it is where that takes a number, or of
    a shape that torch refuses, which local operators may not see.
    """
    return len(dims) == arg.ndim and all(
        not dim or volume(dim) == size for dim, size in zip(dims, arg.shape, strict=True)
    )


def _lacks_sizes(call: LocalCall) -> bool:
    """True if the factors do not tell the size of each dim of each result."""
    return any(
        not dim or any(factor.unshardable for factor in dim)
        for out in call.map.outputs
        for dim in out
    )


def _meta_result(call: Call) -> Any:
    """The result without memory; None where torch cannot tell it so."""
    try:
        return call.on_meta()
    except Exception:  # what is wrong with the call will be raised where it is run
        return None
