"""Hooks for sharded tensors in state dicts of modules: saved, and loaded at any layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree_equal
from tilework.comm.world import NonMember
from tilework.sharded.moves import describe_value, reshard_like
from tilework.sharded.tensor import ShardedTensor


def state_dict_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Add sharded tensors that are plain attributes to a module's ``state_dict()``.

    Local; not collective. For ``module.register_state_dict_post_hook``. It serves all submodules,
    too. Sharded parameters are in state dicts without this hook.

    Example: see docs/how-to/shard-a-model.md.
    """
    for start, submodule in _submodules(module, prefix):
        for name, value in vars(submodule).items():
            if isinstance(value, ShardedTensor):
                destination[start + name] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Make a state dict fit a module with sharded tensors, before it is loaded.

    For ``module.register_load_state_dict_pre_hook``. It serves all submodules, too. Sharded tensors
    become attributes of the same names, also where the attribute has been None or something else. A
    parameter keeps its layout and gets the values: a sharded parameter from a tensor of any other
    layout, or from a plain tensor; a plain parameter from a sharded tensor.

    Collective over the groups of sharded parameters, and of sharded values for plain parameters;
    blocks. An error on one rank raises on all ranks. Values move only where layouts differ. If the
    module and the state dict have no sharded tensors, nothing is changed or communicated.

    Raises:
        ValueError: Ranks load different things, or values lie on ranks outside the group.

    Example: see docs/how-to/shard-a-model.md.
    """
    for start, submodule in _submodules(module, prefix):
        for name, value in list(vars(submodule).items()):
            if isinstance(state_dict.get(start + name), ShardedTensor):
                setattr(submodule, name, state_dict.pop(start + name))
            elif isinstance(value, ShardedTensor):
                missing_keys.append(start + name)
    if not local_metadata.get("assign_to_params_buffers", False):
        _fit_parameters(dict(_parameters(module, prefix)), state_dict)


def _fit_parameters(parameters: dict[str, Tensor], state_dict: dict[str, Any]) -> None:
    values = {
        key: state_dict[key]
        for key, parameter in parameters.items()
        # torch's own message serves for values of another size.
        if isinstance(state_dict.get(key), Tensor) and state_dict[key].shape == parameter.shape
    }
    groups: dict[ProcessGroup, dict[str, str]] = {}
    for key, parameter in parameters.items():
        value = values.get(key)
        tensor = parameter if isinstance(parameter, ShardedTensor) else value
        if isinstance(tensor, ShardedTensor) and not isinstance(tensor.process_group, NonMember):
            groups.setdefault(tensor.process_group, {})[key] = describe_value(value)
    for group, layouts in groups.items():
        agree_equal(lambda layouts=layouts: layouts, group)  # type: ignore[misc]
    for key, value in values.items():
        parameter = parameters[key]
        if isinstance(parameter, ShardedTensor):
            state_dict[key] = reshard_like(value, parameter)
        elif isinstance(value, ShardedTensor):
            state_dict[key] = value.full_tensor()


def _submodules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Each submodule and the prefix of the keys; twice if it has two names, as in torch."""
    for path, submodule in module.named_modules(remove_duplicate=False):
        yield f"{prefix}{path}." if path else prefix, submodule


def _parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for start, submodule in _submodules(module, prefix):
        for name, tensor in (*submodule._parameters.items(), *submodule._buffers.items()):
            if tensor is not None:
                yield start + name, tensor
