"""Steps of torch's elementwise optimizers, run on this rank's local tensors of all parameters.

Such a step on the local tensors is the step on the DTensors, without an interception for every
operator of every parameter. The last hook before a step puts a *twin* in the optimizer's place: an
optimizer of the same class and options, over the local tensors of parameters and states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from tilework.comm.per_call.internal import unrecorded
from tilework.dtensor.base import grads_of, is_moved
from tilework.dtensor.provenance.digests import (
    NUMBERS,
    call_counts_of,
    digest_of,
    note_gradient,
    note_write,
    number_seed,
    seeds_in,
    stable_digest,
)
from tilework.dtensor.tensor import DTensor, wrap
from tilework.dtensor.torch_tensors import is_torch_dtensor
from tilework.dtensor.verify import compare_after_step
from tilework.dtensor.views.moved_views import wrote
from tilework.dtensor.views.places import count_write
from tilework.models import ELEMENTWISE, is_per_element

_twins: WeakKeyDictionary[Optimizer, Optimizer] = WeakKeyDictionary()


def _surround_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Have the step run on the twin, inside all hooks of the program."""
    if type(optimizer) in ELEMENTWISE and _has_dtensors(optimizer):
        _place_hook(optimizer._optimizer_step_pre_hooks, _step_on_twin, last=True)
        _place_hook(optimizer._optimizer_step_post_hooks, _keep_states, last=False)


def _place_hook(hooks: Any, hook: Any, last: bool) -> None:
    """Make a hook the first or the last of the optimizer's hooks."""
    keys = iter(reversed(hooks) if last else hooks)
    key = next(keys, None)
    if key is None or hooks[key] is not hook:
        for known in [key for key, each in hooks.items() if each is hook]:
            del hooks[known]
        number = RemovableHandle(hooks).id
        hooks[number] = hook
        hooks.move_to_end(number, last=last)


