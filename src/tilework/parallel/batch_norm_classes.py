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

    Check before with :func:`check_can_synchronise`, which raises for layers that cannot change.

    Args:
        layer: Any module.
        synchronised: ``SyncBatchNorm``.
        group: The ``process_group`` of SyncBatchNorm.
    """
    if _is_batch_norm(layer) and not isinstance(layer, synchronised):
        made: Any = _with_base(type(layer), layer, lambda base: _class_of(base, synchronised))
        layer.__class__ = made
        layer.process_group = group


def desynchronise(layer: Any, synchronised: Any) -> None:
    """Undo :func:`synchronise`; leave other modules alone. Local.

    A layer of a user's subclass gets the former class back. Every other synchronised layer becomes
    an :class:`AnyDimBatchNorm`.
    """
    if isinstance(layer, synchronised):
        made: Any = _with_base(
            type(layer), layer, lambda base: vars(base).get(_BEFORE, AnyDimBatchNorm)
        )
        layer.__class__ = made
        del layer.process_group


def _is_batch_norm(layer: Any) -> bool:
    """True if the layer's class is, or inherits from, a batch normalisation of torch."""
    return isinstance(layer, _BatchNorm)


def check_can_synchronise(name: str, layer: nn.Module, synchronised: Any) -> None:
    """Raise if a layer cannot become synchronised by a change of class. Local.

    Args:
        name: The layer's name in the model, for the error.
        layer: Any module; only batch normalisations are checked.
        synchronised: ``SyncBatchNorm``.

    Raises:
        TypeError: The layer's class has a forward that does not call ``super().forward``.
    """
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
    """The class that a layer changes to: ``change(kind)``, where ``kind`` is the layer's class.

    torch puts a class of parametrizations on top of the class of a parametrized layer. Then
    ``change`` gets the class below, and the class on top is made again.
    """
    if not is_parametrized(layer):
        return change(kind)
    own = {name: value for name, value in vars(kind).items() if name not in _AUTOMATIC}
    return type(kind.__name__, (change(kind.__bases__[0]),), own)


_AUTOMATIC = ("__dict__", "__weakref__")


@cache
def _class_of(kind: Any, synchronised: Any) -> Any:
    """The class that makes a layer of class ``kind`` synchronised.

    It is ``synchronised`` for torch's own classes, and a subclass of both for all others.
    """
    if kind in _KNOWN:
        return synchronised
    own: dict[str, Any] = {"__module__": kind.__module__, _BEFORE: kind}
    own[_SYNCHRONISED] = synchronised
    own["__reduce_ex__"] = _reduced
    if issubclass(kind, LazyModuleMixin):
        own["cls_to_become"] = synchronised
    return type(f"Sync{kind.__name__}", (kind, synchronised), own)


def _reduced(layer: Any, protocol: Any) -> Any:
    """The ``__reduce_ex__`` of made classes, which pickle cannot find by name.

    pickle stores the former class instead, and makes the synchronised class again on loading.
    """
    kind = type(layer)
    if is_parametrized(layer):
        return object.__reduce_ex__(layer, protocol)  # torch's refusal
    return _made_again, (getattr(kind, _BEFORE), getattr(kind, _SYNCHRONISED)), vars(layer)


def _made_again(kind: type, synchronised: type) -> Any:
    made: Any = _class_of(kind, synchronised)
    return made.__new__(made)
