"""ZeroRedundancyOptimizer: each rank keeps the states of a share of the parameters.

S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC
2020 (stage 1). Parameters and gradients are replicated, as DistributedDataParallel has them. A rank
steps on the parameters that it owns, and sends them to the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import broadcast_object_list, gather_object
from tilework.comm.world import AnyGroup
from tilework.parallel.comm_hooks.bucket import GradBucket
from tilework.parallel.comm_hooks.hooks import group_or_default
from tilework.parallel.data_parallel.join import Join, Joinable, JoinHook, active_group
from tilework.parallel.data_parallel.leaves import local_tensors, shared_ranks
from tilework.parallel.data_parallel.replicas import broadcast_tensors, compare_values
from tilework.parallel.passes import is_due
from tilework.tiled import TiledTensor

_ADVICE = (
    "ZeroRedundancyOptimizer steps parameters that all ranks have, each on one rank: look for code "
    "that writes to parameters, or loads them, on one rank only"
)


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """An optimizer whose states are spread over the ranks; parameters stay replicated.

    Parameters are dealt out by size: ranks own nearly equally many elements. A step is collective
    over the group, and blocks: each rank steps on the parameters that it owns, then all ranks
    exchange them.

    Within ``Join([ddp, optimizer])`` a rank that has run out of inputs still steps on the
    parameters that it owns. Each iteration of the other ranks must step once.

    Args:
        params: The parameters or parameter groups, the same on all ranks.
        optimizer_class: The class of the optimizer that steps on a rank's own parameters.
        process_group: The group; None: the default group.
        parameters_as_bucket_view: Accepted for torch's sake: parameters stay where they are.
        overlap_with_ddp: Backward steps bucket by bucket, by the hook of
            :func:`~tilework.parallel.comm_hooks.hook_with_zero_step`; :meth:`step` does nothing.
        defaults: The optimizer's settings.

    Raises:
        ValueError: There are no parameters.
        TypeError: ``optimizer_class`` is not a subclass of Optimizer.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        process_group: AnyGroup = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise TypeError(
                f"optimizer_class must be a subclass of Optimizer, got {optimizer_class!r}"
            )
        Joinable.__init__(self)
        self.process_group = group_or_default(process_group)
        self.overlap_with_ddp = overlap_with_ddp
        self._by_bucket: dict[int, _BucketStep] = {}
        self._class, self._defaults = optimizer_class, defaults
        self._owner: dict[nn.Parameter, int] = {}
        self._loads = [0] * self.process_group.size()
        self._steps = 0
        self._saved: list[tuple[dict[int, Any], dict[int, Any]]] | None = None
        self.optim: Optimizer | None = None
        self._is_constructed = False
        # Groups have all settings, as in the state dicts of the optimizer itself. Muon, for one,
        # takes only matrices.
        every = optimizer_class([nn.Parameter(torch.empty(0, 0))], **defaults).defaults
        super().__init__(params, every)
        self._is_constructed = True
        self._check_layouts()
        self._deal()

    def _check_layouts(self) -> None:
        for at, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            if not isinstance(parameter, TiledTensor):
                continue
            if self.overlap_with_ddp:
                raise ValueError(
                    f"overlap_with_ddp=True takes plain parameters, got a "
                    f"{type(parameter).__name__} as number {at}: call step() after backward instead"
                )
            if others := shared_ranks(parameter, self.process_group):
                raise ValueError(
                    f"parameter {at}, a {type(parameter).__name__}, is sharded over ranks of the "
                    f"group already ({others}): the states are as well, so take the plain "
                    f"optimizer"
                )

    def _deal(self) -> None:
        new = [p for group in self.param_groups for p in group["params"] if p not in self._owner]
        for parameter in sorted(new, key=lambda p: -p.numel()):  # stable: the same on every rank
            rank = min(range(len(self._loads)), key=self._loads.__getitem__)
            self._owner[parameter] = rank
            self._loads[rank] += parameter.numel()
        own = [self._own_part(group) for group in self.param_groups]
        self._by_bucket.clear()
        before = None if self.optim is None else self.optim.state
        # An optimizer refuses an empty list of parameters, but a rank may own none.
        filled = [group for group in own if group["params"]]
        self.optim = self._class(filled, **self._defaults) if filled else None
        if before is not None and self.optim is not None:
            self.optim.state.update(before)

    def _own_part(self, group: Mapping[str, Any]) -> dict[str, Any]:
        rank = self.process_group.rank()
        return {**group, "params": [p for p in group["params"] if self._owner[p] == rank]}

    def owner_of(self, parameter: nn.Parameter) -> int:
        """The global rank that keeps a parameter's states. Local."""
        return self.process_group.global_ranks[self._owner[parameter]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and deal them out to ranks. Local; call it with the same on all ranks."""
        super().add_param_group(param_group)
        if self._is_constructed:
            self._deal()

    def step(self, closure: Any = None, **keywords: Any) -> Any:
        """Step on this rank's parameters, and receive the others from their owners. Collective.

        Args:
            closure: Computes the loss again, on every rank.
            keywords: For the optimizer's own ``step``; the same on all ranks.

        Raises:
            CollectiveMismatchError: Ranks have different parameters; on every rank. Ranks compare
                them in the first four steps, in every fourth up to the 64th, and in every 16th
                later.
        """
        if self.overlap_with_ddp:
            warnings.warn(
                "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps within backward, by the hook "
                "that hook_with_zero_step makes: leave step() out",
                stacklevel=2,
            )
            return None
        Join.notify_join_context(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = active_group(self.process_group)
        if active is not self.process_group:
            self._hand_over(active.global_ranks)
        self._step_and_exchange(**keywords)
        return loss

    def _step_and_exchange(self, **keywords: Any) -> None:
        self._steps += 1
        if is_due(self._steps):
            self._compare()
        if self.optim is not None:
            self._copy_settings()
            self.optim.step(**keywords)
            self._copy_settings(back=True)
        self._exchange()

    def _copy_settings(self, back: bool = False) -> None:
        """Copy settings of parameter groups, as learning rates, to this rank's optimizer."""
        assert self.optim is not None
        filled = [self.param_groups[at] for at in self._filled()]
        for own, group in zip(self.optim.param_groups, filled, strict=True):
            source, target = (own, group) if back else (group, own)
            target.update(_settings(source))

    def _filled(self) -> list[int]:
        return [at for at, g in enumerate(self.param_groups) if self._own_part(g)["params"]]

    def _compare(self) -> None:
        """Raise if ranks hold different parameters: a step would mix models. Collective."""
        every = (p for group in self.param_groups for p in group["params"])
        named = [
            (f"parameter {number}", local)
            for number, parameter in enumerate(every)
            for local in local_tensors(parameter.detach())
        ]
        compare_values(named, self.process_group, _ADVICE)

    def _exchange(self) -> None:
        for rank in range(self.process_group.size()):
            owned = [
                local
                for parameter, owner in self._owner.items()
                if owner == rank
                for local in local_tensors(parameter.detach())
            ]
            broadcast_tensors(owned, self.process_group, rank)

    # -- uneven inputs -----------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook by which this rank, without inputs, takes part in steps of the other ranks.

        Raises:
            RuntimeError: The optimizer steps within backward (``overlap_with_ddp``).
        """
        if self.overlap_with_ddp:
            raise RuntimeError(
                "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps within backward, and a rank "
                "without inputs runs no backward: use overlap_with_ddp=False within Join"
            )
        return _StepWithoutInputs(self)

    @property
    def join_process_group(self) -> ProcessGroup:
        return self.process_group

    @torch.no_grad()
    def _hand_over(self, active: Sequence[int]) -> None:
        """Send averages and settings from the first of ``active`` to owners without inputs."""
        group = self.process_group
        source = group.global_ranks.index(active[0])
        away = {at for at, rank in enumerate(group.global_ranks) if rank not in active}
        theirs = [p for p, owner in self._owner.items() if owner in away]
        settings = [_settings(each) for each in self.param_groups]
        facts = [([p.grad is not None for p in theirs], settings)]
        broadcast_object_list(facts, group=group, group_src=source)
        has_grad, settings = facts[0]
        for each, new in zip(self.param_groups, settings, strict=True):
            each.update(new)
        for parameter, given in zip(theirs, has_grad, strict=True):
            if not given:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        grads = [local for p in theirs if p.grad is not None for local in local_tensors(p.grad)]
        broadcast_tensors(grads, group, source)

    def _follow(self) -> None:
        """On a rank without inputs: take part in a step of the other ranks. Collective."""
        assert self.join_context is not None
        self._hand_over(self.join_context.ranks_with_inputs)
        self._step_and_exchange()

    # -- steps within backward ---------------------------------------------------------------

    @torch.no_grad()
    def step_bucket(self, bucket: GradBucket) -> None:
        """Step on this rank's share of a bucket, then send it to all ranks. Collective.

        Args:
            bucket: A bucket after the reduction: the buffer holds the averages. The same on all
                ranks.
        """
        known = self._by_bucket.get(bucket.index())
        parameters = bucket.parameters()
        if known is None or known.is_of_others(parameters):
            known = self._by_bucket[bucket.index()] = _BucketStep(self, parameters)
        known.step(bucket.gradients())
        owners = [self._owner[parameter] for parameter in parameters]  # type: ignore[index]
        for rank in sorted(set(owners)):
            owned = [p.detach() for p, at in zip(parameters, owners, strict=True) if at == rank]
            broadcast_tensors(owned, self.process_group, rank)

    # -- states ------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send all states to one rank, so that :meth:`state_dict` works there. Collective; blocks.

        Args:
            to: The global rank.
        """
        own: tuple[dict[int, Any], dict[int, Any]] = {}, {}
        if self.optim is not None:
            settings = {at: _settings(self.param_groups[at]) for at in self._filled()}
            own = _on_cpu(self._by_index()), settings
        is_target = self.process_group.global_ranks[self.process_group.rank()] == to
        gathered: list[Any] | None = [None] * self.process_group.size() if is_target else None
        gather_object(own, gathered, to, self.process_group)
        self._saved = gathered

    def _by_index(self) -> dict[int, Any]:
        assert self.optim is not None
        every = [p for group in self.param_groups for p in group["params"]]
        return {at: self.optim.state[p] for at, p in enumerate(every) if p in self.optim.state}

    def state_dict(self) -> dict[str, Any]:
        """The states of all parameters, in the form of the plain optimizer's. Local.

        Raises:
            RuntimeError: No :meth:`consolidate_state_dict` has sent the states to this rank.
        """
        if self._saved is None:
            raise RuntimeError(
                "state_dict() has the states of all ranks: call consolidate_state_dict(to=rank) on "
                "every rank first, then state_dict() on that rank"
            )
        numbers = iter(range(len(self._owner)))
        # Only ranks that own parameters of a group know the settings that a step adds to it.
        known = {at: each for _, part in reversed(self._saved) for at, each in part.items()}
        groups = [
            {**group, **known.get(at, {}), "params": [next(numbers) for _ in group["params"]]}
            for at, group in enumerate(self.param_groups)
        ]
        state = {at: value for part, _ in self._saved for at, value in part.items()}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of all parameters; each rank keeps the states that it owns. Local.

        Args:
            state_dict: From this class or from the plain optimizer, the same on all ranks.

        Raises:
            ValueError: The groups have other numbers of parameters than those of this optimizer.
        """
        sizes, given = (
            [len(group["params"]) for group in groups]
            for groups in (self.param_groups, state_dict["param_groups"])
        )
        if sizes != given:
            raise ValueError(
                f"the state dict has groups of {given} parameters, and this optimizer of {sizes}: "
                f"load the state dict of an optimizer with the same groups"
            )
        every = [p for group in self.param_groups for p in group["params"]]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(_settings(saved))
        if self.optim is None:
            return
        self._copy_settings()
        self.optim.state.clear()
        rank = self.process_group.rank()
        for at, value in state_dict["state"].items():
            parameter = every[int(at)]
            if self._owner[parameter] == rank:
                self.optim.state[parameter] = {
                    name: one.to(parameter.device, copy=True) if torch.is_tensor(one) else one
                    for name, one in value.items()
                }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _on_cpu(state: dict[int, Any]) -> dict[int, Any]:
    return {
        at: {name: one.cpu() if torch.is_tensor(one) else one for name, one in value.items()}
        for at, value in state.items()
    }


class _StepWithoutInputs(JoinHook):
    """Steps on a rank that has run out of inputs, once for each step of the others."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer._follow()


class _BucketStep:
    """The optimizer's step on the parameters of one bucket that this rank owns."""

    def __init__(self, whole: ZeroRedundancyOptimizer, parameters: Sequence[Tensor]) -> None:
        self._whole, self._parameters = whole, list(parameters)
        rank = whole.process_group.rank()
        unknown = [p for p in parameters if p not in whole._owner]
        if unknown:
            raise ValueError(
                f"hook_with_zero_step: {len(unknown)} parameters of the module, the first of shape "
                f"{list(unknown[0].shape)}, are not the optimizer's: give it model.parameters()"
            )
        self._own = {p for p in parameters if whole._owner[p] == rank}  # type: ignore[index]
        groups = [
            {**group, "params": [p for p in group["params"] if p in self._own]}
            for group in whole.param_groups
        ]
        self._filled = [at for at, group in enumerate(groups) if group["params"]]
        self.optim: Optimizer | None = None
        if self._filled:
            assert whole.optim is not None
            self.optim = whole._class([groups[at] for at in self._filled], **whole._defaults)
            self.optim.state = whole.optim.state  # one state for all buckets

    def is_of_others(self, parameters: Sequence[Tensor]) -> bool:
        return [*map(id, parameters)] != [*map(id, self._parameters)]

    def step(self, grads: Sequence[Tensor]) -> None:
        """Step on this rank's share of the bucket, and leave every ``.grad`` unchanged. Local."""
        if self.optim is None:
            return
        for own, at in zip(self.optim.param_groups, self._filled, strict=True):
            own.update(_settings(self._whole.param_groups[at]))
        before = [parameter.grad for parameter in self._parameters]
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad if parameter in self._own else None
        self.optim.step()
        for own, at in zip(self.optim.param_groups, self._filled, strict=True):
            self._whole.param_groups[at].update(_settings(own))
        for parameter, old in zip(self._parameters, before, strict=True):
            parameter.grad = old