def _step_on_twin(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """The arguments of a step, with the twin in place of the optimizer."""
    twin = _twins.get(optimizer)
    if twin is None:
        twin = _twins[optimizer] = object.__new__(type(optimizer))
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _fill(twin, optimizer)
        return (twin, *args[1:]), kwargs

    def close() -> Any:  # called as the step begins: it changes gradients, options and states
        result = closure()
        _fill(twin, optimizer)
        return result

    twin.__dict__ = {**optimizer.__dict__}
    if len(args) > 1:
        return (twin, close, *args[2:]), kwargs
    return (twin,), {**kwargs, "closure": close}


def _fill(twin: Optimizer, optimizer: Optimizer) -> None:
    """Give the twin options and local tensors, or DTensors if these allow no local step."""
    twin.__dict__ = {**optimizer.__dict__}  # without what GradScaler has deleted since
    of_locals = _on_locals(optimizer)
    if of_locals is not None:
        _keep_digests(optimizer)
        twin.param_groups, twin.state = of_locals


def _on_locals(
    optimizer: Optimizer,
) -> tuple[list[dict[str, Any]], defaultdict[Tensor, Any]] | None:
    """The parameter groups and states with local tensors; None if one allows no local step."""
    states: defaultdict[Tensor, Any] = defaultdict(dict)
    groups = []
    for group in optimizer.param_groups:
        params = []
        for param in group["params"]:
            if param.__class__ is not DTensor:
                if is_torch_dtensor(param):  # torch's operators refuse local tensors beside it
                    return None
                params.append(param)
                if (state := optimizer.state.get(param)) is not None:
                    states[param] = state
                continue
            if not _has_own_local(param):
                return None
            local = param._local_tensor
            params.append(local)
            if state := optimizer.state.get(param):
                if not _sharded_alike(param, state):
                    return None
                states[local] = {
                    name: value._local_tensor if value.__class__ is DTensor else value
                    for name, value in state.items()
                }
        groups.append({**group, "params": params})
        if group.get("differentiable"):
            return None
    return groups, states


def _has_own_local(param: DTensor) -> bool:
    """True if a step may write the local tensors alone, of a parameter and its gradient."""
    grads = grads_of(param)
    if grads.deferred is not None:
        grads.deferred()
    if param._spec.partial_axes or not param._spec.takes_part or is_moved(param):
        return False  # a write to a moved view must also reach the base's memory
    return grads.shown is None or not is_moved(grads.shown)


def _keep_digests(optimizer: Optimizer) -> None:
    """Store digests that follow from the parameters' values, before the step changes the values."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.__class__ is DTensor and param._digest is None and param._made is None:
                param._digest = digest_of(param)


def _has_dtensors(optimizer: Optimizer) -> bool:
    return any(
        param.__class__ is DTensor for group in optimizer.param_groups for param in group["params"]
    )


def _sharded_alike(param: DTensor, state: dict[str, Any]) -> bool:
    """True if all states with elements are DTensors of the parameter's layout."""
    spec = param._spec
    for value in state.values():
        if value.__class__ is DTensor:
            if value._spec is not spec and value._spec != spec:
                return False
        elif isinstance(value, Tensor) and value.dim():
            return False
    return True


def _keep_states(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give the optimizer the states and options that the step left in the twin."""
    twin = _twins[optimizer]
    if twin.param_groups is optimizer.param_groups:
        return
    for group, local_group in zip(optimizer.param_groups, twin.param_groups, strict=True):
        states: list[dict[str, Any]] = []
        for param, local in zip(group["params"], local_group["params"], strict=True):
            state: dict[str, Any] = {}
            if param is local:
                if local in twin.state:
                    optimizer.state[param] = twin.state[local]
            elif local_state := twin.state.get(local):
                state = optimizer.state[param]
                _wrap_states(state, local_state, param, local)
            states.append(state)
        group.update({name: value for name, value in local_group.items() if name != "params"})
        _note_step(optimizer, group, states)
    twin.param_groups, twin.state = [], defaultdict(dict)


def _wrap_states(
    state: dict[str, Any], local_state: dict[str, Any], param: DTensor, local: Tensor
) -> None:
    for name, value in local_state.items():
        known = state.get(name)
        if known is value or (known.__class__ is DTensor and known._local_tensor is value):
            continue
        if is_per_element(name, value, local):
            digest = hash((digest_of(param), _digest_of_name(name)))
            state[name] = wrap(value, param._spec, digest)
        else:
            state[name] = value


#: Options that change no result: how a step is computed.
_WAYS = frozenset({"foreach", "fused", "capturable", "differentiable"})


def _digest_of_options(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """The digest of what a step does to a group's parameters, whatever their gradients."""
    seeds: list[Any] = [_digest_of_name(type(optimizer).__name__)]
    for option in optimizer.defaults:
        value = group.get(option)
        if option in _WAYS:
            continue
        if value.__class__ is float and value == value:
            seeds.append(value)  # quicker than a digest; different numbers rarely share a hash
        elif value.__class__ in NUMBERS:
            seeds.append(number_seed(value))
        elif value is not None:
            seeds_in(value, seeds)
    return hash(tuple(seeds))


@unrecorded
def _note_step(
    optimizer: Optimizer, group: dict[str, Any], states: Sequence[dict[str, Any]]
) -> None:
    """Mix a step into the digests of the parameters that it changed, and of their states."""
    step = _digest_of_options(optimizer, group)
    mesh, passes = None, 0
    for param, state in zip(group["params"], states, strict=True):
        if param.__class__ is not DTensor or (local := param._local_tensor.grad) is None:
            continue
        if param._spec.mesh is not mesh:
            mesh = param._spec.mesh
            passes = call_counts_of(mesh).passes
        grads = grads_of(param)
        grad = grads.shown
        if (
            grad is None
            or grad._local_tensor is not local
            or grads_of(grad).noted == (grad._digest, None)
        ):
            digest = hash((digest_of(param), step, passes, grads.cleared))
        else:  # the gradient has a digest of the writes to it
            digest = hash((digest_of(param), step, note_gradient(param, grad)))
        for value in state.values():
            if value.__class__ is DTensor:
                value._digest = digest = hash((digest, value._digest or digest_of(value)))
            elif value.__class__ is Tensor and value.is_cpu and not value.dim():  # count of steps
                digest = hash((digest, value.item()))
        note_write(param, digest)
        count_write(param)
        wrote(param, "a step of an optimizer")


_digest_of_name = cache(stable_digest)

register_optimizer_step_pre_hook(_surround_step)
register_optimizer_step_post_hook(
    lambda optimizer, args, kwargs: unrecorded(compare_after_step)(optimizer)
)
