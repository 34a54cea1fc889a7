"""Calls of operators on DTensors.

A call has four parts:

1. the *key*: function, layouts, dtypes and other arguments. It finds the call's sharding in the
   mesh's cache; the first such call has it propagated (``propagation/``);
2. the *fast path*, if all tensors are taken as they are: torch's operator on the local tensors;
3. otherwise the way that the sharding says (``ways.py``): some tensors are redistributed first, or
   taken through an alias that reduces their gradient;
4. the steps to *results*, which become DTensors or are written.

Functions that make DTensors by themselves are :func:`tracked`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import signature
from operator import index
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tilework.comm import provenance_digest
from tilework.dtensor.autograd import local_graph
from tilework.dtensor.base import HANDLERS, wrap_as
from tilework.dtensor.debug import causes
from tilework.dtensor.dispatch import tensor_attributes
from tilework.dtensor.dispatch.checked_writes import check_writable, check_write
from tilework.dtensor.dispatch.results import call_with_out, came_from, write_to_plain
from tilework.dtensor.dispatch.ways import Ways
from tilework.dtensor.propagation.dtensor_call import (
    Args,
    DTensorCall,
    Kwargs,
    tensors_in,
    with_tensors,
    without_override_checks,
)
from tilework.dtensor.propagation.op_sharding import Composed, OpSharding
from tilework.dtensor.propagation.propagator import ShardingPropagator, written_to
from tilework.dtensor.provenance.content import content_digest
from tilework.dtensor.provenance.digests import (
    call_digest,
    digest_of,
    moving,
    note_write,
    number_seed,
    seeds_in,
    stable_digest,
)
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.torch_tensors import (
    is_of_torch_distributed,
    is_torch_dtensor,
    refuse_of_torch_distributed,
    refuse_torch_dtensor,
    refuse_within_torch,
)
from tilework.dtensor.views import moved_views
from tilework.dtensor.views.moved_views import check_fresh
from tilework.dtensor.views.places import count_write
from tilework.mesh import DeviceMesh
from tilework.mesh.internal import check_device_is_there
from tilework.models import original as original_init
from tilework.optional_core import core as _core
from tilework.tiled import (
    Handler,
    OpEntry,
    TiledTensor,
    aten_parameters,
    canonical_name,
    find,
    normalized,
    schemas_of,
)

NUMBERS = frozenset({int, float, bool, complex})
_SEQUENCES = frozenset({list, tuple, torch.Size})
#: Ends a sequence in a key.
END = object()


def add_to_key(
    arg: Any, key: list[Any], tensors: list[Tensor], seeds: list[Any], values_matter: bool
) -> bool:
    """Add an argument to the key, and tensors to ``tensors``; True if it has none."""
    if isinstance(arg, Tensor):
        _add_tensor(arg, key, tensors, seeds)
        return False
    kind = arg.__class__
    key.append(kind)
    if kind in NUMBERS:
        if values_matter:
            key.append(arg if arg and kind is not complex else repr(arg))  # 0.0 equals -0.0
        else:
            seeds.append(number_seed(arg))
        return True
    if kind in _SEQUENCES or kind is dict:
        items = arg if kind is not dict else [part for item in arg.items() for part in item]
        plain = [add_to_key(item, key, tensors, seeds, values_matter) for item in items]
        key.append(END)
        return all(plain)
    if kind is slice:  # slices have no hash, and a tensor in one stands for a number
        ends = (arg.start, arg.stop, arg.step)
        arg = tuple([end if end is None else index(end) for end in ends])
    elif isinstance(arg, float | complex):  # numpy's
        arg = repr(arg)
    key.append(arg)
    return True


def _add_tensor(arg: Tensor, key: list[Any], tensors: list[Tensor], seeds: list[Any]) -> None:
    kind = arg.__class__
    if kind is DTensor:
        dtensor: Any = arg
        if dtensor._view_of is not None:
            moved_views.check_fresh(dtensor)
        tensors.append(arg)
        seeds.append(digest_of(dtensor))
        key.append(id(dtensor._spec))
        key.append(dtensor._local_tensor.dtype)
        return
    if kind is not Tensor and isinstance(arg, TiledTensor):
        raise RuntimeError(
            f"a {kind.__name__} and a DTensor meet in one operator: convert the {kind.__name__} "
            f"with to_dtensor(), or the DTensor with to_sharded()"
        )
    tensors.append(arg)
    seeds.append(content_digest(arg))
    key += (kind, arg.shape, arg.dtype)
    if arg.layout is torch.strided and not arg.is_contiguous():
        key.append(arg.stride())


def parameter_names(entry: OpEntry) -> tuple[str, ...]:
    """The names of an operator's arguments, positional names first."""
    by_rules = [
        list(signature(rule).parameters.values())
        for rule in (entry.dtensor_rule, entry.rule)
        if rule is not None
    ]
    of_torch = ["input" if name == "self" else name for name in aten_parameters(entry.name)]
    positions = next(
        (each for each in by_rules if each and all(p.kind is not p.VAR_POSITIONAL for p in each)),
        None,
    )
    names = [name for name in of_torch if name != "dtype"]
    if positions is not None:
        names = [parameter.name for parameter in positions]
    others = [parameter.name for each in by_rules for parameter in each]
    return tuple(dict.fromkeys([*names, *others, "input", *of_torch]))


