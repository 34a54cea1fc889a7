"""Tensors of a pretended rank: without memory where values are of no use.

Tensors of integers and truth values that a program makes have values, since Python reads them
(indices, orders of rows), and so have single floats that it writes, and everything that is computed
from values alone. Other tensors of floats have none, nor has anything that is computed from them;
but they are finite, unless the program gives an infinity to an operator.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tilework.comm.per_call.internal import Pretence, call_site
from tilework.dtensor import DTensor
from tilework.dtensor.internal import tensors_in
from tilework.errors import PretendError
from tilework.plan.attention import attention, choice_of
from tilework.plan.repeats import keep, key_of, repeated
from tilework.plan.replacing import is_truthful, truthful
from tilework.plan.unknown import UnknownNumber, decided, is_unknown, refuse, with_nan
from tilework.tiled.rules import call_on_meta

#: Larger tensors of integers have no values, either.
MOST_VALUES = 1 << 22
_MEMORYLESS = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
_FILLS = (
    *("normal_", "uniform_", "zero_", "fill_", "random_", "bernoulli_", "exponential_"),
    *("cauchy_", "geometric_", "log_normal_"),
)
_aten = torch.ops.aten


class AskedForMeta(TorchFunctionMode):
    """Knows whether the program itself names the device ``meta``.

    torch's own code for tensors without memory names the device of arguments, which is ``meta``,
    and so does tilework's in Python; where that means meta itself, it says so by a text.
    """

    def __init__(self, pretence: Pretence) -> None:
        super().__init__()
        self._pretence = pretence
        #: True while a function runs that the program has given the device to.
        self.is_asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if UnknownNumber in types:
            args, kwargs = with_nan((args, kwargs))
        given = [x for x in (*args, *kwargs.values()) if _is_meta(x)]
        by_text = any(isinstance(x, str) for x in given)
        if not given or self.is_asked or not (by_text or _is_asking(func, sys._getframe(1))):
            return func(*args, **kwargs)
        self.is_asked = True
        try:
            result = func(*args, **kwargs)
            if args and result is args[0] and not self._pretence.is_absent(result):
                return _aten._to_copy.default(result, device="meta")  # torch takes it for there
            return result
        finally:
            self.is_asked = False


def _is_asking(func: Any, frame: Any) -> bool:
    """True for code of programs; operators come from modes, which torch's code in C has called."""
    return not (isinstance(func, torch._ops.OpOverload) or is_truthful(frame))


def _is_meta(value: Any) -> bool:
    """True for the device meta, or for the name "meta"."""
    return isinstance(value, str | torch.device) and str(value).partition(":")[0] == "meta"


class WithoutMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the mode, operators of this thread make tensors as the module says."""

    def __init__(self, pretence: Pretence, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pretence = pretence
        self.device = device
        self.asked = AskedForMeta(pretence)
        #: True once the program has given an infinity to an operator that keeps it.
        self.has_infinities = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would load the compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind is not Tensor and not issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # as of a tensor that another stage of a pipeline has
        kwargs = dict(kwargs or {})
        tensors = tensors_in((args, kwargs))
        if not self.has_infinities and math.inf in map(_size, args) and not _compares(func):
            self.has_infinities = True
        named = kwargs.get("device")
        on_meta = self.asked.is_asked or (
            (named is None or _is_meta(named)) and any(map(self._is_absent, tensors))
        )
        result = self._run(func, tensors, args, kwargs)
        if on_meta:
            for tensor in tensors_in(result):
                self.pretence.note_absent(tensor)
        return result

    def _is_absent(self, tensor: Tensor) -> bool:
        return self.pretence.is_absent(tensor)

    def _run(self, func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _SPECIAL:
            return _SPECIAL[func](self, func, args, kwargs)
        if not tensors or _is_like(func):
            return self._made(func, tensors, args, kwargs)
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = torch.device("cpu")
            kwargs.pop("pin_memory", None)
        on_meta = [tensor.is_meta for tensor in tensors]
        if any(on_meta):
            return self._without(func, args, kwargs, all(on_meta))
        lacks = not all(map(self.pretence.has_values, tensors))
        if lacks and _is_question(func):
            return decided()
        result = truthful(func, *args, **kwargs)
        if lacks or any(map(is_unknown, (*args, *kwargs.values()))):
            for tensor in tensors_in(result):
                self.pretence.lose(tensor)
        return result

    def _made(self, func: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operator that needs no values of tensors."""
        asked = kwargs.pop("device", None)
        on_meta = asked is not None and torch.device(asked).type == "meta"
        generator = {} if "generator" not in kwargs else {"generator": kwargs.pop("generator")}
        kwargs.pop("pin_memory", None)
        args, options = tree_map_only(Tensor, _as_meta, (args, kwargs))
        if not _takes_device(func):
            return func(*args, **options, **generator)
        nothing = dict.fromkeys(generator)
        result = truthful(func, *args, **options, **nothing, device="meta")
        if on_meta or not isinstance(result, Tensor) or not _may_have_values(func, result):
            return result
        if any(map(is_unknown, args)):
            return result
        is_like_float = tensors and tensors[0].is_meta and tensors[0].is_floating_point()
        if is_like_float and (result.is_floating_point() or func.__name__.startswith("empty")):
            return result
        if tensors:
            return self._like(func, args, kwargs, result)
        return func(*args, **kwargs, **generator, device="cpu")

    def _like(self, func: Any, args: Any, kwargs: dict[str, Any], shown: Tensor) -> Tensor:
        """The result of an operator such as zeros_like, with values."""
        first = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype)
        return func(first, *args[1:], **kwargs, device="cpu")  # type: ignore[no-any-return]

    def _without(self, func: Any, args: Any, kwargs: dict[str, Any], all_meta: bool) -> Any:
        """The result of an operator on tensors some of which have no memory, or all."""
        known = self._by_premise(func, args)
        if known is not None:
            return torch.full(args[0].shape, known, dtype=torch.bool)
        if _is_question(func):
            return decided()
        return self._computed(func, args, kwargs, all_meta)

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any], all_meta: bool) -> Any:
        kwargs |= {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
        kwargs |= {"generator": None} if "generator" in kwargs else {}
        written = _written(func)
        if all_meta and written == (0,) and len(tensors_in((args, kwargs))) == 1 and _is_fill(func):
            return args[0]
        key = key_of(func, args, kwargs) if all_meta and func not in _CHOICES else None
        if key is not None and (again := repeated(key, args)) is not None:
            return again
        given, options = (
            (args, kwargs) if all_meta else tree_map_only(Tensor, _as_meta, (args, kwargs))
        )
        try:
            result = self._tried(func, (args, kwargs), (given, options))
        except (NotImplementedError, RuntimeError) as error:
            raise self._explained(func, error) from error
        if key is not None:
            keep(key, args, result)
        if not written:
            return self._chosen(func, args, kwargs, result) if func in _CHOICES else result
        return self._wrote(written, args, kwargs, result)

    def _chosen(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        """Choices among numbers without values: all alternatives equally often, as reports say."""
        names = (each.name for each in func._schema.arguments)
        given = dict(zip(names, args, strict=False)) | kwargs
        dim, whole = given.get("dim", -1), given["self"]
        indices = result if isinstance(result, Tensor) else result[1]
        if dim is None or not whole.dim() or indices.numel() > MOST_VALUES:
            return result
        name = func._schema.name.partition("::")[2]
        self.pretence.assumed.add(f"{name} at {call_site()} chooses each alternative equally often")
        even = torch.arange(indices.numel()).remainder(whole.shape[dim])
        if indices is result:
            return even.view(indices.shape)
        return result[0], even.view(indices.movedim(dim, -1).shape).movedim(-1, dim).contiguous()

    def _tried(self, func: Any, given: tuple[Any, Any], shown: tuple[Any, Any]) -> Any:
        """The result without values; from what has values where torch needs it for the sizes."""
        try:
            return truthful(call_on_meta, func, *shown)
        except (NotImplementedError, RuntimeError):
            real = [tensor for tensor in tensors_in(given) if not tensor.is_meta]
            if not real or not all(map(self.pretence.has_values, real)) or _written(func):
                raise
            return truthful(func, *given[0], **given[1])

    def _by_premise(self, func: Any, args: Any) -> bool | None:
        """The answer of all elements to a question, since floats are finite; None: unknown."""
        name, first = func.__name__.partition(".")[0], args[0] if args else None
        if not isinstance(first, Tensor) or not first.is_meta or not first.is_floating_point():
            return None
        if first.numel() > MOST_VALUES or (self.has_infinities and first.numel() != 1):
            return None
        if name in ("isnan", "isinf", "isposinf", "isneginf"):
            return False
        other = args[1] if len(args) > 1 else None
        if name in ("eq", "ne") and other is first:
            return bool(name == "eq")
        if _compares(func) and _size(other) == math.inf:
            return bool(getattr(operator, name)(0.0, other))
        return None

    def _wrote(
        self, written: Sequence[int | str], args: Any, kwargs: dict[str, Any], result: Any
    ) -> Any:
        """The result of an operator that has written arguments whose values are lost."""
        targets = [args[i] if isinstance(i, int) else kwargs.get(i) for i in written]
        for tensor in tensors_in(targets):
            self.pretence.lose(tensor)
        alone = isinstance(result, Tensor) and len(targets) == 1
        return targets[0] if alone and isinstance(targets[0], Tensor) else result

    def _explained(self, func: Any, error: Exception) -> Exception:
        """The error to raise where torch cannot run an operator without values."""
        if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
            return error
        return PretendError(
            f"{func} at {call_site()} needs the values of tensors, which only a real run has: "
            f"leave this out of the part that is planned. torch: {error}"
        )


def _scalar(mode: WithoutMemory, func: Any, args: Any, kwargs: Any) -> Any:
    if mode.pretence.has_values(args[0]) or mode._is_absent(args[0]):
        return truthful(func, *args, **kwargs)  # on meta torch raises
    if args[0].is_floating_point():
        return float("nan")
    return refuse("reads the value of a tensor")


def _attention(mode: WithoutMemory, func: Any, args: Any, kwargs: Any) -> Any:
    if mode.device.type != "cpu" or not args[0].is_meta:
        return func.decompose(*args, **kwargs)
    return attention(*args, **kwargs)


def _choice(mode: WithoutMemory, func: Any, args: Any, kwargs: Any) -> Any:
    is_here = mode.device.type != "cpu" or not args[0].is_meta
    return func(*args, **kwargs) if is_here else choice_of(*args, **kwargs)


def _copied(mode: WithoutMemory, func: Any, args: Any, kwargs: Any) -> Any:
    """A copy to a device: here there is a single device, and meta."""
    if mode._is_absent(args[0]) and str(kwargs.get("device") or "meta") != "meta":
        raise NotImplementedError(
            f"Cannot copy out of meta tensor at {call_site()}: there is no data. Use to_empty() to "
            f"move a module from meta to another device"
        )
    if args[0].is_meta:
        return mode._without(func, args, kwargs, all_meta=True)
    asked = kwargs.get("device")
    if asked is not None and torch.device(asked).type != "meta":
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    result = func(*args, **kwargs)
    if not mode.pretence.has_values(args[0]):
        mode.pretence.lose(result)
    return result


#: Operators that choose, as routers do.
_CHOICES = (_aten.topk.default, _aten.argmax.default)


def _unscaled(mode: WithoutMemory, func: Any, args: Any, kwargs: Any) -> None:
    """Gradients divided by their scale; no element of them is found that is not finite."""
    if mode.has_infinities or not any(grad.is_meta for grad in args[0]):
        mode._without(func, args, kwargs, all_meta=False)


def _set(mode: WithoutMemory, func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor on a storage, which has no memory here where the tensor has none."""
    storage: Any = args[1]
    if args[0].is_meta and storage.device.type != "meta":
        made: Any = torch.UntypedStorage
        storage = made(storage.nbytes(), device="meta")
    return truthful(func, args[0], storage, *args[2:], **kwargs)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
    _aten.set_.source_Storage_storage_offset: _set,
    _aten._local_scalar_dense.default: _scalar,
    _aten._to_copy.default: _copied,
    _aten._fused_sdp_choice.default: _choice,
    _aten.scaled_dot_product_attention.default: _attention,
}


def _as_meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _may_have_values(func: Any, tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        is_written = torch.Tag.nondeterministic_seeded not in func.tags
        return is_written and tensor.numel() == 1 and not func.__name__.startswith("empty")
    return tensor.numel() <= MOST_VALUES


@cache
def _is_fill(func: Any) -> bool:
    """True for operators that write values to a tensor, of whatever shape, and nothing else."""
    return func._schema.name.partition("::")[2] in _FILLS


def _size(value: Any) -> float:
    return abs(value) if isinstance(value, float) else 0.0


@cache
def _compares(func: Any) -> bool:
    return func.__name__.partition(".")[0] in ("eq", "ne", "lt", "le", "gt", "ge")


@cache
def _is_question(func: Any) -> bool:
    """True for operators that give Python a truth value, such as equal and allclose."""
    return [str(each.type) for each in func._schema.returns] == ["bool"]


@cache
def _takes_device(func: Any) -> bool:
    return any(each.name == "device" for each in func._schema.arguments)


@cache
def _is_like(func: Any) -> bool:
    name = func._schema.name.partition("::")[2]
    return name.endswith("_like") or name in _MEMORYLESS


@cache
def _written(func: Any) -> tuple[int | str, ...]:
    """The arguments that an operator writes: positions, or names of those given by keyword."""
    return tuple(
        each.name if each.kwarg_only else position
        for position, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    )
