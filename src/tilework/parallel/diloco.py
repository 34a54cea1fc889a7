"""``DiLoCo``: replicas train alone for many steps, and then take a step together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilework.comm.operations.internal import agree_equal
from tilework.comm.per_call.internal import refuse_count
from tilework.mesh import DeviceMesh
from tilework.parallel.comm_hooks.hooks import group_or_default
from tilework.parallel.data_parallel.leaves import local_tensors
from tilework.parallel.data_parallel.replicas import described
from tilework.parallel.model_averaging import average_tensors

#: The key of a parameter's value at the last outer step, in the state of the optimizer.
_COMMON: Final = "common"
#: Keys of the first parameter group: inner steps since the last outer step, and outer steps.
_TAKEN: Final = "inner_steps"
_ROUNDS: Final = "outer_steps"
_ADVICE: Final = (
    ". All replicas build the same model, begin with the same parameters, and take equally many "
    "steps between two outer steps"
)


class DiLoCo(Optimizer):
    """The outer optimizer of replicas that train alone for ``every`` steps (Douillard et al. 2023).

    Each replica steps an inner optimizer and calls :meth:`step` after that. Every ``every``-th call
    is an *outer step*: the replicas average how far they have come from the common parameters, and
    the outer optimizer takes this as the gradient of the common parameters, which the model gets
    on all replicas. So replicas send each parameter once in ``every`` steps. Buffers stay each
    replica's own.

    This optimizer has the common parameters as state: learning rates of the outer optimizer
    are scheduled here, and ``state_dict()``, checkpoints and ``Resilient`` restore all of it.

    Args:
        model: The module. The parameters are equal on all replicas; within a replica they may be
            sharded, by ``fully_shard`` or a plan, in the same way on all of them.
        outer: Makes the outer optimizer for a list of parameters.
        every: The number of inner steps from one outer step to the next.
        mesh: The axis of the replicas, such as ``mesh["replica"]``; None: all ranks are replicas.

    Raises:
        ValueError: ``every`` is less than 1, the mesh has several axes, or nothing can be trained.
    """

    def __init__(
        self,
        model: nn.Module,
        outer: Callable[[list[nn.Parameter]], Optimizer],
        every: int,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(f"mesh is one axis, such as mesh['replica'], got {mesh}")
        self.every, self._mesh = every, mesh
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        own = [p for p in model.parameters() if p.requires_grad]
        if not own:
            raise ValueError("the model has no parameters to train")
        common = [nn.Parameter(p.detach().clone()) for p in own]
        #: The outer optimizer.
        self.optimizer = outer(common)
        places = {id(each): at for at, each in enumerate(common)}
        groups = [
            {**group, "params": [own[places[id(p)]] for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        super().__init__(groups, self.optimizer.defaults)
        self.param_groups[0].update({_TAKEN: 0, _ROUNDS: 0})
        self._pairs = list(zip(own, common, strict=True))
        for parameter, value in self._pairs:
            self.state[parameter][_COMMON] = value.detach()
        #: The common values that the model began with: a restored state has others.
        self._begun_at = self._stamp()
        model.register_forward_pre_hook(lambda module, args: self._take_restored())
        #: The way of this replica in a round whose outer step was cut off, and the round.
        self._way: list[Tensor] = []
        self._way_round = -1

    @property
    def outer_steps(self) -> int:
        """The number of outer steps so far."""
        return int(self.param_groups[0][_ROUNDS])

    @property
    def is_apart(self) -> bool:
        """True between two outer steps: the replicas' parameters differ."""
        return bool(self.param_groups[0][_TAKEN])

    def steps(self) -> Iterator[int]:
        """The inner steps up to the next outer step; call :meth:`step` in each, last.

        For a ``step`` of ``Resilient`` that is a whole round. If a replica is lost in the outer
        step, the others come here again and take it without that replica, but train nothing again.
        Collective if that is due.

        Raises:
            RuntimeError: The body did not call :meth:`step`.
        """
        if self._way and self._way_round == self.outer_steps:
            self._meet()
            return
        self.param_groups[0][_TAKEN] = 0
        self._take_restored()
        before = self.outer_steps
        yield from range(self.every)
        if self.outer_steps == before:
            raise RuntimeError("call step() of the DiLoCo after each step of the inner optimizer")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Count an inner step; each ``every``-th call is an outer step, which is collective.

        Raises:
            ValueError: Replicas differ in steps, ``every``, sizes or common parameters; on all of
                them, before anything is changed.
            PeerLostError: A replica was lost. The parameters are as before.
        """
        if closure is not None:
            raise ValueError("DiLoCo takes no closure: give it to the inner optimizer")
        refuse_count(type(self).__name__)
        self.param_groups[0][_TAKEN] += 1
        if self.param_groups[0][_TAKEN] >= self.every:
            with torch.no_grad():
                parameters = ((self.state[p][_COMMON], p.detach()) for p, _ in self._pairs)
                pairs = [(local_tensors(c), local_tensors(p)) for c, p in parameters]
                self._way = [c - p for cs, ps in pairs for c, p in zip(cs, ps, strict=True)]
            self._way_round = self.outer_steps
            self._meet()

    @torch.no_grad()
    def _meet(self) -> None:
        """Take the outer step. Nothing changes if it raises."""
        group = group_or_default(None if self._mesh is None else self._mesh.get_group())
        agree_equal(self._facts, group, "the replicas differ:", hint=_ADVICE)
        means = [each.clone() for each in self._way]
        average_tensors(means, group)
        for mine, theirs in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            theirs.update({k: v for k, v in mine.items() if k in theirs and k != "params"})
        for parameter, common in self._pairs:
            values = self.state[parameter]
            common.copy_(values[_COMMON])
            self.optimizer.state[common] = {k: v for k, v in values.items() if k != _COMMON}
            common.grad = torch.zeros_like(common)
            for local in local_tensors(common.grad):
                local.copy_(means.pop(0))
        self.optimizer.step()
        for parameter, common in self._pairs:
            common.grad = None
            self.state[parameter].update(self.optimizer.state[common])
            self.state[parameter][_COMMON].copy_(common)
        self._set_model()
        self._way = []
        self.param_groups[0].update({_TAKEN: 0, _ROUNDS: self.outer_steps + 1})

    @torch.no_grad()
    def _set_model(self) -> None:
        for parameter, _ in self._pairs:
            parameter.copy_(self.state[parameter][_COMMON])
        self._begun_at = self._stamp()

    def _take_restored(self) -> None:
        """Give the model the common parameters if they were restored, from where a round begins."""
        if not self.is_apart and self._stamp() != self._begun_at:
            self._set_model()

    def _stamp(self) -> list[tuple[int, int]]:
        first = self.state[self._pairs[0][0]][_COMMON]
        return [(each.data_ptr(), each._version) for each in local_tensors(first)]

    def _facts(self) -> dict[str, object]:
        facts: dict[str, object] = {"every": self.every, "outer steps": self.outer_steps}
        for name, (parameter, _) in zip(self._names, self._pairs, strict=True):
            facts[name] = described(self.state[parameter][_COMMON], True)
        return facts
