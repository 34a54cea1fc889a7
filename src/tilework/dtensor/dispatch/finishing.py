"""The steps that make an operator's results of local results: see ``op_sharding.Finish``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilework.dtensor.autograd import gradients, local_graph
from tilework.dtensor.base import wrap_as
from tilework.dtensor.dispatch.results import reduced, replicated_like, show_base, wrapped, write
from tilework.dtensor.propagation.dtensor_call import DTensorCall
from tilework.dtensor.propagation.op_sharding import Finish, OpSharding
from tilework.dtensor.propagation.plain_inputs import replicated_spec
from tilework.dtensor.propagation.strides import storage_of
from tilework.dtensor.provenance.digests import note_write, seeds_in
from tilework.dtensor.spec import DTensorSpec
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views import moved_views

#: Operators that in place leave nothing of the values before.
_OVERWRITE = frozenset({"copy", "fill", "zero"})


class OperatorForm(NamedTuple):
    """An operator, in place or not.

    Attributes:
        name: The name of the operator, without the underscore of the in-place form.
        in_place: True if this form writes to the first argument.
    """

    name: str
    in_place: bool

    @property
    def title(self) -> str:
        """The name of the form, in errors and digests."""
        return self.name + "_" * self.in_place


#: A step: of the operator, how the call runs, what there is so far, and the call.
Step = Callable[[OperatorForm, OpSharding, Any, DTensorCall], Any]


def finished(operation: OperatorForm, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    """The result of a call, made of the local result by the sharding's last steps."""
    for step in sharding.finish:
        result = _STEPS[step](operation, sharding, result, call)
    return result


def _maybe_input(_: OperatorForm, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    first = call.tensors[0]
    if call.args and isinstance(first, DTensor) and result is first._local_tensor:
        return first
    return result


def _own_memory(_: OperatorForm, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    """A local result that shares no memory with the local tensor of the first input."""
    if isinstance(result, DTensor):
        return result
    first = call.tensors[0]
    assert isinstance(first, DTensor)
    return result.clone() if storage_of(result) == storage_of(first._local_tensor) else result


def _wrap(_: OperatorForm, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    return _as_dtensors(result, sharding.outputs, call)


def _wrap_reduced(_: OperatorForm, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    return _as_dtensors(*reduced(result, sharding.outputs), call)


def _as_dtensors(result: Any, outputs: list[DTensorSpec] | None, call: DTensorCall) -> Any:
    if result.__class__ is DTensor:  # the input itself
        return result
    if outputs is None or result.__class__ is not Tensor:
        return wrapped(result, outputs, call.mesh, call.digest)
    if result.requires_grad and not torch.is_grad_enabled():  # torch's views still say so
        result = result.detach()
    return wrap_as(DTensor, result, outputs[0], call.digest)


def _view(_: OperatorForm, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    if result is call.tensors[0]:  # as real numbers are their real parts
        return result
    show_base(result, call.tensors[0])
    base = call.args[0] if call.args else None
    if result.__class__ is DTensor and base.__class__ is DTensor:  # mostly
        moved_views.note_viewed(result, base, call.func, call.args, call.kwargs)
        return result
    return moved_views.viewed(result, False, call.func, call.args, call.kwargs)


def _maybe_copy(
    operation: OperatorForm, sharding: OpSharding, result: Any, call: DTensorCall
) -> Any:
    """A view, marked as a copy if the local tensor could not be viewed."""
    base = call.tensors[0]
    assert isinstance(base, DTensor)
    local = result._local_tensor if result.__class__ is DTensor else base._local_tensor
    if local._base is not None or storage_of(local) == storage_of(base._local_tensor):
        return _view(operation, sharding, result, call)
    show_base(result, base)
    moved_views.mark_local_copy(result, base)
    return result


def _copied_view(_: OperatorForm, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    show_base(result, call.tensors[0])
    write = getattr(sharding.way, "write", None)
    return moved_views.viewed(result, True, call.func, call.args, call.kwargs, write)


def _written(operation: OperatorForm, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    """The first argument, which the operator has written to, or which gets the result."""
    if result is None or result is NotImplemented:  # of x **= object(), which Python then refuses
        return result
    target = call.args[0]
    assert isinstance(target, DTensor)  # the propagator refuses others
    digest = call.digest
    if operation.name in _OVERWRITE:
        digest = digest_of_rest(sharding, call)
    if sharding.outputs is None and result.shape != target._spec.size:
        gradients.become(target, replicated_like(target, result))
        note_write(target, digest)
        return target
    if sharding.finish[-1] is Finish.WRITE and result is not target._local_tensor:
        outputs = sharding.outputs
        spec = outputs[0] if outputs else replicated_spec(result, target._spec.mesh)
        write(target, result, spec, operation.name, digest)
    note_write(target, digest)
    graded = target._local_tensor.requires_grad
    if graded:
        local_graph.mirror_requires_grad(target)
    moved_views.wrote(target, operation.title)
    if graded:
        local_graph.mirror_in_bases(target)
    return target


def digest_of_rest(sharding: OpSharding, call: DTensorCall) -> int:
    """The digest of a call, without the digest of the first argument."""
    return hash(tuple(seeds_in(call.kwargs, seeds_in(call.args[1:], [sharding.digest]))))


def _as_it_is(_: OperatorForm, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    return result


_STEPS: dict[Finish, Step] = {
    Finish.WHOLE_SUMS: _as_it_is,  # ways.py has seen to it
    Finish.MAYBE_INPUT: _maybe_input,
    Finish.OWN_MEMORY: _own_memory,
    Finish.WRAP: _wrap,
    Finish.WRAP_REDUCED: _wrap_reduced,
    Finish.VIEW: _view,
    Finish.MAYBE_COPY: _maybe_copy,
    Finish.COPIED_VIEW: _copied_view,
    Finish.WRITTEN: _written,
    Finish.WRITE: _written,
}