def in_order(kwargs: Kwargs, names: Sequence[str]) -> Kwargs:
    """Arguments in the order of ``names``, others last: rules count tensors by their place."""
    return {name: kwargs[name] for name in names if name in kwargs} | kwargs


def mesh_of(tensors: Sequence[Tensor]) -> DeviceMesh:
    """The mesh of a call's DTensors; ValueError if they are on different meshes."""
    mesh: DeviceMesh | None = None
    for tensor in tensors:
        if tensor.__class__ is DTensor:
            other = tensor._spec.mesh
            if mesh is None:
                mesh = other
            elif other is not mesh and other != mesh:
                raise ValueError(
                    f"DTensors on different meshes meet in one operator: {mesh} and {other}; make "
                    f"one of them plain with full_tensor(), and a DTensor on the other's mesh"
                )
    assert mesh is not None
    return mesh


#: Random fills, which leave nothing of the values before.
_FILLS = frozenset(
    f"{name}_"
    for name in (
        *("uniform", "normal", "log_normal", "exponential", "cauchy", "geometric", "random"),
        *("bernoulli", "constant", "kaiming_uniform"),
    )
)
#: In place, but they only change dims, or the place in the graph.
_WRITES_NOTHING = frozenset(
    f"{name}_"
    for name in (*("transpose", "t", "squeeze", "unsqueeze"), *("detach", "requires_grad", "set"))
)


def tracked(name: str, handler: Handler) -> Handler:
    """A handler with the operands' digest; a name with a final ``_`` writes to the first."""
    own = stable_digest(name)
    writes = name.endswith("_") and not name.endswith("__")  # as __float__ does
    first = int(name in _FILLS)

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
    """The operands' digest on each mesh; ranks of one mesh may differ in other meshes."""
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


_grad_enabled = torch.is_grad_enabled


#: See csrc/python/operator_call.h.
_FOR_THE_CORE = {
    "dtensor": DTensor,
    "size": torch.Size,
    "sequence_end": END,
    "number_seed": number_seed,
    "refresh": check_fresh,
    "local_of": local_graph.local_of,
    "digest_of": digest_of,
    "add_to_key": add_to_key,
    "causes": causes,
}
#: Operators that write without reading what was there before.
_OVERWRITE = frozenset({
    *("copy", "fill", "zero", "__setitem__", "fill_diagonal", "index_copy", "index_fill"),
    *("index_put", "masked_fill", "masked_scatter", "put", "scatter"),
})  # fmt: skip
#: Operators that do nothing unless their third argument says that it is training.
_TRAINED = frozenset({"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"})
#: Operators that may take a tensor to another kind of device.
_TO_DEVICES = frozenset({"to", "cuda", "xpu", "type", "zeros_like", "ones_like", "empty_like"})
#: A mesh that has cached so many shardings forgets all.
_MOST_SHARDINGS = 1 << 14


