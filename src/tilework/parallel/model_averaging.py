"""Averages of parameters, every few steps, instead of averages of gradients in each step.

With :func:`~tilework.parallel.comm_hooks.post_localSGD_hook`, ranks step alone or with their
neighbours, and average every ``period`` steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilework.comm.contract import ProcessGroup, ReduceOp
from tilework.comm.groups import new_group
from tilework.comm.operations.internal import all_reduce
from tilework.comm.per_call.internal import refuse_count
from tilework.comm.world import AnyGroup
from tilework.parallel.comm_hooks.hooks import group_or_default
from tilework.parallel.data_parallel.leaves import local_tensors

Params = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]


@torch.no_grad()
def average_parameters(params: Params, process_group: AnyGroup = None) -> None:
    """Replace parameters by their average over a group, in few messages. Collective; blocks.

    Args:
        params: Parameters, or an optimizer's parameter groups; those without a gradient are left
            as they are. The same on all ranks.
        process_group: The group; None: the default group.

    Example:
        >>> import torch
        >>> from tilework.parallel import average_parameters
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     p = torch.nn.Parameter(torch.tensor([float(rank)]))
        ...     p.grad = torch.zeros(1)
        ...     average_parameters([p])
        ...     return p.item()
        >>> run_ranks(2, program)
        [0.5, 0.5]
    """
    group = group_or_default(process_group)
    graded = get_params_to_average(params)
    average_tensors([local for p in graded for local in local_tensors(p.detach())], group)


def average_tensors(tensors: Iterable[Tensor], group: ProcessGroup) -> None:
    """Replace plain tensors by their averages over a group. Collective; blocks."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        all_reduce(flat, ReduceOp.AVG, group)
        parts = torch.split(flat, [tensor.numel() for tensor in alike])
        torch._foreach_copy_(alike, [p.view(t.shape) for p, t in zip(parts, alike, strict=True)])


def _each(params: Params) -> Iterable[nn.Parameter]:
    for each in params:
        if isinstance(each, Mapping):
            yield from each["params"]
        else:
            yield each


average_parameters_or_parameter_groups = average_parameters


def get_params_to_average(params: Params) -> list[nn.Parameter]:
    """The parameters that :func:`average_parameters` averages: those with a gradient. Local.

    Args:
        params: Parameters, or an optimizer's parameter groups.

    Example::

        graded = get_params_to_average(optimizer.param_groups)
    """
    return [parameter for parameter in _each(params) if parameter.grad is not None]


class PeriodicModelAverager:
    """Averages all parameters over a group every ``period`` steps.

    Args:
        period: The number of steps from one average to the next.
        warmup_steps: The number of steps before the first average: average gradients in these.
        process_group: The group; None: the default group.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: AnyGroup = None) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {warmup_steps}")
        if period < 1:
            raise ValueError(f"period must be at least 1 step, got {period}")
        self.period, self.warmup_steps, self.process_group = period, warmup_steps, process_group
        #: Steps so far.
        self.step = 0

    def average_parameters(self, params: Params) -> None:
        """Average the parameters if an average is due, then count the step. Collective if due.

        Args:
            params: As for the function of this name.
        """
        if self.is_due(self.period):
            average_parameters(params, self.process_group)
        refuse_count(type(self).__name__)
        self.step += 1

    def is_due(self, period: int) -> bool:
        """True at step ``warmup_steps``, counted from 0, and at every ``period``-th step after."""
        return self.step >= self.warmup_steps and (self.step - self.warmup_steps) % period == 0


class HierarchicalModelAverager:
    """Averages within small groups often, and within larger ones rarely.

    Args:
        period_group_size_dict: For each period, in ascending order, the size of the groups that
            average then: consecutive ranks. Periods and sizes divide the next ones; the last size
            is that of ``process_group``.
        warmup_steps: The number of steps before the first average.
        process_group: The group of all ranks; None: the default group.

    Raises:
        ValueError: Periods or sizes do not fit.

    Example:
        >>> from tilework.parallel import HierarchicalModelAverager
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     averager = HierarchicalModelAverager({2: 2, 4: 4})
        ...     return [group.size() for group in averager.groups.values()]
        >>> run_ranks(4, program)[0]
        [2, 4]
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: AnyGroup = None,
    ) -> None:
        whole = group_or_default(process_group)
        period_group_size_dict = period_group_size_dict or {}
        _check_levels(period_group_size_dict, whole.size())
        self.step, self.warmup_steps = 0, warmup_steps
        #: The group of this rank for each period, the largest last.
        self.groups: dict[int, ProcessGroup] = {}
        for period, size in period_group_size_dict.items():
            if size == whole.size():
                self.groups[period] = whole
                continue
            start = whole.rank() // size * size
            ranks = [whole.global_ranks[at] for at in range(start, start + size)]
            made = new_group(ranks, use_local_synchronization=True)
            assert isinstance(made, ProcessGroup)
            self.groups[period] = made

    def average_parameters(self, params: Params) -> None:
        """Average in the largest group that is due, if any, then count the step.

        A group is due at step ``warmup_steps``, counted from 0, and a multiple of the group's
        period later. Collective over the group that averages.
        """
        if self.step >= self.warmup_steps:
            past = self.step - self.warmup_steps
            due = [group for period, group in self.groups.items() if past % period == 0]
            if due:
                average_parameters(params, due[-1])
        refuse_count(type(self).__name__)
        self.step += 1


def _check_levels(levels: Mapping[int, int], ranks: int) -> None:
    periods, sizes = list(levels), list(levels.values())
    fits = bool(levels) and periods[0] > 0 and sizes[0] > 0
    for numbers in (periods, sizes):
        steps = pairwise(numbers)
        fits = fits and all(small < large and large % small == 0 for small, large in steps)
    if not fits or sizes[-1] != ranks:
        raise ValueError(
            f"period_group_size_dict maps ascending periods to ascending group sizes, each "
            f"dividing the next, the last of them {ranks}, the number of ranks; got {dict(levels)}"
        )


class PostLocalSGDOptimizer(Optimizer):
    """A wrapper of an optimizer that calls an averager of parameters after each step.

    Args:
        optim: Steps on this rank's parameters.
        averager: Averages parameters after some steps.
    """

    def __init__(
        self, optim: Optimizer, averager: PeriodicModelAverager | HierarchicalModelAverager
    ) -> None:
        self.optim, self.averager = optim, averager
        self.defaults = optim.defaults

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The parameter groups of the wrapped optimizer."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.optim.state

    def __repr__(self) -> str:
        return repr(self.optim)

    def step(self, closure: Any = None) -> Any:
        """Step the wrapped optimizer, then call the averager. Collective if an average is due."""
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict, with the averager's number of steps as "step"."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`. Without "step" the averager counts from 0."""
        state_dict = dict(state_dict)
        self.averager.step = int(state_dict.pop("step", 0))
        self.optim.load_state_dict(state_dict)
