"""Classes for batch normalisations that are converted to synchronised ones, and back.

Converting a layer changes only the class of the object: parameters, hooks, attributes and
parametrizations stay. A layer of a subclass of ``nn.BatchNorm2d`` gets a class that inherits from
this subclass and from SyncBatchNorm. There ``super().forward(x)`` synchronises, and everything else
that the subclass does stays.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
#: The attributes of made classes: the layer's former class, and the synchronised class.
_BEFORE, _SYNCHRONISED = "_class_before", "_synchronised_class"


class AnyDimBatchNorm(_BatchNorm):
    """Batch normalisation of inputs with two dims or more."""

    def _check_input_dim(self, input: Any) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def synchronise(layer: Any, synchronised: Any, group: Any) -> None:
    """Give a batch normalisation the synchronised class; leave other modules alone. Local.

    Args:
        layer: Any module.
        synchronised: ``SyncBatchNorm``.
        group: The ``process_group`` of SyncBatchNorm.

    Raises:
        TypeError: The layer's class overrides forward and does not call
            ``super().forward``; nothing has changed then.
    """
    if _is_batch_norm(layer) and not isinstance(layer, synchronised):
        made: Any = _with_base(type(layer), layer, lambda base: _class_of(base, synchronised))
        layer.__class__ = made
        layer.process_group = group


def desynchronise(layer: Any, synchronised: Any) -> None:
    """Give a synchronised layer back the former class, or :class:`AnyDimBatchNorm`. Local."""
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
                f"super().forward(): its own computation would use the statistics of "
                f"each rank alone. Let {each.__name__}.forward call super().forward(x), or put a "
                f"SyncBatchNorm in its place"
            )


def _with_base(kind: Any, layer: nn.Module, change: Any) -> Any:
    """The changed class; a parametrized layer keeps torch's class on top."""
    if not is_parametrized(layer):
        return change(kind)
    own = {name: value for name, value in vars(kind).items() if name not in _AUTOMATIC}
    return type(kind.__name__, (change(kind.__bases__[0]),), own)


_AUTOMATIC = ("__dict__", "__weakref__")


@cache
def _class_of(kind: Any, synchronised: Any) -> Any:
    """The class to give to a layer of class ``kind``."""
    if kind in _KNOWN:
        return synchronised
    own: dict[str, Any] = {"__module__": kind.__module__, _BEFORE: kind}
    own[_SYNCHRONISED] = synchronised
    own["__reduce_ex__"] = _reduced
    if issubclass(kind, LazyModuleMixin):
        own["cls_to_become"] = synchronised
    return type(f"Sync{kind.__name__}", (kind, synchronised), own)


def _reduced(layer: Any, protocol: Any) -> Any:
    """The layer for pickle, with the former class: pickle cannot find made classes by name."""
    kind = type(layer)
    if is_parametrized(layer):
        return object.__reduce_ex__(layer, protocol)  # torch's refusal
    return _made_again, (getattr(kind, _BEFORE), getattr(kind, _SYNCHRONISED)), vars(layer)


def _made_again(kind: type, synchronised: type) -> Any:
    made: Any = _class_of(kind, synchronised)
    return made.__new__(made)
