"""ZeroRedundancyOptimizer: each rank keeps the optimizer states of its share of the parameters.

S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC
2020 (stage 1). Parameters and gradients are replicated, as DistributedDataParallel has them; a rank
steps on the parameters that it owns, and sends them to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tilework.comm.objects import gather_object
from tilework.comm.world import AnyGroup
from tilework.parallel.comm_hooks.default_hooks import group_or_default
from tilework.parallel.data_parallel.replicas import broadcast_tensors


class ZeroRedundancyOptimizer(Optimizer):
    """An optimizer whose states are spread over the ranks; parameters stay replicated.

    Parameters are dealt out by size, so that ranks own nearly equally many elements. A step is
    collective over the group, and blocks: each rank steps on its own, then all send theirs. Not for
    ``join()``: a rank without inputs has no gradients of the parameters that it owns.

    Args:
        params: The parameters or parameter groups, the same on all ranks.
        optimizer_class: The optimizer that steps on a rank's own.
        process_group: The group; None: the default group.
        defaults: The optimizer's settings.

    Raises:
        ValueError: There are no parameters.
        TypeError: ``optimizer_class`` is no class of optimizers.

    Example:
        >>> import torch
        >>> from tilework.parallel import ZeroRedundancyOptimizer
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     model = torch.nn.Linear(2, 2)
        ...     optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        ...     return len(optimizer.optim.state)
        >>> run_ranks(2, program)
        [1, 1]
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        process_group: AnyGroup = None,
        **defaults: Any,
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise TypeError(f"optimizer_class is a subclass of Optimizer, got {optimizer_class!r}")
        self.process_group = group_or_default(process_group)
        self._class, self._defaults = optimizer_class, defaults
        self._owner: dict[nn.Parameter, int] = {}
        self._loads = [0] * self.process_group.size()
        self._saved: list[dict[str, Any]] | None = None
        self.optim: Optimizer | None = None
        self._is_constructed = False
        # Groups have all of the optimizer's settings, as its own state dicts do.
        every = optimizer_class([nn.Parameter(torch.empty(0))], **defaults).defaults
        super().__init__(params, every)
        self._is_constructed = True
        self._deal()

    def _deal(self) -> None:
        """Give each parameter without an owner to the rank that owns least; make the local part."""
        new = [p for group in self.param_groups for p in group["params"] if p not in self._owner]
        for parameter in sorted(new, key=lambda p: -p.numel()):  # stable: the same on every rank
            rank = min(range(len(self._loads)), key=self._loads.__getitem__)
            self._owner[parameter] = rank
            self._loads[rank] += parameter.numel()
        own = [self._own_part(group) for group in self.param_groups]
        before = None if self.optim is None else self.optim.state
        # An optimizer refuses to have no parameters, which a rank may well have.
        filled = [group for group in own if group["params"]]
        self.optim = self._class(filled, **self._defaults) if filled else None
        if before is not None and self.optim is not None:
            self.optim.state.update(before)

    def _own_part(self, group: Mapping[str, Any]) -> dict[str, Any]:
        rank = self.process_group.rank()
        return {**group, "params": [p for p in group["params"] if self._owner[p] == rank]}

    def owner_of(self, parameter: nn.Parameter) -> int:
        """The global rank that has a parameter's states. Local."""
        return self.process_group.global_ranks[self._owner[parameter]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and deal them out. Local; the same on all ranks."""
        super().add_param_group(param_group)
        if self._is_constructed:
            self._deal()

    def step(self, closure: Any = None) -> Any:
        """Step on this rank's parameters, and take the others' from their owners. Collective.

        Args:
            closure: Computes the loss again, on every rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.optim is not None:
            self._copy_settings()
            self.optim.step()
        self._exchange()
        return loss

    def _copy_settings(self) -> None:
        """Let the local optimizer have the settings that schedulers have changed."""
        assert self.optim is not None
        filled = [group for group in self.param_groups if self._own_part(group)["params"]]
        for own, group in zip(self.optim.param_groups, filled, strict=True):
            own.update({name: value for name, value in group.items() if name != "params"})

    def _exchange(self) -> None:
        for rank in range(self.process_group.size()):
            owned = [p.data for p, owner in self._owner.items() if owner == rank]
            broadcast_tensors(owned, self.process_group, rank)

    # -- states ------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send all states to one rank, where :meth:`state_dict` then has them. Collective; blocks.

        Args:
            to: The global rank.
        """
        own = {} if self.optim is None else _on_cpu(self._by_index())
        is_target = self.process_group.global_ranks[self.process_group.rank()] == to
        gathered: list[Any] | None = [None] * self.process_group.size() if is_target else None
        gather_object(own, gathered, to, self.process_group)
        self._saved = gathered

    def _by_index(self) -> dict[int, Any]:
        """The states of this rank's parameters, by the parameters' numbers."""
        assert self.optim is not None
        every = [p for group in self.param_groups for p in group["params"]]
        return {at: self.optim.state[p] for at, p in enumerate(every) if p in self.optim.state}

    def state_dict(self) -> dict[str, Any]:
        """The states of all parameters, in the form of the plain optimizer's. Local.

        Raises:
            RuntimeError: :meth:`consolidate_state_dict` was not called with this rank.
        """
        if self._saved is None:
            raise RuntimeError(
                "state_dict() has the states of all ranks: call consolidate_state_dict(to=rank) on "
                "every rank first, then state_dict() on that rank"
            )
        numbers = iter(range(len(self._owner)))
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]}
            for group in self.param_groups
        ]
        state = {at: value for part in self._saved for at, value in part.items()}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of all parameters; each rank keeps those of its own. Local.

        Args:
            state_dict: Of this class, or of the plain optimizer, the same on all ranks.
        """
        every = [p for group in self.param_groups for p in group["params"]]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        if self.optim is None:
            return
        self._copy_settings()
        rank = self.process_group.rank()
        for at, value in state_dict["state"].items():
            parameter = every[int(at)]
            if self._owner[parameter] == rank:
                self.optim.state[parameter] = {
                    name: one.to(parameter.device, copy=True) if torch.is_tensor(one) else one
                    for name, one in value.items()
                }


def _on_cpu(state: dict[int, Any]) -> dict[int, Any]:
    return {
        at: {name: one.cpu() if torch.is_tensor(one) else one for name, one in value.items()}
        for at, value in state.items()
    }
