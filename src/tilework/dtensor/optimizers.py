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
from tilework.dtensor.base import grads_of, is_moved, memory_of
from tilework.dtensor.provenance.digests import (
    call_counts_of,
    digest_of,
    note_gradient,
    note_write,
    seeds_in,
    stable_digest,
)
from tilework.dtensor.tensor import DTensor, wrap
from tilework.dtensor.torch_tensors import is_torch_dtensor
from tilework.dtensor.verify import compare_after_step
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


def _fill(twin: Any, optimizer: Optimizer) -> None:
    """Give the twin options and local tensors, or DTensors if these allow no local step."""
    twin.__dict__ = {**optimizer.__dict__}  # without what GradScaler has deleted since
    states: defaultdict[Tensor, Any] = defaultdict(dict)
    groups, taken = [], []
    for group in optimizer.param_groups:
        params = _locals_of(group["params"], optimizer.state, states)
        if params is None or group.get("differentiable"):
            return
        taken.append(params)
        groups.append({**group, "params": [local for _, local, _, _ in params]})
    twin.param_groups, twin.state, twin._taken = groups, states, taken


#: A parameter, the local tensor (the parameter itself if plain), and the states of both.
_Taken = tuple[Tensor, Tensor, dict[str, Any] | None, dict[str, Any]]


def _locals_of(
    params: Sequence[Tensor], states: Any, local_states: dict[Tensor, Any]
) -> list[_Taken] | None:
    """Local tensors of parameters and states; None: no local step. Stores digests before."""
    found: list[_Taken] = []
    for param in params:
        state = states.get(param)
        if param.__class__ is not DTensor:
            if is_torch_dtensor(param):  # torch's operators refuse local tensors beside it
                return None
            if state is not None:
                local_states[param] = state
            found.append((param, param, state, {}))
            continue
        local, spec = param._local_tensor, param._spec
        if not _has_own_local(param):
            return None
        if param._digest is None and param._made is None:
            param._digest = digest_of(param)
        own: dict[str, Any] = {}
        for name, value in state.items() if state else ():
            if value.__class__ is DTensor:
                if value._spec is not spec and value._spec != spec:
                    return None
                value = value._local_tensor
            elif isinstance(value, Tensor) and value.dim():
                return None
            own[name] = value
        local_states[local] = own
        found.append((param, local, state, own))
    return found


def _has_own_local(param: DTensor) -> bool:
    """True if a step may write the local tensors alone, of a parameter and its gradient."""
    grads, spec = param._grads, param._spec
    if grads is not None:
        if grads.deferred is not None:
            grads.deferred()
        if grads.shown is not None and is_moved(grads.shown):
            return False  # a write to a moved view must also reach the base's memory
    moved = param._view_of is not None and is_moved(param)
    return spec.takes_part and not (spec.partial_axes or moved)


def _has_dtensors(optimizer: Optimizer) -> bool:
    return any(
        param.__class__ is DTensor for group in optimizer.param_groups for param in group["params"]
    )


def _keep_states(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give the optimizer the states and options that the step left in the twin."""
    twin: Any = _twins[optimizer]
    if twin.param_groups is optimizer.param_groups:
        return
    groups = zip(optimizer.param_groups, twin.param_groups, twin._taken, strict=True)
    for group, local_group, taken in groups:
        local_group["params"] = group["params"]
        group.update(local_group)
        _note_step(optimizer, group, taken, twin.state)
    twin.param_groups, twin.state, twin._taken = [], defaultdict(dict), []


#: Options that change no result: how a step is computed.
_WAYS = frozenset({"foreach", "fused", "capturable", "differentiable"})


def _digest_of_options(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """The digest of what a step does to a group's parameters, whatever their gradients."""
    seeds: list[Any] = [_digest_of_name(type(optimizer).__name__)]
    for option in optimizer.defaults:
        value = group.get(option)
        if value is None or option in _WAYS:
            continue
        for number in value if value.__class__ is tuple else (value,):
            if (number.__class__ is float and number == number) or number.__class__ is bool:
                seeds.append(number)  # quicker than a digest; different numbers rarely share a hash
            else:
                seeds_in(number, seeds)
    return hash(tuple(seeds))


@unrecorded
def _note_step(
    optimizer: Optimizer, group: dict[str, Any], taken: Sequence[_Taken], local_states: Any
) -> None:
    """Keep the states of a step, and mix it into the digests of what it has changed."""
    step, states, written = _digest_of_options(optimizer, group), optimizer.state, []
    mesh, passes = None, 0
    for param, local, state, own in taken:
        if param.__class__ is not DTensor:
            if (plain := local_states.get(param)) is not None:
                states[param] = plain
            continue
        if state is None:
            state = states[param] if own else {}
        if own:
            _keep_new(own, state, param)
        if (grad := local.grad) is None:
            continue
        if param._spec.mesh is not mesh:
            mesh = param._spec.mesh
            passes = call_counts_of(mesh).passes
        record = param._grads or grads_of(param)
        seeds = [digest_of(param), step, passes, record.cleared]
        if record.shown is not None and _is_written(record.shown, grad):
            seeds.append(note_gradient(param, record.shown))
        note_write(param, _mixed(seeds, state))
        memory = memory_of(param)
        memory.writes += 1
        memory.writer = "a step of an optimizer"
        written.append(param)
    count_write(*written)


def _mixed(seeds: list[Any], state: dict[str, Any]) -> int:
    """The digest of a step, from which the digests of the states follow from now on."""
    sharded = []
    for value in state.values():
        if value.__class__ is DTensor:
            seeds.append(value._digest or digest_of(value))
            sharded.append(value)
        elif value.__class__ is Tensor and value.is_cpu and not value.dim():  # count of steps
            seeds.append(value.item())
    digest = then = hash(tuple(seeds))
    for value in sharded:
        value._digest = then = hash((then, digest))
    return digest


def _keep_new(own: dict[str, Any], state: dict[str, Any], param: DTensor) -> None:
    """Store the states that a step has made, as DTensors if they have the parameter's elements."""
    for name, value in own.items():
        known = state.get(name)
        if known is value or (known.__class__ is DTensor and known._local_tensor is value):
            continue
        if is_per_element(name, value, param._local_tensor):
            value = wrap(value, param._spec, hash((digest_of(param), _digest_of_name(name))))
        state[name] = value


def _is_written(shown: DTensor, grad: Tensor) -> bool:
    """True if a gradient that the program has asked for has a digest of the writes to it."""
    return shown._local_tensor is grad and grads_of(shown).noted != (shown._digest, None)


_digest_of_name = cache(stable_digest)

register_optimizer_step_pre_hook(_surround_step)
register_optimizer_step_post_hook(compare_after_step)
