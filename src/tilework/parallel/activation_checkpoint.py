"""Activation checkpoints of modules: backward recomputes the activations that forward did not keep.

A module is changed in place and keeps the name in the model: keys of state dicts, names of
parameters and ``isinstance`` do not change.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import Any

import torch.utils.checkpoint
from torch import nn

from tilework.models import check_is_module, matching_names, replace_module


class CheckpointImpl(enum.Enum):
    """The kinds of ``torch.utils.checkpoint``; each value is the argument ``use_reentrant``."""

    NO_REENTRANT = False
    REENTRANT = True


class CheckpointWrapper(nn.Module):
    """The base class of all modules whose activations are recomputed, for ``isinstance``.

    :func:`checkpoint_wrapper` changes a module's class to a subclass of this class and of the
    module's former class.
    """

    _checkpoint: Callable[..., Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a subclass a ``__call__`` that runs the module's whole call within the checkpoint.

        The whole call includes hooks and the gathering of parameters: both run again when backward
        recomputes. Only the ``__call__`` of the module's own class does this; an inherited
        ``__call__`` passes the call on.
        """
        super().__init_subclass__(**kwargs)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            within = super(cls, self).__call__
            if type(self) is not cls:
                return within(*args, **kwargs)
            return self._checkpoint(within, *args, **kwargs)

        cls.__call__ = call  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        state.pop("_compiled_call_impl", None)  # calls this module; copies compile again
        return _rebuild, (type(self).__mro__[2], state)


class _Settings:
    """A checkpoint function (of torch or of the user), with the settings that each call passes."""

    def __init__(self, function: Callable[..., Any], settings: dict[str, Any]) -> None:
        self._function, self._settings = function, settings

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._function(call, *args, **self._settings, **kwargs)


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> nn.Module:
    """Make a module recompute activations in backward instead of keeping them. Local.

    torch's wrapper of this name puts another module around the module, and a prefix before all
    names; here the module changes class. The module's hooks run again when backward recomputes. A
    module that recomputes already stays as it is. Shard a module by ``fully_shard`` before or after
    this.

    Args:
        module: Changed in place.
        checkpoint_impl: The kind of torch's checkpoint. With REENTRANT, forward takes no keyword
            arguments.
        checkpoint_fn: Called instead of torch's function, with the module's call, the arguments and
            the settings.
        checkpoint_fn_kwargs: Settings, such as ``preserve_rng_state=False`` or ``context_fn``.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: It is a lazy module such as LazyLinear, which changes class in the first call.

    Example:
        >>> import torch
        >>> from tilework.parallel import checkpoint_wrapper
        >>> layer = checkpoint_wrapper(torch.nn.Linear(2, 2))
        >>> list(layer.state_dict()), isinstance(layer, torch.nn.Linear)
        (['weight', 'bias'], True)
    """
    check_is_module(module, "checkpoint_wrapper")
    if isinstance(module, CheckpointWrapper):
        return module
    if getattr(module, "cls_to_become", None) is not None:
        kind = type(module).__name__
        raise ValueError(
            f"checkpoint_wrapper changes the class of a module, and the first call of {kind} "
            f"changes it again: call the model once before, or wrap a module around the {kind}"
        )
    settings = dict(checkpoint_fn_kwargs)
    if checkpoint_fn is None:
        checkpoint_fn = torch.utils.checkpoint.checkpoint
        settings["use_reentrant"] = checkpoint_impl.value
    module.__class__ = _class_of(type(module))
    object.__setattr__(module, "_checkpoint", _Settings(checkpoint_fn, settings))
    return module


def apply_activation_checkpointing(
    model: nn.Module,
    modules: Collection[type[nn.Module]] | str | None = None,
    *,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] | None = None,
) -> None:
    """Make modules of a model recompute their activations, by :func:`checkpoint_wrapper`.

    Local. Only modules within the model are chosen, never the model itself. Chosen modules within
    chosen modules are changed, too.

    Args:
        model: Changed in place.
        modules: The classes of modules, such as ``{Block}``, or a pattern of their names, such as
            ``"layers.*"``; None: ``check_fn`` alone chooses.
        checkpoint_wrapper_fn: Called with each module; the result replaces the module.
        check_fn: Returns True for modules to choose besides those of the given classes. Not called
            if ``modules`` is a pattern.

    Raises:
        ValueError: No module is chosen.

    Example:
        >>> import torch
        >>> from tilework.parallel import CheckpointWrapper, apply_activation_checkpointing
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> apply_activation_checkpointing(model, {torch.nn.Linear})
        >>> [isinstance(layer, CheckpointWrapper) for layer in model]
        [True, False]
    """
    check_is_module(model, "apply_activation_checkpointing")
    found = dict(model.named_modules())
    if isinstance(modules, str):
        chosen = [found[name] for name in matching_names(modules, found) if name]
    else:
        kinds = tuple(modules or ())
        chosen = [
            each
            for name, each in found.items()
            if name and (isinstance(each, kinds) or (check_fn is not None and check_fn(each)))
        ]
    if not chosen:
        raise ValueError(
            f"no module of {type(model).__name__} is chosen by modules={modules!r} and "
            f"check_fn={check_fn!r}: give classes, as {{Block}}, or a pattern of names"
        )
    for each in chosen:
        made = checkpoint_wrapper_fn(each)
        if made is not each:
            replace_module(model, each, made)


def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    made: type[nn.Module] = type(f"Checkpointed{kind.__name__}", (CheckpointWrapper, kind), {})
    return made


def _rebuild(kind: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    module = _class_of(kind).__new__(_class_of(kind))
    module.__dict__.update(state)
    return module
