"""The ways in which a call runs: see :mod:`~…propagation.op_sharding`.

Other operators on DTensors compute the call; or it runs on local tensors, in the layouts that the
call needs; or on gathered tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd import local_graph
from tilework.dtensor.base import version_of
from tilework.dtensor.debug import causes
from tilework.dtensor.dispatch import autocast
from tilework.dtensor.dispatch.finishing import OperatorForm, digest_of_rest, finished
from tilework.dtensor.dispatch.local_inputs import local_inputs
from tilework.dtensor.dispatch.results import came_from, result_outside, write
from tilework.dtensor.propagation.dtensor_call import DTensorCall
from tilework.dtensor.propagation.op_sharding import (
    Composed,
    Finish,
    Gathered,
    OnLocals,
    OpSharding,
)
from tilework.dtensor.propagation.propagator import has_graded_operands
from tilework.dtensor.propagation.pytree import Args, Kwargs, tensors_in, with_tensors
from tilework.dtensor.propagation.refusals import refusals
from tilework.dtensor.propagation.strides import composed_strides
from tilework.dtensor.provenance.digests import note_write, plain_number
from tilework.dtensor.provenance.meaning import moving
from tilework.dtensor.random.generator import draw_alike
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views import moved_views
from tilework.tiled import OpEntry, packet_of, schemas_of, unchanged

_grad_enabled = torch.is_grad_enabled
_OpOverloadPacket = torch._ops.OpOverloadPacket
#: Larger full tensors are not made to ask torch whether it records a call.
_MOST_TRIED = 1 << 16
_WHOLE_SUMS = Finish.WHOLE_SUMS


class Ways:
    """Runs the calls of one operator on DTensors, each in the way that the call's sharding says.

    Args:
        entry: The operator's entry in the table.
        in_place: True if the operator writes to the first argument.
    """

    def __init__(self, entry: OpEntry, in_place: bool) -> None:
        self.entry, self.in_place = entry, in_place
        self._operation = OperatorForm(entry.name, in_place)
        self._name, self._title = self._operation.name, self._operation.title

    def run(self, sharding: OpSharding, call: DTensorCall) -> Any:
        """The result of a call, whose tensors may have to be moved. Collective if some have."""
        if _grad_enabled() and self._is_unrecorded(sharding, call):
            with torch.no_grad():
                return self.run(sharding, call)
        way = sharding.way
        if autocast.is_enabled() and not self.in_place and sharding.stands_in:
            cast = autocast.in_float32(self._name, call)
            if cast is not None:
                return cast()
        if _WHOLE_SUMS in sharding.finish and not _scales_finitely(self._name, call):
            way = _by_whole_sums(call)
        if isinstance(way, Composed):
            return self._composed(sharding, way, call)
        if not call.mesh.here:
            if self.in_place:
                return call.args[0]
            return result_outside(self._name, way.meta_result, sharding.outputs, call.mesh)
        return self._on_locals(sharding, way, call)

    def finished(self, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
        """The result of a call, from what the operator gives for the local tensors as they are."""
        if sharding.finish[0] is _WHOLE_SUMS and not _scales_finitely(self._name, call):
            return self._composed(sharding, _by_whole_sums(call), call)
        if causes.watchers:
            causes.begin_operator(self._name)
        return finished(self._operation, sharding, result, call)

    def _is_unrecorded(self, sharding: OpSharding, call: DTensorCall) -> bool:
        """True if torch would record nothing for gradients, where local operators may."""
        if self.in_place:  # torch would say that integers require a gradient
            return has_graded_operands(call)
        # torch records no operator on inference tensors, for which others may make theirs
        return sharding.stands_in and not sharding.makes_views and _is_inference(call)

    # -- by other operators -------------------------------------------------------------------

    def _composed(self, sharding: OpSharding, way: Composed, call: DTensorCall) -> Any:
        """The result of a call that other operators compute."""
        func, args, kwargs, tensors, _, digest = call
        if causes.watchers:
            causes.begin_operator(self._name)
        if way.overwrites:  # what was there before may be what the memory happens to hold
            digest = digest_of_rest(sharding, call)
        with moving(digest, self._title), refusals(call):
            if self.in_place:
                return _composed_in_place(way.run, args, kwargs, digest)
            result = came_from(way.run(*args, **kwargs), tensors, digest)
        if isinstance(result, tuple) and packet_of(func).__class__ is _OpOverloadPacket:
            result = _as_overloads_give(func, result)
        return self._with_strides(way, result, call)

    def _with_strides(self, way: Composed, result: Any, call: DTensorCall) -> Any:
        """A composed result, whose tensors have the strides that torch's operator gives them."""
        if not way.knows_strides:
            results = tensors_in(result)
            specs = [tensor._spec for tensor in results if isinstance(tensor, DTensor)]
            if len(specs) == len(results):
                way.strides = composed_strides(self.entry, call, specs)
            way.knows_strides = True
        if way.strides is not None:
            for tensor, strides in zip(tensors_in(result), way.strides, strict=True):
                assert isinstance(tensor, DTensor)
                is_new = tensor._viewed is None
                is_new = is_new and all(tensor is not each for each in call.tensors)
                if is_new or self.entry.is_view:
                    tensor._spec = tensor._spec.with_strides(strides)
        return result

    # -- on local tensors ---------------------------------------------------------------------

    def _on_locals(self, sharding: OpSharding, way: OnLocals | Gathered, call: DTensorCall) -> Any:
        """The result of a call, computed from local tensors in the layouts that it needs."""
        if causes.watchers:
            gathers = isinstance(way, Gathered) and any(sharding.inputs)
            causes.begin_operator(self._name, gathers)
        locals_ = local_inputs(sharding, call.tensors, call.mesh, self._title)
        if Finish.WRITE in sharding.finish and _is_kept(locals_[0]):
            locals_[0] = locals_[0].clone()
        if isinstance(way, Gathered):
            result = self._on_gathered(sharding, way, call, locals_)
        elif way.replays and _root_requires_grad(locals_[0]):
            with torch.autograd.grad_mode._force_original_view_tracking(True):
                return finished(
                    self._operation, sharding, self._on_shards(sharding, way, call, locals_), call
                )
        else:
            result = self._on_shards(sharding, way, call, locals_)
        return finished(self._operation, sharding, result, call)

    def _on_shards(
        self, sharding: OpSharding, way: OnLocals, call: DTensorCall, locals_: list[Tensor]
    ) -> Any:
        """The local result of an operator that has a rule."""
        if way.run is None:
            local_args, local_kwargs = with_tensors(call.args, call.kwargs, iter(locals_))
            return call.func(*local_args, **local_kwargs)
        if sharding.makes_views and way.write is None:  # what it needs has moved
            return way.run(*locals_)
        with moving(call.digest, self._title):
            result = way.run(*locals_)
        if not (sharding.makes_views or (self.in_place and result is locals_[0])):
            result = moved_views.as_no_view(result)
        return result

    def _on_gathered(
        self, sharding: OpSharding, way: Gathered, call: DTensorCall, locals_: list[Tensor]
    ) -> Any:
        """The local result of an operator without a rule, on full tensors."""
        versions = [version_of(tensor) for tensor in locals_]
        args, kwargs = with_tensors(call.args, call.kwargs, iter(locals_))
        if self.entry.draws:
            with moving(call.digest, self._title):
                result = draw_alike(call.mesh, call.func, *args, **kwargs)
        else:
            result = call.func(*args, **kwargs)
        # What it has written to copies is written to the tensors, but for what it returns.
        first = 1 if self.in_place and result is not None else 0
        for number, tensor in enumerate(call.tensors[first:], first):
            layout, local = sharding.inputs[number], locals_[number]
            silent = number in way.silent_writes and not tensor.requires_grad
            if layout is not None and (silent or version_of(local) != versions[number]):
                assert isinstance(tensor, DTensor)
                write(tensor, local, layout[0], self._name)
                moved_views.wrote(tensor, self._title)
                note_write(tensor, hash((call.digest, number)))
        return result


