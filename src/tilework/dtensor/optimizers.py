"""Steps of torch's elementwise optimizers, run on this rank's parts of all parameters at once.

Such an optimizer does to each element of a parameter what depends on that element's gradient and
states alone. So its step on the local tensors is its step on the DTensors, without an interception
for every operator of every parameter. A hook that torch calls before each optimizer's step hands
the step a *twin*: the same optimizer over the local tensors, with the local tensors of its states.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, optim
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tilework.dtensor.tensor import DTensor, wrap

#: Exactly these: a subclass may do other things.
ELEMENTWISE = frozenset(
    {
        *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
        *(optim.Adadelta, optim.Adagrad, optim.RMSprop, optim.Rprop, optim.ASGD),
    }
)

_twins: WeakKeyDictionary[Optimizer, Optimizer] = WeakKeyDictionary()


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Let the step run on the twin, if the optimizer has one."""
    if type(optimizer) not in ELEMENTWISE or not _has_dtensors(optimizer):
        return None
    twin = _twins.get(optimizer)
    if twin is None:
        twin = _twins[optimizer] = object.__new__(type(optimizer))
    states: defaultdict[Tensor, Any] = defaultdict(dict)
    groups = []
    for group in optimizer.param_groups:
        params = []
        for param in group["params"]:
            if param.__class__ is not DTensor:
                params.append(param)
                if (state := optimizer.state.get(param)) is not None:
                    states[param] = state
                continue
            local = param._local_tensor
            if param._spec.partial_axes or not param._spec.takes_part:
                return None
            params.append(local)
            if state := optimizer.state.get(param):
                if not _alike(param, state):
                    return None
                states[local] = {
                    name: value._local_tensor if value.__class__ is DTensor else value
                    for name, value in state.items()
                }
        groups.append({**group, "params": params})
        if group.get("differentiable"):
            return None
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups, twin.state = groups, states
    return (twin, *args[1:]), kwargs


def _has_dtensors(optimizer: Optimizer) -> bool:
    return any(
        param.__class__ is DTensor for group in optimizer.param_groups for param in group["params"]
    )


def _alike(param: DTensor, state: dict[str, Any]) -> bool:
    """Whether states that have elements like the parameter's lie as it does."""
    spec = param._spec
    for value in state.values():
        if value.__class__ is DTensor:
            if value._spec is not spec and value._spec != spec:
                return False
        elif isinstance(value, Tensor) and value.dim():
            return False
    return True


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Take over the states that the step has made."""
    twin = args[0]
    if twin is optimizer:
        return
    for group, its in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for param, local in zip(group["params"], its["params"], strict=True):
            if param is local:
                if local in twin.state:
                    optimizer.state[param] = twin.state[local]
                continue
            made = twin.state.get(local)
            if made:
                _take_over(optimizer.state[param], made, param, local)
        group.update({name: value for name, value in its.items() if name != "params"})
    twin.param_groups, twin.state = [], defaultdict(dict)


def _take_over(state: dict[str, Any], made: dict[str, Any], param: DTensor, local: Tensor) -> None:
    for name, value in made.items():
        known = state.get(name)
        if known is value or (known.__class__ is DTensor and known._local_tensor is value):
            continue
        per_element = isinstance(value, Tensor) and value.shape == local.shape and name != "step"
        state[name] = wrap(value, param._spec) if per_element else value


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
