"""The ways in which a call runs: see :mod:`~…propagation.op_sharding`.

Other operators on DTensors compute the call; or it runs on local tensors, in the layouts that the
call needs; or on gathered tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd import expanded_grads, local_graph, partial_grads
from tilework.dtensor.base import version_of, wrap_as
from tilework.dtensor.debug import causes
from tilework.dtensor.dispatch.results import (
    came_from,
    reduced,
    replicated,
    result_outside,
    wrapped,
    write,
)
from tilework.dtensor.local_function import as_inference
from tilework.dtensor.propagation.dtensor_call import (
    Args,
    DTensorCall,
    Kwargs,
    replicated_spec,
    tensors_in,
    with_tensors,
)
from tilework.dtensor.propagation.op_sharding import (
    Composed,
    Finish,
    Gathered,
    OnLocals,
    OpSharding,
)
from tilework.dtensor.propagation.propagator import has_graded_operands
from tilework.dtensor.propagation.refusals import raise_torchs
from tilework.dtensor.propagation.strides import composed_strides, storage_of
from tilework.dtensor.provenance.digests import (
    Moved,
    digest_of,
    moving,
    note_write,
    plain_number,
    seeds_in,
)
from tilework.dtensor.random.generator import draw_alike
from tilework.dtensor.redistribution.redistribute import redistribute_local
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views import moved_views
from tilework.mesh import DeviceMesh
from tilework.tiled import OpEntry, packet_of, schemas_of, unchanged

# -- autocast ---------------------------------------------------------------------------------

#: Operators that autocast computes in lower precision or in the widest dtype that is given: what
#: they are composed of is of this kind itself.
_NOT_IN_FLOAT32 = frozenset({
    *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "einsum", "linear"),
    *("linalg_multi_dot", "linalg_vecdot", "matmul", "mm", "mv", "prelu", "convolution"),
    *("conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d"),
    *("conv_transpose3d", "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
    *("scaled_dot_product_attention", "cat", "stack", "index_copy", "index_put", "scatter_add"),
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "tensordot"),
    "grid_sampler",
})  # fmt: skip
_PADDINGS = {"reflect": "reflection_pad", "replicate": "replication_pad"}

_autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled


def _in_float32(name: str, call: DTensorCall) -> Callable[[], Any] | None:
    """A function that runs the call in float32; None if autocast leaves the operator's dtype."""
    device = call.mesh.device_type
    if not torch.is_autocast_enabled(device) or not _is_in_float32(_kernel(name, call), device):
        return None
    args, kwargs = with_tensors(call.args, call.kwargs, map(_as_float32, call.tensors))

    def run() -> Any:
        with torch.autocast(device, enabled=False):
            return call.func(*args, **kwargs)

    return run


def _as_float32(tensor: Tensor) -> Tensor:
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.float() if is_cast else tensor


def _kernel(name: str, call: DTensorCall) -> str:
    """The name of torch's kernel that computes a call."""
    if name == "nll_loss_nd":
        return "nll_loss"
    if name != "pad":
        return name
    widths = call.args[1] if len(call.args) > 1 else call.kwargs.get("pad", ())
    mode = call.args[2] if len(call.args) > 2 else call.kwargs.get("mode", "constant")
    return f"{_PADDINGS.get(mode, mode)}{len(widths) // 2}d"


def _is_in_float32(name: str, device: str) -> bool:
    """True if torch has a kernel of this name for autocast, which casts to float32."""
    return name not in _NOT_IN_FLOAT32 and f"aten::{name}" in _with_kernels(device)


@cache
def _with_kernels(device: str) -> frozenset[str]:
    """The names of the operators for which autocast has kernels on a type of device."""
    known: Callable[[str], list[str]] = torch._C._dispatch_get_registrations_for_dispatch_key
    return frozenset(name.partition(".")[0] for name in known(f"Autocast{device.upper()}"))


# -- inputs -----------------------------------------------------------------------------------


def local_inputs(
    sharding: OpSharding, tensors: Sequence[Tensor], mesh: DeviceMesh, operator: str
) -> list[Tensor]:
    """The inputs' local tensors in the sharding's layouts. Collective if some have to move."""
    graded = torch.is_grad_enabled()
    locals_ = []
    for tensor, layout in zip(tensors, sharding.inputs, strict=True):
        if tensor.__class__ is not DTensor:
            if layout is None:
                locals_.append(tensor)
                continue
            tensor = replicated(tensor, mesh)
        assert isinstance(tensor, DTensor)
        if layout is not None:
            locals_.append(_moved(tensor, *layout, operator))
        elif graded and tensor._made_without_grad:
            locals_.append(local_graph.local_of(tensor))
        else:
            locals_.append(tensor._local_tensor)
    return locals_


def _expanded_dims(tensor: DTensor, target: DTensorSpec) -> Ints:
    local = local_graph.local_of(tensor)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return ()
    return expanded_grads.expanded_dims(local, tensor._spec, target)


