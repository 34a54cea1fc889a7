"""Sharding propagation: from an operator's rule and the layouts of inputs to local calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilework.dtensor.base import DTensorBase
from tilework.dtensor.debug import causes
from tilework.dtensor.propagation import strides
from tilework.dtensor.propagation.dtensor_call import (
    DTensorCall,
    replicated_spec,
    tensors_in,
    unseen,
    with_tensors,
)
from tilework.dtensor.propagation.op_sharding import (
    Composed,
    DTensorArg,
    Finish,
    Gathered,
    InputLayout,
    OnLocals,
    OpSharding,
    PlacedCall,
)
from tilework.dtensor.propagation.refusals import (
    empty_parts_refusal,
    meta_refusal,
    raise_if_certain,
    raise_torchs,
    seems_refused,
)
from tilework.dtensor.propagation.strategy import Strategy, choose
from tilework.dtensor.provenance.digests import plain_number
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.layout.internal import SeveralRangesError
from tilework.tiled import Decomposition, Factor, LocalCall, OpEntry, RuleResult, aten_parameters


class ShardingPropagator:
    """Finds the shardings of an operator's calls; ``in_place``: it writes to the first argument."""

    def __init__(self, entry: OpEntry, in_place: bool) -> None:
        self.entry, self.in_place = entry, in_place
        self.name, self.draws = entry.name, entry.draws
        #: True if kernels may skip checks of dtypes for tensors without elements.
        self._may_skip_checks = not (entry.is_elementwise or entry.is_view or entry.draws)

    def propagate(self, call: DTensorCall) -> OpSharding:
        """The sharding of all calls with this signature, without writes to plain tensors. Local."""
        with unseen():
            return self._propagated(call)

    def _propagated(self, call: DTensorCall) -> OpSharding:
        sharding = self._sharding(call)
        sharding.specs = call.specs
        if isinstance(sharding.way, Composed):
            return sharding
        if isinstance(sharding.way, Gathered):
            sharding.way.silent_writes = self._silent_writes(call)
        sums = (Finish.WHOLE_SUMS,) if self._scales_sums(sharding, call) else ()
        if self.in_place:
            if sums:  # otherwise the result is discarded
                sharding.looks_first()
            if has_graded_operands(call):
                sharding.as_is = False
            sharding.finish_by(*sums, *(sharding.finish or (Finish.WRITTEN,)))
        else:
            self._add_finish(sharding, call, sums)
        if not call.mesh.here:
            sharding.looks_first()
        return sharding

    def _add_finish(
        self, sharding: OpSharding, call: DTensorCall, first: tuple[Finish, ...]
    ) -> None:
        """Set the steps that turn local results into results, and the strides of the results."""
        memory = Finish.VIEW if self.entry.is_view else None
        if sharding.outputs is not None:
            if self.entry.may_copy:
                memory, found = _view_or_copy(call, sharding.outputs)
            else:
                found = strides.result_strides(self.entry, call, sharding.outputs)
            if found is not None:
                sharding.outputs = [
                    spec.with_strides(strides_)
                    for spec, strides_ in zip(sharding.outputs, found, strict=True)
                ]
            if memory is Finish.MAYBE_INPUT:
                sharding.way, sharding.stands_in = Composed(_first_tensor), True
                sharding.looks_first()
                return
        maybe_input = (Finish.MAYBE_INPUT,) if self.entry.may_be_input else ()
        own_memory = (memory,) if memory is Finish.OWN_MEMORY else ()
        wrap = Finish.WRAP_REDUCED if _reduces_nonlinearly(sharding, call) else Finish.WRAP
        view = (_kind_of_view(sharding, call),) if memory is Finish.VIEW else ()
        sharding.finish_by(*first, *maybe_input, *own_memory, wrap, *view)
        if sharding.outputs and sharding.finish == (Finish.WRAP,):
            sharding.output = sharding.outputs[0]

    def _sharding(self, call: DTensorCall) -> OpSharding:
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
            result = None  # torch raises, either now or when the call runs
        if isinstance(result, Decomposition):
            return OpSharding(Composed(result.run))
        # Some meta kernels make torch import slow modules: use them only if shapes are unknown.
        known = not (
            isinstance(result, LocalCall) and result.shapes is None and _lacks_sizes(result)
        )
        meta_result = None if known and call.mesh.here else _meta_result(call)
        if isinstance(result, PlacedCall):
            return self._placed_call(call, result, args, meta_result)
        sharding = None
        if isinstance(result, LocalCall):
            sharding = self._local_call(call, result, args, meta_result)
        return self._gathered(call, args, meta_result) if sharding is None else sharding

    def _placed_call(
        self, call: DTensorCall, placed: PlacedCall, args: Sequence[DTensorArg], meta_result: Any
    ) -> OpSharding:
        """The sharding of a call whose rule gave a function and all layouts."""
        self._refuse_as_others(call, placed.inputs, runs_on_locals=False)
        partial = placed.partial_grads or [()] * len(args)
        inputs: list[InputLayout | None] = [
            None if needed == arg.spec and not axes else (needed, axes)
            for needed, arg, axes in zip(placed.inputs, args, partial, strict=True)
        ]
        way = OnLocals(placed.run, meta_result, write=placed.write)
        return OpSharding(way, inputs, list(placed.outputs))

    def _refuse_as_others(
        self, call: DTensorCall, specs: Sequence[DTensorSpec], runs_on_locals: bool
    ) -> None:
        """Raise on every rank the error that torch raises only on ranks with elements. Local."""
        if self._may_skip_checks:
            refusal = empty_parts_refusal(call, specs, runs_on_locals)
            if refusal is not None:
                raise refusal

    def _scales_sums(self, sharding: OpSharding, call: DTensorCall) -> bool:
        """True if a number may be infinite or a divisor: sums cannot be scaled."""
        if not any(spec.reduce_op in ("sum", "avg") for spec in sharding.outputs or ()):
            return False
        kinds = (int, float, complex) if self.name == "div" else (float, complex)
        return any(
            isinstance(plain_number(arg), kinds)
            for arg in (*call.args, *call.kwargs.values())
            if not isinstance(arg, Tensor)
        )

    def _silent_writes(self, call: DTensorCall) -> frozenset[int]:
        """The numbers of the tensors for which torch does not count the operator's write."""
        if not self.entry.silent_writes:
            return frozenset()
        by_name = {**dict(zip(aten_parameters(self.name), call.args, strict=False)), **call.kwargs}
        written = [by_name.get(name) for name in self.entry.silent_writes]
        return frozenset(
            number for number, x in enumerate(call.tensors) if any(x is arg for arg in written)
        )

    def _ask_rule(self, call: DTensorCall, args: Sequence[DTensorArg]) -> RuleResult:
        """The answer of the rule for DTensors, or else of the general rule, or else None."""
        positional, named = with_tensors(call.args, call.kwargs, iter(args))
        named.pop("out", None)  # always None at this point
        for rule in (self.entry.dtensor_rule, self.entry.rule):
            if rule is None:
                continue
            try:
                result = rule(*positional, **named)
            except SeveralRangesError:  # the rule looks along a dim
                return self._ask_rule(call, [arg.without_turns for arg in args])
            except (IndexError, ValueError) as error:
                raise_torchs(error, call)
            except TypeError as error:
                if _raised_within(error, rule):
                    raise
                continue  # called with arguments that the rule does not know
            if result is not None:
                return result
        return None

    def _local_call(
        self,
        call: DTensorCall,
        local_call: LocalCall,
        args: Sequence[DTensorArg],
        meta_result: Any,
        in_ranges: frozenset[Factor] = frozenset(),
    ) -> OpSharding | None:
        """The cheapest sharding of a call on local tensors; None if unknown."""
        shapes = _shapes_of_results(local_call, meta_result)
        if shapes is None and _lacks_sizes(local_call):
            return None
        if not local_call.fits(args):
            return None
        specs = [arg.spec for arg in args]
        strategy, stays = self._strategy(local_call, args, shapes, in_ranges)
        if strategy is None or (self.in_place and strategy.outputs[0].shape != specs[0].shape):
            return None
        self._refuse_as_others(call, strategy.inputs, local_call.run is None)
        inputs = _input_layouts(strategy, specs)
        try:
            run = None if local_call.run is None else local_call.run(strategy)
        except SeveralRangesError as error:  # the function looks along a dim
            wanted = _with(in_ranges, error)
            return self._local_call(call, local_call, args, meta_result, wanted)
        return OpSharding(
            OnLocals(run, meta_result),
            inputs,
            list(strategy.outputs),
            (Finish.WRITE,) if self.in_place and (run is not None or not stays) else (),
            as_is=run is None and not any(inputs),
            as_is_without_grad=run is None and list(strategy.inputs) == specs,
        )

    def _strategy(
        self,
        local_call: LocalCall,
        args: Sequence[DTensorArg],
        shapes: Sequence[Ints] | None,
        in_ranges: frozenset[Factor],
    ) -> tuple[Strategy | None, bool]:
        """The cheapest strategy or None, and True if a written tensor keeps its layout."""
        specs, sizes = [arg.spec for arg in args], [arg.dtype.itemsize for arg in args]
        if self.in_place:
            strategy = choose(local_call.map, specs, sizes, shapes, fixed=(0,), in_ranges=in_ranges)
            if strategy is not None:
                return strategy, True
        return choose(local_call.map, specs, sizes, shapes, in_ranges=in_ranges), False

    def _gathered(
        self, call: DTensorCall, args: Sequence[DTensorArg], meta_result: Any
    ) -> OpSharding:
        """The sharding of a call on gathered full tensors. Warns of the gathering."""
        refusal = meta_refusal(call)
        if refusal is not None and not self.draws:
            raise_if_certain(refusal, call)
        if not self.entry.has_rule or refusal is None:
            dtypes = [arg.dtype for arg in args]
            causes.warn_gather(self.name, [arg.spec for arg in args], dtypes)
        inputs: list[InputLayout | None] = [
            None if arg.spec.replicated == arg.spec else (arg.spec.replicated, ()) for arg in args
        ]
        return OpSharding(
            Gathered(meta_result),
            inputs,
            finish=(Finish.WRITE,) if self.in_place and inputs[0] is not None else (),
            as_is=not (any(inputs) or self.draws),
        )


