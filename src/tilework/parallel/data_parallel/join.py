"""Uneven inputs: ranks that have run out of inputs let the others continue.

Within ``Join``, each training iteration begins with a small all_gather in which ranks say if they
still have inputs. Whenever the number of ranks with inputs changes, these ranks make a new group,
and reduce gradients (and the statistics of SyncBatchNorm) within it. A rank that has run out
therefore takes part only in that all_gather, whatever the other ranks compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from tilework.comm.contract import ProcessGroup
from tilework.comm.groups import new_group
from tilework.comm.operations.internal import all_gather_into_tensor
from tilework.comm.per_call.internal import call_site, current_pretence
from tilework.comm.world import current_world
from tilework.errors import PretendError


class JoinHook:
    """The calls that a joinable gets on a rank that has run out of inputs."""

    def main_hook(self) -> None:
        """Called once for each iteration that the other ranks still make."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called once when all ranks have run out; ``is_last_joiner`` on those that were last."""


class Joinable(ABC):
    """A base class of objects that communicate in each iteration, for :class:`Join`."""

    def __init__(self) -> None:
        super().__init__()
        #: Set while a Join context holds this object.
        self.join_context: Join | None = None

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that a join context calls on this rank; ``kwargs`` were given to ``Join``."""

    @property
    @abstractmethod
    def join_process_group(self) -> ProcessGroup:
        """The group whose ranks may run out of inputs."""


@dataclass
class _ActiveGroups:
    """For each group within a :class:`Join`: the group of those ranks that still have inputs."""

    of: dict[ProcessGroup, ProcessGroup] = field(default_factory=dict)


def active_group(group: ProcessGroup) -> ProcessGroup:
    """The ranks of a group that still have inputs; outside of Join the group itself."""
    return current_world().state(_ActiveGroups).of.get(group, group)


class Join:
    """A context in which ranks may have different numbers of inputs. Collective at the end.

    Every rank enters the context with the same joinables and iterates over different inputs. A rank
    that leaves the block waits until all ranks have left, and meanwhile follows their iterations.

    Args:
        joinables: DistributedDataParallel modules, optimizers, and other joinables. The first
            informs the others of each iteration (:meth:`notify_join_context`).
        enable: False: the context does nothing.
        throw_on_early_termination: Raise on every rank as soon as one has run out.
        kwargs: Arguments of each joinable's ``join_hook``.

    Raises:
        ValueError: There are no joinables, or they are on different groups.
        RuntimeError: ``throw_on_early_termination``, and a rank has run out of inputs.

    Example:
        >>> from torch import nn
        >>> from tilework.parallel import DistributedDataParallel, Join
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     model, steps = DistributedDataParallel(nn.Linear(2, 1)), 0
        ...     with Join([model]):
        ...         for x in torch.ones(rank + 1, 3, 2):  # rank 0 has one batch, rank 1 two
        ...             model(x).sum().backward()
        ...             steps += 1
        ...     return steps
        >>> run_ranks(2, program)
        [1, 2]
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if not joinables:
            raise ValueError("Join() needs at least one joinable, got none")
        groups = {joinable.join_process_group for joinable in joinables}
        if len(groups) > 1:
            raise ValueError(f"all joinables of one Join must be on one group, got {len(groups)}")
        self.group = groups.pop()
        self.joinables, self.enabled = list(joinables), enable
        self._throws, self._kwargs = throw_on_early_termination, kwargs
        self._hooks: list[JoinHook] = []
        self._size = self.group.size()
        self._made: dict[tuple[int, ...], ProcessGroup] = {}
        #: The global ranks that had inputs in the last iteration.
        self.ranks_with_inputs: tuple[int, ...] = tuple(self.group.global_ranks)

    def __enter__(self) -> Join:
        if self.enabled:
            self._hooks = [joinable.join_hook(**self._kwargs) for joinable in self.joinables]
            for joinable in self.joinables:
                joinable.join_context = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.enabled:
            return
        try:
            if kind is None:
                self._follow()
        finally:
            for joinable in self.joinables:
                joinable.join_context = None
            current_world().state(_ActiveGroups).of.pop(self.group, None)

    @staticmethod
    def notify_join_context(joinable: Joinable) -> None:
        """Announce that this rank begins another iteration. Collective; blocks.

        Call it at the start of each iteration. It does nothing outside a join context, or for a
        joinable that is not the context's first.

        Raises:
            RuntimeError: The context throws on early termination, and a rank has run out.
        """
        context = joinable.join_context
        if context is not None and context.joinables[0] is joinable:
            context._begin_iteration()

    def _begin_iteration(self) -> None:
        ranks = self._exchange(True)
        if len(ranks) < self.group.size() and self._throws:
            raise RuntimeError(_EARLY)
        self._activate(ranks)

    def _exchange(self, has_inputs: bool) -> tuple[int, ...]:
        """Tell all ranks if this rank has inputs; return the global ranks that do. Collective."""
        flags = torch.empty(self.group.size(), dtype=torch.uint8)
        all_gather_into_tensor(flags, torch.tensor([has_inputs], dtype=torch.uint8), self.group)
        every = zip(self.group.global_ranks, flags.tolist(), strict=True)
        self.ranks_with_inputs = tuple(rank for rank, flag in every if flag)
        if current_pretence() is not None and 0 < flags.sum() < len(flags):
            ranks = list(self.ranks_with_inputs)
            raise PretendError(
                f"within Join at {call_site()} only ranks {ranks} of {len(flags)} have another "
                f"batch, and a plan cannot tell how ranks go on that wait for others': plan "
                f"with data that gives all ranks equally many batches"
            )
        return self.ranks_with_inputs

    def _activate(self, ranks: tuple[int, ...]) -> None:
        """Let collectives run among ``ranks``, which have inputs. Collective the first time."""
        active = current_world().state(_ActiveGroups).of
        if len(ranks) == self.group.size():
            active.pop(self.group, None)
            return
        if ranks not in self._made:
            made = new_group(list(ranks), use_local_synchronization=True)
            assert isinstance(made, ProcessGroup)
            self._made[ranks] = made
        active[self.group] = self._made[ranks]

    def _follow(self) -> None:
        """Follow the iterations of the other ranks until all have run out of inputs."""
        is_last = True
        while self._exchange(False):
            is_last = False
            if self._throws:
                raise RuntimeError(_EARLY)
            for hook in self._hooks:
                hook.main_hook()
        current_world().state(_ActiveGroups).of.pop(self.group, None)
        for hook in self._hooks:
            hook.post_hook(is_last)
        self._close_groups()

    def _close_groups(self) -> None:
        """Close the groups that :meth:`_activate` made. Local."""
        while self._made:
            _, group = self._made.popitem()
            current_world().forget(group)


_EARLY = (
    "a rank has run out of inputs, and the join context was made with "
    "throw_on_early_termination=True: all ranks stop here"
)
