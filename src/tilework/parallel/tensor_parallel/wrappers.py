"""Layers of a plan within modules that wrap them, as adapters such as LoRA do.

Such a module stands in the place of a layer, and has the attribute ``weight``, the layer's. The
hooks of the layer's style then belong on the wrapper: what the wrapper adds to the layer is
computed with DTensors, too, and plain parameters of the wrapper count as replicated beside them. A
layer may be wrapped and unwrapped at any time: the module that holds it looks before each forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tilework.parallel.tensor_parallel.styles import linear_dims

#: The attributes of a module that say which hooks it has.
_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


def shown_layer(module: Any) -> Any:
    """The layer with a weight that ``module`` wraps, or ``module`` itself.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> wrapper = nn.Sequential(linear)
        >>> shown_layer(wrapper) is wrapper
        True
        >>> wrapper.weight = linear.weight
        >>> shown_layer(wrapper) is linear
        True
    """
    if _is_layer(module):
        return module
    weight = getattr(module, "weight", None)
    within = module.modules() if weight is not None else ()
    return next((m for m in within if _is_layer(m) and m.weight is weight), module)


def _is_layer(module: nn.Module) -> bool:
    return linear_dims(module) is not None or isinstance(module, nn.Embedding)


def attach_to_wrapper(
    root: nn.Module, name: str, layer: nn.Module, attach: Callable[[], None]
) -> None:
    """Attach a style to a layer, or to the module that wraps it, now or later. Local.

    Args:
        root: The model.
        name: The layer's name in the model, or the wrapper's.
        layer: The layer.
        attach: Registers the style's hooks.
    """
    known = [set(getattr(layer, each)) for each in _HOOKS]
    attach()
    hooks = [
        {key: hook for key, hook in getattr(layer, each).items() if key not in old}
        for each, old in zip(_HOOKS, known, strict=True)
    ]
    first = next(iter(hooks[0]), None)
    if first is None or not _is_layer(layer):
        return

    def place(module: Any) -> None:
        inner = shown_layer(module)
        if not _is_layer(inner) or (first in module._forward_pre_hooks):
            return
        for each, entries in zip(_HOOKS, hooks, strict=True):
            for key in entries:
                getattr(inner, each).pop(key, None)
            getattr(module, each).update(entries)

    place(root.get_submodule(name))
    if name:
        owner, _, last = name.rpartition(".")
        # A deep copy of the owner has the same hook, which looks at the module that calls it.
        root.get_submodule(owner).register_forward_pre_hook(
            lambda caller, _: place(caller._modules[last])
        )