def _with(in_ranges: frozenset[Factor], error: SeveralRangesError) -> frozenset[Factor]:
    """The factors that have to be sharded in ranges, with another one; raises if it is known."""
    if error.of in in_ranges:
        raise error
    return in_ranges | {error.of}


def _shapes_of_results(local_call: LocalCall, meta_result: Any) -> Sequence[Ints] | None:
    """The shapes of results; None if the factors determine them, or only the call itself does."""
    if local_call.shapes is not None or meta_result is None:
        return local_call.shapes
    shapes = [tuple(tensor.shape) for tensor in tensors_in(meta_result)]
    return shapes if len(shapes) == len(local_call.map.outputs) else None


def _is_unchecked(result: RuleResult) -> bool:
    """True if code that may not refuse what torch refuses runs in place of torch's function."""
    if isinstance(result, LocalCall):
        return result.run is not None
    return result is not None and not (isinstance(result, Decomposition) and result.is_checked)


def written_to(call: DTensorCall) -> Any:
    """The argument that an operator in place writes to."""
    return call.args[0] if call.args else call.kwargs.get("input", call.kwargs.get("self"))


def _reduces_nonlinearly(sharding: OpSharding, call: DTensorCall) -> bool:
    """True if some result is partial in another reduction than a sum, but no input is when read."""
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