def dispatch(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The result of a torch function with DTensors among the arguments."""
    handler = HANDLERS.get(func)
    if handler is None:
        handler = HANDLERS[func] = _handler(func)
    return handler(func, args, kwargs)


def _handler(func: Any) -> Handler:
    if is_of_torch_distributed(func):
        return refuse_of_torch_distributed
    if isinstance(func, FunctionType) and (of_torch := original_init(func)) is not func:
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
    if isinstance(func, FunctionType):
        handler = _by_position(handler, _shared_places(func, entry))
    return refuse_within_torch(func, handler)


def _shared_places(func: FunctionType, entry: OpEntry) -> list[str]:
    """A function's parameters; "" where a rule or torch's operator has another at the place."""
    rules = [rule for rule in (entry.dtensor_rule, entry.rule) if rule is not None]
    others = [
        [p.name for p in signature(rule).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        for rule in rules
    ] + [[argument.name for argument in schema.arguments] for schema in schemas_of(entry.name)]
    names = func.__code__.co_varnames[: func.__code__.co_argcount]
    return [
        name if all(name in other[at : at + 1] for other in others) else ""
        for at, name in enumerate(names)
    ]


def _by_position(handler: Handler, names: Sequence[str]) -> Handler:
    """A handler that takes named arguments by position: the core reads tensors among those only."""

    def run(func: Any, args: Args, kwargs: Kwargs) -> Any:
        if kwargs:
            given, kwargs = [*args], dict(kwargs)
            for name in names[len(args) :]:
                if name not in kwargs:
                    break
                given.append(kwargs.pop(name))
            args = tuple(given)
        return handler(func, args, kwargs)

    return run


def _of_local(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The value of a property that a DTensor has in common with the local tensor: read there."""
    return func(*[local_graph.plain(arg) for arg in args], **kwargs)


DTensor._dispatch = staticmethod(dispatch)
if _core is not None:
    _intercept: Any = _core.torch_function(HANDLERS, DTensor.__torch_function__)
    DTensor.__torch_function__ = _intercept  # type: ignore[method-assign]


class Operator:
    """An operator on DTensors."""

    def __init__(self, entry: OpEntry, in_place: bool) -> None:
        self.entry, self.name, self.in_place = entry, entry.name, in_place
        self._propagator, self._ways = ShardingPropagator(entry, in_place), Ways(entry, in_place)
        self._values_matter = entry.values_matter
        self._parameters = parameter_names(entry)
        self._writes = in_place or self.name == "__setitem__"
        #: In errors and digests.
        self._title = self.name + "_" * in_place

    def handler(self) -> Handler:
        """The function that runs the operator's calls: the core's fast path, if there is a core."""
        if _core is None:
            return self
        fast: Handler = _core.operator_call(
            SimpleNamespace(
                **_FOR_THE_CORE,
                call=self.__call__,
                from_key=self._from_key,
                from_sharding=self._from_sharding,
                from_result=self._from_result,
                take=self._ways.take,
            ),
            self._values_matter,
        )
        if not self.in_place:
            return fast
        name = self.name
        trained = name in _TRAINED

        def run(func: Any, args: Args, kwargs: Kwargs) -> Any:
            if trained and not (args[2] if len(args) > 2 else kwargs.get("train", True)):
                return args[0]
            if args:
                check_write(name, args[0], (*args, *kwargs.values()) if kwargs else args)
            return fast(func, args, kwargs)

        return run

    # The core's operator_call is the same, in a quarter of the time.
    def __call__(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if kwargs and kwargs.get("out") is not None:
            return call_with_out(self.name, func, args, dict(kwargs))
        if self.in_place and args:
            check_write(self.name, args[0], (*args, *kwargs.values()) if kwargs else args)
        key: list[Any] = [func]
        tensors: list[Tensor] = []
        locals_: list[Any] = []
        seeds: list[Any] = [None]
        as_is, requires_grad = True, False
        for arg in args:
            has_none = add_to_key(arg, key, tensors, seeds, self._values_matter)
            if arg.__class__ is DTensor:
                arg = local_graph.local_of(arg)
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
        """The result of a call, after all arguments but the named ones were read."""
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
            sharding = self._propagate(key, DTensorCall(func, args, kwargs, tensors, mesh))
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

    def _from_result(self, sharding: OpSharding, result: Any, *call: Any) -> Any:
        return self._ways.finished(sharding, result, DTensorCall(*call))

    def _from_sharding(self, sharding: OpSharding, *call: Any) -> Any:
        return self._ways.run(sharding, DTensorCall(*call))

    # -- the key -----------------------------------------------------------------------------

    def _read_named(
        self, kwargs: Kwargs, key: list[Any], tensors: list[Tensor], seeds: list[Any]
    ) -> tuple[Kwargs, Kwargs, bool, bool]:
        """Read the named arguments; return them, also as local tensors, and two flags."""
        if len(kwargs) > 1:
            kwargs = in_order(kwargs, self._parameters)
        local_kwargs, as_is, requires_grad = dict(kwargs), True, False
        for name, arg in kwargs.items():
            key.append(name)
            if add_to_key(arg, key, tensors, seeds, self._values_matter):
                continue
            if arg.__class__ is DTensor:
                local_kwargs[name] = local = local_graph.local_of(arg)
                requires_grad = requires_grad or local.requires_grad
            else:
                as_is = False
        return kwargs, local_kwargs, as_is, requires_grad

    def _propagate(self, key: Sequence[Any], call: DTensorCall) -> OpSharding:
        """Find the sharding of a call, and cache it under ``key`` unless that is empty. Local."""
        func, tensors = call.func, call.tensors
        if any(x.__class__ is not DTensor and is_torch_dtensor(x) for x in tensors):
            return OpSharding(Composed(partial(_call_from_torch, func, self.in_place)))
        digest = call_digest(
            self._title, self._parameters, call.args, call.kwargs, self._values_matter
        )
        if self._writes and not isinstance(written_to(call), DTensor):
            composed = partial(write_to_plain, self._title, func, self.entry.draws)
            overwrites = self.entry.draws or self.name in _OVERWRITE
            return OpSharding(Composed(composed, overwrites), digest=digest)
        if self.name in _TO_DEVICES:
            _check_devices(self.name, call)
        sharding = self._propagator.propagate(call)
        sharding.digest = digest
        if key:
            cache = call.mesh.op_shardings
            if len(cache) >= _MOST_SHARDINGS:
                cache.clear()
            cache[tuple(key)] = sharding
        return sharding


def _check_devices(name: str, call: DTensorCall) -> None:
    """Raise RuntimeError if a call moves a tensor to a type of device that this machine lacks."""
    kinds = [name] if name in ("cuda", "xpu") else []
    for arg in (*call.args[1:], *call.kwargs.values()):
        if isinstance(arg, (str, torch.device)):
            try:
                kinds.append(torch.device(arg).type)
            except RuntimeError:  # not a device, such as a dtype's name, which torch refuses itself
                continue
    for kind in kinds:
        check_device_is_there(kind, f"{name} of a DTensor on {call.mesh}")


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
