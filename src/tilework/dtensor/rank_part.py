"""Plain tensors that are ranks' parts of one tensor, in operators between parallel modules.

A module of a plan hands out the local tensor of a sharded output, and plain operators use the local
tensor: activations, a norm of each attention head. Other operands of these operators (a plain
parameter, or a tensor that is the same on all ranks) meet another part on each rank. The gradient
of such an operand is a sum over the ranks, and each rank computes one term. A :class:`RankPart` is
such a local tensor. It finds these plain operands, and adds up their gradients in backward. The
result of an operator on a part is a part. The chain ends at the next module of the plan, which
takes the part as a shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import all_reduce
from tilework.comm.provenance_digest import OF_A_DTENSOR, carrying
from tilework.dtensor.part_cuts import Cut, common, cuts_of_results, of_the_part
from tilework.dtensor.propagation.dtensor_call import tensors_in
from tilework.dtensor.provenance.content import content_digest
from tilework.dtensor.provenance.digests import stable_digest

_PLAIN = (Tensor, torch.nn.Parameter)
#: Operators whose result does not depend on a part's elements.
_OF_SHAPES = frozenset(
    {
        *("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones"),
        *("new_empty", "new_full", "new_tensor", "new_empty_strided", "backward", "grad"),
    }
)
#: Operators that take only shape, dtype or device from their second operand.
_AS_ANOTHER = frozenset({"expand_as", "view_as", "reshape_as", "type_as", "to"})
#: Methods that take the tensor out of the program's operators: into a file, a copy or a text.
_OUTWARD = frozenset(
    {*("__reduce_ex__", "__deepcopy__", "__repr__", "__format__", "as_subclass", "__array__")}
)
#: The key that is excluded while a dispatch mode handles an operator, below autograd. Operators are
#: not followed there, as they are not without the mode. (Inference mode excludes autograd's keys.)
_BEFORE_MODES = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_SEED = stable_digest("the gradient of a plain tensor beside parts of ranks")


class RankPart(Tensor):
    """A plain tensor that is this rank's part of a tensor, or was computed from parts.

    ``x.as_subclass(torch.Tensor)`` removes the mark: operators on the result concern this rank
    alone, and gradients of their other operands are not added up.
    """

    _cut: Cut

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__.partition(".")[0]  # mul.Tensor is a mul
        with torch._C.DisableTorchFunctionSubclass():
            if _KINDS.issuperset(types):
                if name in _OUTWARD:
                    return func(_without_class(args[0]), *args[1:], **kwargs)
                if name in _OF_SHAPES or _is_excluded(_BEFORE_MODES):
                    return func(*args, **kwargs)
                return _operate(func, name, args, kwargs)
            args = _stripped(args)
            kwargs = {key: _stripped(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)  # another class of tensors takes the call


_KINDS = frozenset({RankPart, *_PLAIN})


def as_rank_part(local: Tensor, cut: Cut) -> Tensor:
    """The same tensor object, if it is plain, marked as a part of a tensor. Local."""
    if local.__class__ is Tensor:
        part: Any = local
        part.__class__ = RankPart
        part._cut = cut
    return local


def plain_of(value: Any) -> Any:
    """A :class:`RankPart` as a plain tensor in the same memory; other values as they are."""
    if value.__class__ is not RankPart:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return _without_class(value)


def _without_class(value: Any) -> Any:
    return value.as_subclass(Tensor) if value.__class__ is RankPart else value


def _stripped(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_stripped(each) for each in value])
    return _without_class(value)


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif value.__class__ in (list, tuple):
            found += _tensors_in(value)
    return found


def _operate(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run an operator with at least one operand that is a part."""
    operands = _tensors_in((*args, *kwargs.values()))
    parts: list[Any] = [each for each in operands if each.__class__ is RankPart]
    if not parts or (name in _AS_ANOTHER and args[0].__class__ is not RankPart):
        return func(*args, **kwargs)
    plain = [each for each in operands if each.__class__ in _PLAIN]
    if torch.is_grad_enabled() and any(each.requires_grad for each in plain):
        args, kwargs = _with_sums(name, args, kwargs, parts[0]._cut.layer.group)
    try:
        result = func(*args, **kwargs)
    except Exception as error:
        raise of_the_part(error, func, args, kwargs) from None
    if name == "__setitem__" and args[0].__class__ is RankPart:  # refuse what reading refuses
        _cuts(Tensor.__getitem__, args[:2], {}, [args[0][args[1]]], args[:1])
    if _writes(name):
        _mark_written(tensors_in(args[0]), parts)
    results = tensors_in(result)
    stay = set(map(id, plain)) - {id(kwargs.get("out"))}
    for each, cut in zip(results, _cuts(func, args, kwargs, results, parts), strict=True):
        if id(each) not in stay:
            as_rank_part(each, cut)
    return result


@cache
def _writes(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _cuts(func: Any, args: Any, kwargs: Any, results: list[Tensor], parts: Any) -> list[Cut]:
    cuts = [each._cut for each in parts]
    return cuts_of_results(func, args, kwargs, results, cuts, as_rank_part) if results else []


def _mark_written(targets: list[Tensor], parts: list[Any]) -> None:
    """Mark tensors that were written, and the wholes of which they are slices, as parts."""
    for target in targets:
        base = getattr(target, "_base", None)
        for each in (target,) if base is None else (target, base):
            alike = [part._cut for part in parts if part.dim() == target.dim() == each.dim()]
            as_rank_part(each, common(alike or [parts[0]._cut.layer.cut(None)]))


def _with_sums(name: str, args: Any, kwargs: Any, group: ProcessGroup) -> tuple[Any, Any]:
    """The arguments; the gradients of plain tensors are added up over the group."""
    if _writes(name) and args[0].__class__ in _PLAIN and args[0].requires_grad:
        raise RuntimeError(_written(name, args[0]))
    named = {key: _summed(value, group) for key, value in kwargs.items()}
    return _summed(args, group), named


def _summed(value: Any, group: ProcessGroup) -> Any:
    """The operand; the gradient of a plain tensor is added up over the group."""
    if value.__class__ in _PLAIN:
        if not value.requires_grad:
            return value
        return _SumOfGradients.apply(value, group)  # type: ignore[no-untyped-call]
    if value.__class__ in (list, tuple):
        return type(value)([_summed(each, group) for each in value])
    return value


class _SumOfGradients(torch.autograd.Function):
    """The identity; backward sums the gradients of all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        """The tensor itself, as a view."""
        ctx.group, ctx.text = group, _Text(tensor)
        # Ranks whose tensors differ do not have the same tensor: they raise in the collective.
        ctx.digest = hash((_SEED, content_digest(tensor.detach())))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The sum. Collective over the group; blocks."""
        total = _without_class(grad).clone(memory_format=torch.contiguous_format)
        with carrying(ctx.digest, ctx.text):
            all_reduce(total, group=ctx.group)
        return total, None


class _Text:
    """The text that names a plain operand in errors, made when it is needed."""

    def __init__(self, tensor: Tensor) -> None:
        self._kind = f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"

    def __str__(self) -> str:
        return (
            f"the gradient of a plain tensor, {self._kind}, which all ranks have, and which "
            f"meets each rank's part {OF_A_DTENSOR}"
        )


def _written(name: str, tensor: Tensor) -> str:
    return (
        f"{name} would write this rank's part of a sharded tensor into a plain tensor of shape "
        f"{list(tensor.shape)} that requires a gradient and is the same on all ranks: use an "
        f"operator that makes a new tensor, or pass part.as_subclass(torch.Tensor) if the write "
        f"concerns this rank alone"
    )
