"""torch's underscored methods of DistributedDataParallel, which programs call nevertheless."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tilework.parallel.comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

_IGNORED = "_ddp_params_and_buffers_to_ignore"
_BUILT_IN = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}


def ignored_names(module: nn.Module) -> tuple[str, ...]:
    """The names of parameters and buffers that ``module`` excludes from broadcasts and reductions.

    Empty unless ``_set_params_and_buffers_to_ignore_for_model`` was called with the module.
    """
    return tuple(getattr(module, _IGNORED, ()))


class TorchDDPNames:
    """Methods of DistributedDataParallel under their names in torch."""

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Exclude parameters and buffers of ``module`` from broadcasts and reductions.

        Args:
            module: The module, before it is wrapped.
            params_and_buffers_to_ignore: Their full names.

        Raises:
            ValueError: The module has no parameter or buffer of a name.
        """
        names = list(params_and_buffers_to_ignore)
        known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(
                f"params_and_buffers_to_ignore has {unknown}, but {type(module).__name__} has no "
                f"parameters or buffers of these names: see named_parameters() and named_buffers()"
            )
        setattr(module, _IGNORED, names)

    @property
    def parameters_to_ignore(self: Any) -> set[str]:
        """The names of parameters and buffers that are neither broadcast nor reduced."""
        return set(self._ignored)

    @property
    def device(self: Any) -> torch.device:
        """The device of the first parameter."""
        found: torch.device = next(self.module.parameters()).device
        return found

    join_device = device

    def will_sync_module_buffers(self: Any) -> bool:
        """True if the next forward pass begins with the first rank's buffers."""
        syncs = self.require_backward_grad_sync and self.broadcast_buffers
        return bool(syncs and self._structure.has_buffers())

    def _get_ddp_logging_data(self: Any) -> dict[str, Any]:
        """:meth:`DistributedDataParallel.get_ddp_logging_data`."""
        data: dict[str, Any] = self.get_ddp_logging_data()
        return data

    def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        """Register the hook that a member of torch's enumeration of hooks stands for.

        Raises:
            ValueError: The member stands for no hook.
        """
        name = str(getattr(comm_hook_type, "name", comm_hook_type))
        if name not in _BUILT_IN:
            raise ValueError(
                f"{comm_hook_type!r} is not a built-in hook, which are {', '.join(_BUILT_IN)}; "
                f"register_comm_hook takes any hook"
            )
        self.register_comm_hook(None, _BUILT_IN[name])

    def _set_static_graph(self: Any) -> None:
        """Set ``static_graph=True`` after construction, before the first backward."""
        if not self.static_graph:
            self.static_graph = True
            self._new_reducer()
