"""Calls of operators on DTensors.

A call has four parts:

1. its *key* (``call_key.py``): function, layouts, dtypes and other arguments. It finds the call's
   sharding in the mesh's cache; the first such call has it propagated (``propagation/``);
2. the *fast path*, if all tensors are taken as they are: torch's operator on the local tensors;
3. otherwise the *path with moves* (``local_inputs.py``): some tensors are redistributed first, or
   taken through an alias that reduces their gradient;
4. the *results* (``results.py``), which become DTensors or are written.
"""

from __future__ import annotations

from cmath import isfinite
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd import in_place_views, local_graph
from tilework.dtensor.base import version_of, wrap_as
from tilework.dtensor.debug import explain
from tilework.dtensor.dispatch import autocast, tensor_attributes
from tilework.dtensor.dispatch.call_key import (
    END,
    add_to_key,
    in_order,
    mesh_of,
    parameter_names,
)
from tilework.dtensor.dispatch.local_inputs import local_inputs
from tilework.dtensor.dispatch.overlapping import is_window, write_in_memory
from tilework.dtensor.dispatch.results import (
    call_with_out,
    came_from,
    reduced,
    replicated_like,
    result_outside,
    show_base,
    wrapped,
    write,
    write_to_plain,
)
from tilework.dtensor.dispatch.tracked import tracked
from tilework.dtensor.dispatch.without_overrides import without_override_checks
from tilework.dtensor.handlers import HANDLERS
from tilework.dtensor.propagation.call import Call
from tilework.dtensor.propagation.plain_inputs import replicated_spec
from tilework.dtensor.propagation.propagation import (
    OpSharding,
    ShardingPropagator,
    written_to,
)
from tilework.dtensor.propagation.pytree import Args, Kwargs, tensors_in, with_tensors
from tilework.dtensor.propagation.refusals import refusals
from tilework.dtensor.propagation.strides import composed_strides, storage_of
from tilework.dtensor.provenance.digests import (
    call_digest,
    digest_of,
    note_write,
    number_seed,
    plain_number,
    seeds_in,
)
from tilework.dtensor.provenance.meaning import moving
from tilework.dtensor.random.generator import draw_alike
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.torch_tensors import (
    is_of_torch_distributed,
    is_torch_dtensor,
    refuse_of_torch_distributed,
    refuse_torch_dtensor,
    refuse_within_torch,
)
from tilework.dtensor.views import copied_views
from tilework.dtensor.views.graph_views import note_view
from tilework.dtensor.views.ungraded_views import check_ungraded
from tilework.mesh.devices import check_device_is_there
from tilework.tiled import torch_init
from tilework.tiled.normalize import normalized
from tilework.tiled.op_names import canonical_name, packet_of, schemas_of
from tilework.tiled.op_rules import unchanged
from tilework.tiled.op_table import Handler, OpEntry, find

try:
    from tilework import _core
except ImportError:  # installed without the core
    _core = None  # type: ignore[assignment]

_grad_enabled = torch.is_grad_enabled
_OpOverloadPacket = torch._ops.OpOverloadPacket


def _local_of(tensor: DTensor) -> Tensor:
    """The local tensor of an operator's argument, at its place in the graph."""
    if tensor._ungraded is not None and _grad_enabled():
        check_ungraded(tensor)
    return local_graph.local_of(tensor)


#: See csrc/operator_call.h.
_FOR_THE_CORE = {
    "dtensor": DTensor,
    "tensor": Tensor,
    "size": torch.Size,
    "sequence_end": END,
    "number_seed": number_seed,
    "refresh": copied_views.refresh_in_graph,
    "local_of": _local_of,
    "digest_of": digest_of,
    "add_to_key": add_to_key,
    "grad_enabled": _grad_enabled,
    "wrap_as": wrap_as,
}
#: Operators that in place leave nothing of the values before.
_OVERWRITE = frozenset({"copy", "fill", "zero"})
#: Operators that write without reading what was there before.
_OVERWRITE_PARTS = _OVERWRITE | {
    *("__setitem__", "fill_diagonal", "index_copy", "index_fill", "index_put", "masked_fill"),
    *("masked_scatter", "put", "scatter"),
}
#: Operators that do nothing unless their third argument says that it is training.
_TRAINED = frozenset({"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"})
#: Operators that may take a tensor to another kind of device.
_TO_DEVICES = frozenset({"to", "cuda", "xpu", "type", "zeros_like", "ones_like", "empty_like"})
#: A mesh that has cached so many shardings forgets all.
_MOST_SHARDINGS = 1 << 14
#: Larger full tensors are not made to ask torch whether it records a call.
_MOST_TRIED = 1 << 16


