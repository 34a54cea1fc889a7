"""The type of objects with a state that checkpoints accept."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """An object that can give and load a state; classes need not derive from this.

    Example:
        >>> import torch
        >>> from tilework.checkpoint import Stateful
        >>> isinstance(torch.nn.Linear(1, 1), Stateful), isinstance({}, Stateful)
        (True, False)
    """

    def state_dict(self) -> dict[str, Any]:
        """The state: any nesting of containers, tensors and plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state that :meth:`state_dict` returned."""
