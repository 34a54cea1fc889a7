"""Memory for models that were built on ``meta``, before they are filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from tilework.errors import CheckpointError
from tilework.tiled import TiledTensor


def has_no_memory(tensor: Tensor) -> bool:
    """True for a tensor on ``meta``, or a sharded tensor with a local part on ``meta``."""
    if isinstance(tensor, TiledTensor):
        return any(tile.is_meta for tile in tensor.local_tiles())
    return tensor.is_meta


def give_memory(module: nn.Module, is_wanted: Callable[[str], bool]) -> None:
    """Give memory on the CPU to tensors of a model on ``meta`` that will be filled. Local.

    Tied tensors stay tied. Buffers outside of the state dict get their values from the model
    itself, if it belongs to transformers (``_init_weights``).

    Args:
        module: The model. The layouts of the tensors stay.
        is_wanted: True for the names of tensors that will be filled.

    Raises:
        CheckpointError: A buffer on ``meta`` is in no state dict, and the model cannot make it.

    Example:
        >>> model = nn.Linear(2, 1, device="meta")
        >>> give_memory(model, lambda name: name == "weight")
        >>> model.weight.device, model.bias.device
        (device(type='cpu'), device(type='meta'))
    """
    _check_fixed(module)
    made: dict[int, tuple[Tensor, Tensor]] = {}
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    for inner in module.modules():
        initialise = False
        for held in cast("list[dict[str, Tensor | None]]", [inner._parameters, inner._buffers]):
            for key, own in held.items():
                if own is None or not has_no_memory(own):
                    continue
                is_fixed = key in inner._non_persistent_buffers_set
                if is_fixed and hasattr(module, "_init_weights"):
                    initialise = True
                elif not any(map(is_wanted, names[id(own)])):
                    continue
                if id(own) not in made:
                    made[id(own)] = own, _empty_like(own)
                held[key] = made[id(own)][1]
        if initialise:
            _initialise(module, inner)


def _check_fixed(module: nn.Module) -> None:
    """Raise if a buffer on ``meta`` is not in the state dict, and the model cannot compute it."""
    if hasattr(module, "_init_weights"):
        return
    for path, inner in module.named_modules():
        for key in inner._non_persistent_buffers_set:
            buffer = inner._buffers.get(key)
            if buffer is not None and has_no_memory(buffer):
                name = f"{path}.{key}" if path else key
                raise CheckpointError(
                    f"the buffer {name} is on 'meta', and no checkpoint has it (persistent=False): "
                    f"give it values first",
                    tensor=name,
                )


def _empty_like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor.detach(), device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _initialise(model: nn.Module, inner: nn.Module) -> None:
    with torch.no_grad():
        model._init_weights(inner)  # type: ignore[operator]
