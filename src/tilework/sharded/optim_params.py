"""Parameters by name, as optimizers take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from tilework.sharded.tensor import ShardedTensor


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """A module's parameters, and the sharded tensors that are plain attributes; each once.

    Example:
        >>> import torch
        >>> from tilework.sharded import named_params_with_sharded_tensor
        >>> [name for name, _ in named_params_with_sharded_tensor(torch.nn.Linear(2, 2))]
        ['weight', 'bias']
    """
    seen: set[int] = set()
    for path, submodule in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        for name, value in vars(submodule).items():
            if isinstance(value, ShardedTensor) and id(value) not in seen:
                seen.add(id(value))
                yield f"{path}.{name}" if path else name, value
    for name, parameter in module.named_parameters(prefix=prefix, recurse=recurse):
        if id(parameter) not in seen:
            yield name, parameter


def local_tensors(tensor: Tensor) -> list[Tensor]:
    """This rank's tiles of a sharded parameter; for a plain parameter a list of itself."""
    return list(tensor.local_tiles()) if isinstance(tensor, ShardedTensor) else [tensor]


def parameter_groups(named_params: Any) -> list[dict[str, Any]]:
    """``named_params`` as a list of parameter groups, each with a dict of named parameters."""
    listed = named_params if isinstance(named_params, Mapping) else list(named_params)
    if not listed:
        raise ValueError("the optimizer has no parameters: give it named_parameters() of a module")
    grouped = not isinstance(listed, Mapping) and isinstance(listed[0], Mapping)
    return [named_group(group) for group in (listed if grouped else [{"params": listed}])]


def named_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """``group`` with the value of ``params`` as a dict from names to parameters, after a check."""
    params = group["params"]
    pairs = list(params.items() if isinstance(params, Mapping) else params)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError("parameters must have names: give pairs, such as named_parameters()")
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"parameter {name!r} must be a tensor, got {type(tensor).__name__}")
    if len(dict(pairs)) != len(pairs):
        raise ValueError(f"two parameters have the same name: {[name for name, _ in pairs]}")
    return {**group, "params": dict(pairs)}