def has_graded_operands(call: DTensorCall) -> bool:
    """True if an operand can require a gradient, but the written DTensor cannot."""
    target = call.args[0] if call.args else None
    if not isinstance(target, DTensorBase) or _can_have_grad(target):
        return False
    return any(map(_can_have_grad, call.tensors))


def _can_have_grad(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _view_or_copy(
    call: DTensorCall, outputs: Sequence[DTensorSpec]
) -> tuple[Finish | None, list[Ints] | None]:
    """The last step of an operator whose result is input, view or copy; and the strides."""
    tensors = strides.without_memory(call.tensors)
    shown = strides.called(call, tensors)
    found = strides.meta_strides(shown, outputs)
    if shown is tensors[0]:
        return Finish.MAYBE_INPUT, found
    if found is not None and strides.storage_of(shown) != strides.storage_of(tensors[0]):
        return Finish.OWN_MEMORY, found
    return Finish.VIEW, found


def _kind_of_view(sharding: OpSharding, call: DTensorCall) -> Finish:
    """The last step of a view; sets ``replays`` if torch must be able to repeat the call."""
    if getattr(sharding.way, "write", None) or _moves_elements(sharding, call.tensors):
        return Finish.COPIED_VIEW
    if _has_empty_shard(sharding):
        sharding.looks_first()
        if isinstance(sharding.way, OnLocals):
            sharding.way.replays = True
    return Finish.MAYBE_COPY if sharding.stands_in else Finish.VIEW


def _moves_elements(sharding: OpSharding, tensors: Sequence[Tensor]) -> bool:
    """True if elements must move before the operator runs."""
    return any(
        layout is not None
        and isinstance(tensor, DTensorBase)
        and layout[0].tiling != tensor._spec.tiling
        for tensor, layout in zip(tensors, sharding.inputs, strict=True)
    )


def _has_empty_shard(sharding: OpSharding) -> bool:
    """True if some result has elements, but none on this rank."""
    return any(0 in spec.local_shape and 0 not in spec.shape for spec in sharding.outputs or ())


def _raised_within(error: TypeError, function: Any) -> bool:
    """True if an error came from a function's body, not from a wrong call."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
        if trace.tb_frame.f_code is getattr(function, "__code__", None):
            return True
    return False


def _lacks_sizes(call: LocalCall) -> bool:
    """True if the factors do not determine the size of each dim of each result."""
    return any(
        not dim or any(factor.unshardable for factor in dim)
        for out in call.map.outputs
        for dim in out
    )


def _meta_result(call: DTensorCall) -> Any:
    """The result as meta tensors; None if torch cannot compute it without elements."""
    try:
        return call.on_meta()
    except Exception:  # a wrong call raises when it runs
        return None