def dispatch(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The result of a function of torch's where some of its arguments are DTensors."""
    handler = HANDLERS.get(func)
    if handler is None:
        handler = HANDLERS[func] = _handler(func)
    return handler(func, args, kwargs)


def _handler(func: Any) -> Handler:
    if is_of_torch_distributed(func):
        return refuse_of_torch_distributed
    if (of_torch := torch_init.original(func)) is not func:
        return lambda _, args, kwargs: dispatch(of_torch, args, kwargs)
    entry, in_place = find(func)
    if entry.dtensor_handler is not None:
        if entry.dtensor_handler.__module__ == tensor_attributes.__name__:
            return entry.dtensor_handler
        return tracked(canonical_name(func)[0] + "_" * in_place, entry.dtensor_handler)
    if entry.name.endswith((".__get__", ".__set__")):
        return _of_local
    body = None if in_place or entry.is_opaque else without_override_checks(func)
    # With inplace= it calls one of two operators, of which each has a rule.
    if body is not None and (not entry.has_rule or "inplace" in body.__code__.co_varnames):
        return lambda func, args, kwargs: body(*args, **kwargs)
    handler = Operator(entry, in_place).handler()
    return refuse_within_torch(func, handler)


def _of_local(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A property that is the same for the local tensor."""
    return func(*[local_graph.plain(arg) for arg in args], **kwargs)


DTensor._dispatch = staticmethod(dispatch)


class Operator:
    """An operator on DTensors.

    Args:
        entry: Everything that is known of it.
        in_place: True if it writes to its first argument.
    """

    def __init__(self, entry: OpEntry, in_place: bool) -> None:
        self.entry, self.name, self.in_place = entry, entry.name, in_place
        self.propagator = ShardingPropagator(entry, in_place)
        self._values_matter = entry.values_matter
        self._parameters = parameter_names(entry)
        self._writes = in_place or self.name == "__setitem__"
        self._overwrites = in_place and self.name in _OVERWRITE
        #: In errors and digests.
        self._title = self.name + "_" * in_place

    def handler(self) -> Handler:
        """The function that runs its calls: the core's fast path, where there is the core."""
        if _core is None:
            return self
        fast: Handler = _core.operator_call(
            SimpleNamespace(
                **_FOR_THE_CORE,
                call=self.__call__,
                from_key=self._from_key,
                from_sharding=self._from_sharding,
                from_result=self._from_result,
            ),
            self._values_matter,
        )
        if not self.in_place:
            return fast
        name, title = self.name, self._title
        trained = name in _TRAINED

        def run(func: Any, args: Args, kwargs: Kwargs) -> Any:
            if trained and not (args[2] if len(args) > 2 else kwargs.get("train", True)):
                return args[0]
            others = (*args, *kwargs.values()) if kwargs else args
            if args and is_window(name, args[0], others):
                return write_in_memory(title, func, args[0], args, kwargs)
            return fast(func, args, kwargs)

        return run

    # The core's operator_call is the same, in a quarter of the time.
    def __call__(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if kwargs and kwargs.get("out") is not None:
            return call_with_out(self.name, func, args, dict(kwargs))
        others = (*args, *kwargs.values()) if kwargs else args
        if self.in_place and args and is_window(self.name, args[0], others):
            return write_in_memory(self._title, func, args[0], args, kwargs)
        key: list[Any] = [func]
        tensors: list[Tensor] = []
        locals_: list[Any] = []
        seeds: list[Any] = [None]
        as_is, requires_grad = True, False
        for arg in args:
            has_none = add_to_key(arg, key, tensors, seeds, self._values_matter)
            if arg.__class__ is DTensor:
                arg = _local_of(arg)
                requires_grad = requires_grad or arg.requires_grad
            else:
                as_is = as_is and has_none
            locals_.append(arg)
        graded = _grad_enabled()
        return self._from_key(
            func, args, kwargs, key, tensors, locals_, seeds, as_is, graded, requires_grad
        )

    def _from_key(  # noqa: PLR0913
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
        key: list[Any],
        tensors: list[Tensor],
        locals_: list[Any],
        seeds: list[Any],
        as_is: bool,
        graded: bool,
        requires_grad: bool,
    ) -> Any:
        """The result of a call, from what was read of its arguments but for the named ones.

        Args:
            func: torch's function, then its arguments.
            key: The key so far.
            tensors: Tensors among the arguments so far.
            locals_: The arguments, with the local tensors of those that are DTensors.
            seeds: What the digest of the result is made of: first the sharding's, not known yet.
            as_is: True if each tensor is a DTensor, and an argument by itself.
            graded: True if gradients are on.
            requires_grad: True if a local tensor requires one.
        """
        local_kwargs = kwargs
        if kwargs:
            kwargs, local_kwargs, *named = self._read_named(kwargs, key, tensors, seeds)
            as_is, requires_grad = as_is and named[0], requires_grad or named[1]
        mesh = mesh_of(tensors)
        try:
            sharding: OpSharding | None = mesh.op_shardings.get(tuple(key))
        except TypeError:  # an argument without a hash: this call's sharding is not cached
            sharding, key = None, []
        if sharding is None:
            normal = normalized(self.name, args, kwargs)
            if normal is not None:
                return func(*normal[0], **normal[1])
            sharding = self._propagate(key, Call(func, args, kwargs, tensors, mesh))
        seeds[0] = sharding.digest
        digest = hash(tuple(seeds))
        if as_is and (
            sharding.as_is or (sharding.as_is_without_grad and not (graded and requires_grad))
        ):
            result = func(*locals_, **local_kwargs)
            if sharding.output is None or result.__class__ is not Tensor:
                return self._from_result(
                    sharding, result, func, args, kwargs, tensors, mesh, digest
                )
            if result.requires_grad and not graded:  # torch's views still say so
                result = result.detach()
            return wrap_as(DTensor, result, sharding.output, digest)
        return self._from_sharding(sharding, func, args, kwargs, tensors, mesh, digest)

    def _from_result(self, sharding: OpSharding, result: Any, *args: Any) -> Any:
        call = Call(*args)
        if sharding.scales_sums and not _scales_finitely(self.name, call):
            return self._composed(sharding, partial(_of_whole_sums, call.func), call)
        return self._result(sharding, result, call)

    def _from_sharding(self, sharding: OpSharding, *call: Any) -> Any:
        return self._with_moves(sharding, Call(*call))

    # -- the key -----------------------------------------------------------------------------

    def _read_named(
        self, kwargs: Kwargs, key: list[Any], tensors: list[Tensor], seeds: list[Any]
    ) -> tuple[Kwargs, Kwargs, bool, bool]:
        """Named arguments in order, and with local tensors; if these may be used; if one requires
        a gradient.
        """
        if len(kwargs) > 1:
            kwargs = in_order(kwargs, self._parameters)
        local_kwargs, as_is, requires_grad = dict(kwargs), True, False
        for name, arg in kwargs.items():
            key.append(name)
            if add_to_key(arg, key, tensors, seeds, self._values_matter):
                continue
            if arg.__class__ is DTensor:
                local_kwargs[name] = local = _local_of(arg)
                requires_grad = requires_grad or local.requires_grad
            else:
                as_is = False
        return kwargs, local_kwargs, as_is, requires_grad

    def _propagate(self, key: Sequence[Any], call: Call) -> OpSharding:
        """The sharding of a call, cached if it has a key. Local."""
        func, tensors = call.func, call.tensors
        if any(map(is_torch_dtensor, tensors)):
            return OpSharding([], None, composed=partial(_call_from_torch, func, self.in_place))
        if self._writes and not isinstance(written_to(call), DTensor):
            composed = partial(write_to_plain, self._title, func, self.propagator.draws)
            sharding = OpSharding([], None, composed=composed)
            sharding.overwrites = self.propagator.draws or self.name in _OVERWRITE_PARTS
            sharding.digest = self._digest(call)
            return sharding
        if self.name in _TO_DEVICES:
            _check_devices(self.name, call)
        sharding = self.propagator.propagate(call)
        sharding.digest = self._digest(call)
        if key:
            cache = call.mesh.op_shardings
            if len(cache) >= _MOST_SHARDINGS:
                cache.clear()
            cache[tuple(key)] = sharding
        return sharding

    def _digest(self, call: Call) -> int:
        """The digest of everything about a call but its tensors."""
        return call_digest(
            self._title, self._parameters, call.args, call.kwargs, self._values_matter
        )

    # -- the path with moves -----------------------------------------------------------------

    def _with_moves(self, sharding: OpSharding, call: Call) -> Any:
        """The result of a call whose tensors cannot all be taken as they are."""
        stands_in = sharding.composed is not None or sharding.run is not None
        if _grad_enabled() and (
            sharding.ungraded  # torch's would say that integers require one
            # torch records no operator on them, as which others stand in on tensors of their own
            or (stands_in and not (sharding.view or self.in_place) and _is_unrecorded(call))
        ):
            with torch.no_grad():
                return self._with_moves(sharding, call)
        args, tensors, mesh = call.args, call.tensors, call.mesh
        if stands_in and autocast.is_enabled() and not self.in_place:
            cast = autocast.in_float32(self.name, call)
            if cast is not None:
                return cast()
        composed = sharding.composed
        if sharding.scales_sums and not _scales_finitely(self.name, call):
            composed = partial(_of_whole_sums, call.func)
        if composed is not None:
            return self._composed(sharding, composed, call)
        if not mesh.here:
            return args[0] if self.in_place else result_outside(self.name, sharding, mesh)
        gathered = sharding.outputs is None
        if explain.watchers:
            explain.begin_operator(self.name, gathered and any(sharding.inputs))
        locals_ = local_inputs(sharding, tensors, mesh, self._title)
        if sharding.rewrite and (
            # What is kept for its gradient must not be what is then written to.
            (locals_[0].requires_grad and _grad_enabled())
            # Torch refuses writes to what was moved of one; those to a tensor's data it does not.
            or (locals_[0].is_inference() and not torch.is_inference_mode_enabled())
        ):
            locals_[0] = locals_[0].clone()
        if gathered:
            return self._result(sharding, self._on_gathered(sharding, call, locals_), call)
        if sharding.replays and _root_requires_grad(locals_[0]):
            with torch.autograd.grad_mode._force_original_view_tracking(True):
                return self._on_locals(sharding, call, locals_)
        return self._on_locals(sharding, call, locals_)

    def _on_locals(self, sharding: OpSharding, call: Call, locals_: list[Tensor]) -> Any:
        """The result of a call, computed from local tensors in the layouts that it needs."""
        func, args, kwargs, _, _, digest = call
        if sharding.run is not None:
            if sharding.view:  # which has moved what it needs
                return self._result(sharding, sharding.run(*locals_), call)
            with moving(digest, self._title):
                result = sharding.run(*locals_)
            if not (self.in_place and result is locals_[0]):  # else it has written there
                result = copied_views.as_no_view(result)
            return self._result(sharding, result, call)
        local_args, local_kwargs = with_tensors(args, kwargs, iter(locals_))
        return self._result(sharding, func(*local_args, **local_kwargs), call)

    def _composed(self, sharding: OpSharding, composed: Callable[..., Any], call: Call) -> Any:
        """The result of a call that other operators compute."""
        _, args, kwargs, tensors, _, digest = call
        if sharding.overwrites:  # what was there before may be what the memory happens to hold
            digest = _digest_of_rest(sharding, call)
        with moving(digest, self._title), refusals(call):
            if self.in_place:
                return _composed_in_place(composed, args, kwargs, digest)
            result = came_from(composed(*args, **kwargs), tensors, digest)
        if isinstance(result, tuple) and packet_of(call.func).__class__ is _OpOverloadPacket:
            result = _as_overloads_give(call.func, result)
        return self._with_strides(sharding, result, call)

    def _on_gathered(self, sharding: OpSharding, call: Call, locals_: list[Tensor]) -> Any:
        """The local result of an operator without a rule, on full tensors."""
        versions = [version_of(tensor) for tensor in locals_]
        args, kwargs = with_tensors(call.args, call.kwargs, iter(locals_))
        if self.propagator.draws:
            with moving(call.digest, self._title):
                result = draw_alike(call.mesh, call.func, *args, **kwargs)
        else:
            result = call.func(*args, **kwargs)
        # What it has written to copies is written to the tensors, but for what it returns.
        first = 1 if self.in_place and result is not None else 0
        for number, tensor in enumerate(call.tensors[first:], first):
            layout, local = sharding.inputs[number], locals_[number]
            silent = number in sharding.silent_writes and not tensor.requires_grad
            if layout is not None and (silent or version_of(local) != versions[number]):
                assert isinstance(tensor, DTensor)
                write(tensor, local, layout[0], self.name)
                copied_views.wrote(tensor)
                note_write(tensor, hash((call.digest, number)))
        return result

    # -- results -----------------------------------------------------------------------------

    def _with_strides(self, sharding: OpSharding, result: Any, call: Call) -> Any:
        """A composed result, whose tensors have the strides that torch's operator gives them."""
        if not sharding.knows_strides:
            results = tensors_in(result)
            specs = [tensor._spec for tensor in results if isinstance(tensor, DTensor)]
            if len(specs) == len(results):
                sharding.strides = composed_strides(self.entry, call, specs)
            sharding.knows_strides = True
        if sharding.strides is not None:
            for tensor, its in zip(tensors_in(result), sharding.strides, strict=True):
                assert isinstance(tensor, DTensor)
                is_new = tensor._viewed is None
                is_new = is_new and all(tensor is not each for each in call.tensors)
                if is_new or self.entry.is_view:
                    tensor._spec = tensor._spec.with_strides(its)
        return result

    def _maybe_local_copy(self, sharding: OpSharding, result: DTensor, call: Call) -> DTensor:
        """A view, marked as a copy if the local tensor could not be viewed."""
        base = call.tensors[0]
        assert isinstance(base, DTensor)
        if sharding.copied or storage_of(result._local_tensor) == storage_of(base._local_tensor):
            return copied_views.viewed(  # type: ignore[no-any-return]
                result, sharding.copied, call.func, call.args, call.kwargs
            )
        copied_views.mark_local_copy(result, base)
        return result

    def _result(self, sharding: OpSharding, result: Any, call: Call) -> Any:
        """The result of a call, from the local one."""
        if self.in_place and result is not None:
            digest = call.digest
            if self._overwrites:
                digest = _digest_of_rest(sharding, call)
            return self._written(sharding, call.args[0], result, digest)
        outputs = sharding.outputs
        if sharding.reduces_nonlinearly:
            result, outputs = reduced(result, outputs)
        if outputs is not None and result.__class__ is Tensor:
            if sharding.may_be_input and call.args and result is call.tensors[0]._local_tensor:  # type: ignore[attr-defined]
                return call.tensors[0]
            if sharding.fresh:
                result = _own_memory(result, call.tensors[0])
            if result.requires_grad and not _grad_enabled():
                result = result.detach()
            result = wrap_as(DTensor, result, outputs[0], call.digest)
            if sharding.may_copy_locally and result._local_tensor._base is None:
                show_base(result, call.tensors[0])
                return self._maybe_local_copy(sharding, result, call)
        else:
            result = wrapped(result, outputs, call.mesh, call.digest)
        if sharding.view:
            show_base(result, call.tensors[0])
            base = call.args[0] if call.args else None
            if not sharding.copied and result.__class__ is DTensor and base.__class__ is DTensor:
                view = base._view_of
                if view is None:  # mostly: a view that shares memory
                    result._viewed = (base, base._spec, call.func, call.args, call.kwargs)
                    note_view(result, base)
                    return result
            return copied_views.viewed(result, sharding.copied, call.func, call.args, call.kwargs)
        return result

    def _written(self, sharding: OpSharding, target: Any, result: Any, digest: int) -> Any:
        """The first argument, which the operator has written to or which gets the result."""
        if result is NotImplemented:  # of x **= what is no number, which Python then refuses
            return result
        assert isinstance(target, DTensor)  # the propagator refuses others
        if sharding.outputs is None and result.shape != target._spec.size:
            in_place_views.become(target, replicated_like(target, result))
            note_write(target, digest)
            return target
        if sharding.rewrite and result is not target._local_tensor:
            outputs = sharding.outputs
            spec = outputs[0] if outputs else replicated_spec(result, target._spec.mesh)
            write(target, result, spec, self.name, digest)
        note_write(target, digest)
        graded = target._local_tensor.requires_grad
        if graded:
            local_graph.mirror_requires_grad(target)
        copied_views.wrote(target)
        if graded:
            local_graph.mirror_in_bases(target)
        return target


def _root_requires_grad(local: Tensor) -> bool:
    """True if what a local tensor is a view of requires a gradient, or it is none."""
    return bool((local if local._base is None else local._base).requires_grad)


def _as_overloads_give(func: Any, tensors: tuple[Any, ...]) -> Any:
    """Results as ``torch.ops`` have them: in lists or plain tuples, where functions of torch's name
    the items of tuples.
    """
    returns = [schema.returns for schema in schemas_of(packet_of(func))]
    has_list = any(its and str(its[0].type) == "List[Tensor]" for its in returns)
    return list(tensors) if has_list else tuple(tensors)


def _digest_of_rest(sharding: OpSharding, call: Call) -> int:
    """The digest of a call without that of its first argument."""
    return hash(tuple(seeds_in(call.kwargs, seeds_in(call.args[1:], [sharding.digest]))))


def _is_unrecorded(call: Call) -> bool:
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


def _check_devices(name: str, call: Call) -> None:
    """Raise RuntimeError where a tensor is to go to devices that are not there."""
    kinds = [name] if name in ("cuda", "xpu") else []
    for arg in (*call.args[1:], *call.kwargs.values()):
        if isinstance(arg, (str, torch.device)):
            try:
                kinds.append(torch.device(arg).type)
            except RuntimeError:  # a dtype's name, for one, which torch refuses itself
                continue
    for kind in kinds:
        check_device_is_there(kind, f"{name} of a DTensor on {call.mesh}")


def _own_memory(result: Tensor, tensor: Tensor) -> Tensor:
    """A local result that shares no memory with the local tensor of an input."""
    assert isinstance(tensor, DTensor)
    shared = storage_of(result) == storage_of(tensor._local_tensor)
    return result.clone() if shared else result


def _call_from_torch(func: Any, in_place: bool, /, *args: Any, **kwargs: Any) -> Any:
    """The result of a call in which torch's DTensors become DTensors."""
    tensors = tensors_in([*args, *kwargs.values()])
    try:
        if in_place:
            refuse_torch_dtensor(tensors[0], "an operator in place")
        native = [DTensor.from_torch(x) if is_torch_dtensor(x) else x for x in tensors]
    except TypeError as error:
        # In ``a + b`` torch makes NotImplemented of a TypeError.
        raise RuntimeError(str(error)) from None
    args_of_native, kwargs_of_native = with_tensors(args, kwargs, iter(native))
    return func(*args_of_native, **kwargs_of_native)


def _scales_finitely(name: str, call: Call) -> bool:
    """True if all numbers among the arguments are finite, and none divides by zero."""
    for arg in (*call.args, *call.kwargs.values()) if call.kwargs else call.args:
        kind = arg.__class__
        number = arg if kind is float or kind is int else _number_of(arg)
        if number is not None and not (isfinite(number) and (number or name != "div")):
            return False
    return True


def _number_of(arg: Any) -> complex | None:
    return None if isinstance(arg, Tensor) else plain_number(arg)


def _of_whole_sums(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The result of a call with partial tensors reduced; if there are none, with full ones."""
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
    """Compute anew what an operator writes to its first argument, and write it.

    To a plain tensor it writes itself.
    """
    target = args[0] if args else None
    if not isinstance(target, DTensor):
        return composed(*args, **kwargs)
    if composed is unchanged:
        return target
    # What is kept for its gradient must not be what is then written to.
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