def _moved(tensor: DTensor, target: DTensorSpec, axes: Ints, operator: str) -> Tensor:
    """The local tensor in another layout, or with a gradient that is partial along ``axes``."""
    source = tensor._spec
    if target is source or target == source:
        local = partial_grads.alias(tensor, axes)
    elif dims := _expanded_dims(tensor, target):
        local = expanded_grads.shard_expanded(tensor, target, axes, dims, operator)
    elif axes:
        local = partial_grads.redistribute_with_partial_grad(tensor, target, axes, operator)
    else:
        local = local_graph.local_of(tensor)
        local = redistribute_local(local, source, target, of=Moved(digest_of(tensor), operator))
    if torch.is_grad_enabled() and tensor._local_tensor.is_inference():
        local = as_inference(local)
    if causes.watchers:
        causes.tag_gradient(local)
    return local


# -- steps to results: see op_sharding.Finish --------------------------------------------------

#: Operators that in place leave nothing of the values before.
_OVERWRITE = frozenset({"copy", "fill", "zero"})


#: A step: of the operator, how the call runs, what there is so far, and the call.
Step = Callable[["Ways", OpSharding, Any, DTensorCall], Any]


def finished(operation: Ways, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    """The result of a call, made of the local result by the sharding's last steps."""
    for step in sharding.finish:
        result = _STEPS[step](operation, sharding, result, call)
    return result


def _maybe_input(_: Ways, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    first = call.tensors[0]
    if call.args and isinstance(first, DTensor) and result is first._local_tensor:
        return first
    return result


def _own_memory(_: Ways, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    """A local result that shares no memory with the local tensor of the first input."""
    if isinstance(result, DTensor):
        return result
    first = call.tensors[0]
    assert isinstance(first, DTensor)
    return result.clone() if storage_of(result) == storage_of(first._local_tensor) else result


def _wrap(_: Ways, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    return _as_dtensors(result, sharding.outputs, call)


def _wrap_reduced(_: Ways, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    return _as_dtensors(*reduced(result, sharding.outputs), call)


def _as_dtensors(result: Any, outputs: list[DTensorSpec] | None, call: DTensorCall) -> Any:
    if result.__class__ is DTensor:  # the input itself
        return result
    if outputs is None or result.__class__ is not Tensor:
        return wrapped(result, outputs, call.mesh, call.digest)
    if result.requires_grad and not torch.is_grad_enabled():  # torch's views still say so
        result = result.detach()
    return wrap_as(DTensor, result, outputs[0], call.digest)


def _view(_: Ways, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    if result is call.tensors[0]:  # as real numbers are their real parts
        return result
    _show_base(result, call.tensors[0])
    base = call.args[0] if call.args else None
    if result.__class__ is DTensor and base.__class__ is DTensor:  # mostly
        moved_views.note_viewed(result, base, call.func, call.args, call.kwargs)
        return result
    return moved_views.viewed(result, False, call.func, call.args, call.kwargs)


def _show_base(result: Any, base: Tensor) -> None:
    """Let digests of views depend on that of ``base``, and on later writes to it."""
    if base.__class__ is not DTensor:
        return
    if result.__class__ is DTensor:
        if result is not base:
            result._made, result._digest = result._digest, None
        return
    for tensor in tensors_in(result):
        if tensor is not base and tensor.__class__ is DTensor:
            tensor._made, tensor._digest = tensor._digest, None


def _maybe_copy(operation: Ways, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    """A view, marked as a copy if the local tensor could not be viewed."""
    base = call.tensors[0]
    assert isinstance(base, DTensor)
    local = result._local_tensor if result.__class__ is DTensor else base._local_tensor
    if local._base is not None or storage_of(local) == storage_of(base._local_tensor):
        return _view(operation, sharding, result, call)
    _show_base(result, base)
    moved_views.mark_local_copy(result, base)
    return result


def _copied_view(_: Ways, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    _show_base(result, call.tensors[0])
    write = getattr(sharding.way, "write", None)
    return moved_views.viewed(result, True, call.func, call.args, call.kwargs, write)


def _written(operation: Ways, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
    """The first argument, which the operator has written to, or which gets the result."""
    if result is None or result is NotImplemented:  # of x **= object(), which Python then refuses
        return result
    target = call.args[0]
    assert isinstance(target, DTensor)  # the propagator refuses others
    digest = call.digest
    if operation.name in _OVERWRITE:
        digest = digest_of_rest(sharding, call)
    if sharding.finish[-1] is Finish.WRITE and result is not target._local_tensor:
        outputs = sharding.outputs
        spec = outputs[0] if outputs else replicated_spec(result, target._spec.mesh)
        write(target, result, spec, operation.name, digest)
    note_write(target, digest)
    local_graph.wrote(target, operation.title)
    return target


def digest_of_rest(sharding: OpSharding, call: DTensorCall) -> int:
    """The digest of a call, without the digest of the first argument."""
    return hash(tuple(seeds_in(call.kwargs, seeds_in(call.args[1:], [sharding.digest]))))


def _as_it_is(_: Ways, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
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


# -- ways -------------------------------------------------------------------------------------

_grad_enabled = torch.is_grad_enabled
_OpOverloadPacket = torch._ops.OpOverloadPacket
#: Larger full tensors are not made to ask torch whether it records a call.
_MOST_TRIED = 1 << 16
_WHOLE_SUMS = Finish.WHOLE_SUMS


class Ways:
    """Runs the calls of one operator on DTensors, each in the way that the call's sharding says."""

    def __init__(self, entry: OpEntry, in_place: bool) -> None:
        self.entry, self.in_place = entry, in_place
        self.name = entry.name
        #: In errors and digests.
        self.title = entry.name + "_" * in_place

    def run(self, sharding: OpSharding, call: DTensorCall) -> Any:
        """The result of a call, whose tensors may have to be moved. Collective if some have."""
        if _grad_enabled() and self._is_unrecorded(sharding, call):
            with torch.no_grad():
                return self.run(sharding, call)
        way = sharding.way
        if _autocasts() and not self.in_place and sharding.stands_in:
            cast = _in_float32(self.name, call)
            if cast is not None:
                return cast()
        if _WHOLE_SUMS in sharding.finish and not _scales_finitely(self.name, call):
            way = _by_whole_sums(call)
        if isinstance(way, Composed):
            return self._composed(sharding, way, call)
        if not call.mesh.here:
            if self.in_place:
                return call.args[0]
            return result_outside(self.name, way.meta_result, sharding.outputs, call.mesh)
        return self._on_locals(sharding, way, call)

    def finished(self, sharding: OpSharding, result: Any, call: DTensorCall) -> Any:
        """The result of a call, from what the operator gives for the local tensors as they are."""
        if sharding.finish[0] is _WHOLE_SUMS and not _scales_finitely(self.name, call):
            return self._composed(sharding, _by_whole_sums(call), call)
        if causes.watchers:
            causes.begin_operator(self.name)
        return finished(self, sharding, result, call)

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
            causes.begin_operator(self.name)
        if way.overwrites:  # what was there before may be what the memory happens to hold
            digest = digest_of_rest(sharding, call)
        with moving(digest, self.title):
            try:
                if self.in_place:
                    return _composed_in_place(way.run, args, kwargs, digest)
                result = came_from(way.run(*args, **kwargs), tensors, digest)
            except (IndexError, ValueError) as error:
                raise_torchs(error, call)
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

    def take(
        self, sharding: OpSharding, tensors: Sequence[Tensor], mesh: DeviceMesh
    ) -> list[Tensor]:
        """The local tensors in the layouts that a call needs. Collective if some have to move."""
        if causes.watchers:
            gathers = isinstance(sharding.way, Gathered) and any(sharding.inputs)
            causes.begin_operator(self.name, gathers)
        return local_inputs(sharding, tensors, mesh, self.title)

    def _on_locals(self, sharding: OpSharding, way: OnLocals | Gathered, call: DTensorCall) -> Any:
        """The result of a call, computed from local tensors in the layouts that it needs."""
        locals_ = self.take(sharding, call.tensors, call.mesh)
        if Finish.WRITE in sharding.finish and _is_kept(locals_[0]):
            locals_[0] = locals_[0].clone()
        if isinstance(way, Gathered):
            result = self._on_gathered(sharding, way, call, locals_)
        elif way.replays and _root_requires_grad(locals_[0]):
            with torch.autograd.grad_mode._force_original_view_tracking(True):
                return finished(self, sharding, self._on_shards(sharding, way, call, locals_), call)
        else:
            result = self._on_shards(sharding, way, call, locals_)
        return finished(self, sharding, result, call)

    def _on_shards(
        self, sharding: OpSharding, way: OnLocals, call: DTensorCall, locals_: list[Tensor]
    ) -> Any:
        """The local result of an operator that has a rule."""
        if way.run is None:
            local_args, local_kwargs = with_tensors(call.args, call.kwargs, iter(locals_))
            return call.func(*local_args, **local_kwargs)
        if sharding.makes_views and way.write is None:  # what it needs has moved
            return way.run(*locals_)
        with moving(call.digest, self.title):
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
            with moving(call.digest, self.title):
                result = draw_alike(call.mesh, call.func, *args, **kwargs)
        else:
            result = call.func(*args, **kwargs)
        # Writes to copies are repeated on the tensors, except for the result.
        first = 1 if self.in_place and result is not None else 0
        for number, tensor in enumerate(call.tensors[first:], first):
            layout, local = sharding.inputs[number], locals_[number]
            silent = number in way.silent_writes and not tensor.requires_grad
            if layout is not None and (silent or version_of(local) != versions[number]):
                assert isinstance(tensor, DTensor)
                write(tensor, local, layout[0], self.name)
                moved_views.wrote(tensor, self.title)
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
    """Several results as ``torch.ops`` returns them: no named tuple."""
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
    """The result on reduced tensors if any is partial, else on full tensors. Collective."""
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
    """Compute an operator's result, and write it to the first argument."""
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