def _is_kept(local: Tensor) -> bool:
    """True if a call in place must compute from a copy of the tensor that it then writes to."""
    # The tensor that is saved for backward must not be written to.
    if local.requires_grad and _grad_enabled():
        return True
    # torch refuses writes to what was moved of an inference tensor, but none to tensor.data.
    return local.is_inference() and not torch.is_inference_mode_enabled()


def _root_requires_grad(local: Tensor) -> bool:
    """True if a local tensor, or the base if the local tensor is a view, requires a gradient."""
    return bool((local if local._base is None else local._base).requires_grad)


def _as_overloads_give(func: Any, tensors: tuple[Any, ...]) -> Any:
    """Several results as operators of ``torch.ops`` return them: in a list or a plain tuple.

    Functions such as ``torch.max`` return named tuples instead.
    """
    returns = [schema.returns for schema in schemas_of(packet_of(func))]
    has_list = any(each and str(each[0].type) == "List[Tensor]" for each in returns)
    return list(tensors) if has_list else tuple(tensors)


def _is_inference(call: DTensorCall) -> bool:
    """True if all tensors are inference tensors, and torch would record nothing for gradients."""
    if not all(local_graph.plain(tensor).is_inference() for tensor in call.tensors):
        return False
    if sum(x.numel() for x in call.tensors) > _MOST_TRIED:
        return True
    with torch.inference_mode():
        tensors = [
            torch.zeros(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad)
            for x in call.tensors
        ]
    args, kwargs = with_tensors(call.args, call.kwargs, iter(tensors))
    try:  # indices and results that it makes by itself are none, and recorded
        result = call.func(*args, **kwargs)
    except Exception:  # what is wrong with the call will be raised where it is run
        return True
    return not any(tensor.requires_grad for tensor in tensors_in(result))


