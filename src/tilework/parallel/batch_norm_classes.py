"""Classes that batch normalisations change to, and back, when a module is converted.

A layer stays the object that it is, with its parameters, hooks, attributes and parametrizations: it
gets another class. A subclass of ``nn.BatchNorm2d`` gets one that inherits from it and from
SyncBatchNorm, so that its ``super().forward(x)`` synchronises, and what it does besides stays.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
#: The attributes of made classes: the class of the layer before, and the synchronised one.
_BEFORE, _SYNCHRONISED = "_class_before", "_synchronised_class"


class AnyDimBatchNorm(_BatchNorm):
    """Batch normalisation of inputs with any number of dims from two on."""

    def _check_input_dim(self, input: Any) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def synchronise(layer: Any, synchronised: Any, group: Any) -> None:
    """Give a batch normalisation its synchronised class; leave other modules alone. Local.

    Args:
        layer: Any module.
        synchronised: ``SyncBatchNorm``.
        group: Its ``process_group``.

    Raises:
        TypeError: The layer's class has a forward of its own that does not call
            ``super().forward``; nothing has changed then.
    """
    if _is_batch_norm(layer) and not isinstance(layer, synchronised):
        made: Any = _with_base(type(layer), layer, lambda base: _class_of(base, synchronised))
        layer.__class__ = made
        layer.process_group = group


def desynchronise(layer: Any, synchronised: Any) -> None:
    """Give a synchronised layer the class that it had, or :class:`AnyDimBatchNorm`. Local."""
    if isinstance(layer, synchronised):
        made: Any = _with_base(
            type(layer), layer, lambda base: vars(base).get(_BEFORE, AnyDimBatchNorm)
        )
        layer.__class__ = made
        del layer.process_group


def _is_batch_norm(layer: Any) -> bool:
    """True for batch normalisations of torch's, and subclasses."""
    return isinstance(layer, _BatchNorm)


def check_can_synchronise(name: str, layer: nn.Module, synchronised: Any) -> None:
    """Raise if :func:`synchronise` would. Local."""
    if not _is_batch_norm(layer) or isinstance(layer, synchronised):
        return
    kind = type(layer).__bases__[0] if is_parametrized(layer) else type(layer)
    for each in kind.__mro__:
        if each in (*_KNOWN, _BatchNorm) or issubclass(each, LazyModuleMixin):
            return
        forward = vars(each).get("forward")
        names = getattr(getattr(forward, "__code__", None), "co_names", ("super", "forward"))
        if forward is not None and not {"super", "forward"} <= set(names):
            raise TypeError(
                f"{name or 'the module'} is a {kind.__name__}, whose forward does not call "
                f"super().forward(): what it computes by itself would have the statistics of "
                f"each rank alone. Let {each.__name__}.forward call super().forward(x), or put a "
                f"SyncBatchNorm in its place"
            )


def _with_base(kind: Any, layer: nn.Module, change: Any) -> Any:
    """The changed class; of a parametrized layer the class beneath torch's is changed."""
    if not is_parametrized(layer):
        return change(kind)
    own = {name: value for name, value in vars(kind).items() if name not in _AUTOMATIC}
    return type(kind.__name__, (change(kind.__bases__[0]),), own)


_AUTOMATIC = ("__dict__", "__weakref__")


@cache
def _class_of(kind: Any, synchronised: Any) -> Any:
    """The class of a synchronised layer that was of this class."""
    if kind in _KNOWN:
        return synchronised
    own: dict[str, Any] = {"__module__": kind.__module__, _BEFORE: kind}
    own[_SYNCHRONISED] = synchronised
    own["__reduce_ex__"] = _reduced
    if issubclass(kind, LazyModuleMixin):
        own["cls_to_become"] = synchronised
    return type(f"Sync{kind.__name__}", (kind, synchronised), own)


def _reduced(layer: Any, protocol: Any) -> Any:
    """The layer for pickle, which finds the class before by its name, and not a made one."""
    kind = type(layer)
    if is_parametrized(layer):
        return object.__reduce_ex__(layer, protocol)  # torch's refusal
    return _made_again, (getattr(kind, _BEFORE), getattr(kind, _SYNCHRONISED)), vars(layer)


def _made_again(kind: type, synchronised: type) -> Any:
    made: Any = _class_of(kind, synchronised)
    return made.__new__(made)