def _scales_finitely(name: str, call: DTensorCall) -> bool:
    """True if all numbers among the arguments are finite, and none divides by zero."""
    for arg in (*call.args, *call.kwargs.values()) if call.kwargs else call.args:
        # Numbers of a captured step are floats that note a comparison.
        number = arg if isinstance(arg, int | float) else _number_of(arg)
        if number is not None and not (abs(number) < inf and (number or name != "div")):
            return False
    return True


def _number_of(arg: Any) -> complex | None:
    return None if isinstance(arg, Tensor) else plain_number(arg)


def _by_whole_sums(call: DTensorCall) -> Composed:
    return Composed(partial(_of_whole_sums, call.func))


def _of_whole_sums(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The result of a call after partial tensors were reduced; if none are partial, replicated."""
    tensors = tensors_in([*args, *kwargs.values()])
    specs = [tensor._spec for tensor in tensors if isinstance(tensor, DTensor)]
    are_partial = any(spec.partial_axes for spec in specs)

    def whole(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        spec = tensor._spec.dual if are_partial else tensor._spec.replicated
        return tensor.redistribute(placements=spec.placements, order=spec.order)

    whole_args, whole_kwargs = with_tensors(args, kwargs, map(whole, tensors))
    return func(*whole_args, **whole_kwargs)


def _composed_in_place(
    composed: Callable[..., Any], args: Args, kwargs: Kwargs, digest: int
) -> Any:
    """Compute an operator's result as a new tensor, and write it to the first argument.

    If the first argument is a plain tensor, ``composed`` writes to it.
    """
    target = args[0] if args else None
    if not isinstance(target, DTensor):
        return composed(*args, **kwargs)
    if composed is unchanged:
        return target
    # The tensor that is saved for backward must not be written to.
    kept = target.clone() if target.requires_grad and _grad_enabled() else target
    result = composed(kept, *args[1:], **kwargs)
    if result is not target:
        if not torch.can_cast(result.dtype, target.dtype):
            raise RuntimeError(
                f"result type {result.dtype} can't be cast to that of the tensor that it would be "
                f"written to in place, {target.dtype}"
            )
        target.copy_(result)
    note_write(target, digest)
    return target
