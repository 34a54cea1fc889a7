"""fully_shard: data parallelism in which parameters, gradients and optimizer states are sharded.

Each module given to :func:`fully_shard` gathers its parameters before its forward and backward
passes, and frees them after. Gradients are reduce-scattered when all of the module's are there.
Between uses, a rank holds its shards only. The method is that of S. Rajbhandari et al., *ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models*, SC 2020 (stage 3); the interface is
torch's FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from tilework.comm.contract import ProcessGroup
from tilework.comm.world import current_world, get_default_group
from tilework.layout import Shard
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.mesh.device_mesh import mesh_or_current
from tilework.parallel.data_parallel.ddp import DistributedDataParallel
from tilework.parallel.data_parallel.outputs import call_at_backward, replace_tensors
from tilework.parallel.fully_sharded.flat_group import FlatGroup
from tilework.parallel.fully_sharded.policies import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from tilework.parallel.fully_sharded.shards import collect, sharded_param
from tilework.tiled.module_plan import check_is_module

_engine: Any = torch.autograd.Variable._execution_engine


@dataclass(eq=False)
class _Order:
    """The order in which the modules of one root gather, as the first forward pass found it."""

    states: list[State] = field(default_factory=list)
    is_known: bool = False
    #: The number of the backward pass under way; -1 for none.
    task: int = -1


class State:
    """The parameters of one call of fully_shard, and when they are gathered and freed."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: list[FlatGroup],
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.modules, self.groups, self.policy = list(modules), groups, policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_sync = True
        self.order: _Order | None = None
        self.is_root = False
        self.forward_prefetch: list[State] | None = None
        self.backward_prefetch: list[State] | None = None
        self._ready = 0
        self._hooked: set[int] = set()

    # -- gathering and freeing ---------------------------------------------------------------

    def start_gather(self, async_op: bool = True) -> None:
        for group in self.groups:
            group.start_gather(async_op)

    def gather(self) -> None:
        """Let the modules hold full parameters. Collective; blocks."""
        self.start_gather(async_op=False)
        for group in self.groups:
            group.finish_gather()
            self._hook(group)

    def free(self) -> None:
        for group in self.groups:
            group.free()

    def _hook(self, group: FlatGroup) -> None:
        for param in group.params:
            if param.requires_grad and id(param.full_local) not in self._hooked:
                self._hooked.add(id(param.full_local))
                param.full_local.register_post_accumulate_grad_hook(self._on_grad)

    # -- forward -----------------------------------------------------------------------------

    def before_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._find_order()
        self.gather()
        if torch._C._current_graph_task_id() == -1:  # not where backward computes it again
            for state in self._next_in_forward():
                state.start_gather()
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            return _cast((args, kwargs), dtype)  # type: ignore[no-any-return]
        return args, kwargs

    def after_forward(self, output: Any) -> Any:
        order = self.order
        assert order is not None
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward and self._frees_after_forward():
            self.free()
        if self.is_root and not in_backward:
            order.is_known = True
        if self.policy.output_dtype is not None:
            output = _cast(output, self.policy.output_dtype)
        if torch.is_grad_enabled():
            output = call_at_backward(output, self.before_backward)
        return output

    def _frees_after_forward(self) -> bool:
        if self.reshard_after_forward is None:  # the root's parameters are needed at once
            return not self.is_root
        return self.reshard_after_forward

    def _find_order(self) -> None:
        """Make this state the root of all within it, at the first forward pass."""
        if self.order is None:
            self.is_root, self.order = True, _Order()
            for module in self.modules:
                for inner in module.modules():
                    state = getattr(inner, "_fsdp_state", None)
                    if isinstance(state, State):
                        state.order = self.order
                        state.is_root = state is self
        if not self.order.is_known and self not in self.order.states:
            self.order.states.append(self)

    def _next_in_forward(self) -> list[State]:
        if self.forward_prefetch is not None:
            return self.forward_prefetch
        return self._beside(1)

    def _beside(self, step: int) -> list[State]:
        order = self.order
        if order is None or not order.is_known or self not in order.states:
            return []
        at = order.states.index(self) + step
        return [order.states[at]] if 0 <= at < len(order.states) else []

    # -- backward ----------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Gather again what forward has freed, when backward reaches an output."""
        self._begin_backward()
        self.gather()
        ahead = self.backward_prefetch
        for state in self._beside(-1) if ahead is None else ahead:
            state.start_gather()

    def _begin_backward(self) -> None:
        """Have the end of this backward pass be heard of, once."""
        order = self.order
        assert order is not None
        if order.task == -1:
            order.task = torch._C._current_graph_task_id()
            _engine.queue_callback(self._end_backward)

    def _on_grad(self, _: Tensor) -> None:
        self._ready += 1
        if self._ready == len(self._hooked):
            self._finish_backward()

    def _finish_backward(self) -> None:
        """Reduce the gradients and free the parameters, when backward is through."""
        self._ready = 0
        if self.requires_sync:
            for group in self.groups:
                group.reduce()
        if self.reshard_after_backward:
            self.free()

    def _end_backward(self) -> None:
        """Finish the modules of which some gradients have not come."""
        order = self.order
        assert order is not None
        order.task = -1
        for state in reversed(order.states):
            if state._ready or any(group.is_full for group in state.groups):
                has_grads = any(
                    param.full is not None and param.full_local.grad is not None
                    for group in state.groups
                    for param in group.params
                )
                if has_grads:
                    state._finish_backward()
                elif state.reshard_after_backward:
                    state.free()


class FSDPModule:
    """The methods that a module has after :func:`fully_shard`. Its class is a subclass of both."""

    _fsdp_state: State

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's parameters now. Collective over the mesh.

        Args:
            async_op: Return at once; wait with the handle, or by running forward.
        """
        self._fsdp_state.start_gather(async_op)
        handle = UnshardHandle(self._fsdp_state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the full parameters; the module's parameters are DTensors again. Local."""
        self._fsdp_state.free()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce gradients in backward, or accumulate the full ones on each rank. Local."""
        for state in _states(self, recurse):
            state.requires_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free parameters after forward, or keep them until backward is through. Local."""
        for state in _states(self, recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Free parameters after backward, or keep them: for accumulation. Local."""
        for state in _states(self, recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather these modules' parameters while this one's forward computes. Local.

        Without it the module that ran next in the first forward pass is prefetched.
        """
        self._fsdp_state.forward_prefetch = [module._fsdp_state for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather these modules' parameters while this one's backward computes. Local."""
        self._fsdp_state.backward_prefetch = [module._fsdp_state for module in modules]

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Raise: gradients are reduced to shards, which a hook for whole buckets cannot do."""
        raise NotImplementedError(
            "fully_shard has no communication hooks: gradients are reduce-scattered, not averaged "
            "in buckets. For fewer bytes use MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)"
        )

    def no_sync(self) -> None:
        """Raise: accumulation is a setting of the module."""
        raise NotImplementedError(
            "fully_shard accumulates between set_requires_gradient_sync(False) and "
            "set_requires_gradient_sync(True); no_sync() is DistributedDataParallel's"
        )

    def join(self, *args: Any, **kwargs: Any) -> None:
        """Raise: a rank without inputs must still help to gather parameters."""
        raise NotImplementedError(
            "fully_shard has no join(): every rank has to gather parameters as often as the "
            "others, so give ranks equally many batches, or use DistributedDataParallel"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Raise: the copy's hooks would gather the parameters of this module."""
        raise TypeError(
            "a module that fully_shard has sharded cannot be copied: call fully_shard on a copy of "
            "the plain module, and load_state_dict(model.state_dict()) into that; for an average "
            "of weights copy.deepcopy(model.state_dict()) does, which holds shards"
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        for state in _states(self, True):
            for group in state.groups:
                group.close()
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        for state in _states(self, True):
            for group in state.groups:
                group.adopt()
        return result


class UnshardHandle:
    """The handle of an asynchronous :meth:`FSDPModule.unshard`."""

    def __init__(self, state: State) -> None:
        self._state = state

    def wait(self) -> None:
        """Block until the module holds full parameters."""
        self._state.gather()


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> Any:
    """A module whose parameters are sharded over a mesh between uses. Local, but for the mesh.

    Shard the inner modules first, then the outer: each call takes the parameters that no earlier
    one has taken, and gathers them together, by one collective for each dtype. Parameters become
    DTensors, which optimizers, clipping and state dicts work on. Every rank must hold the same
    values before. Forward and backward are collective over the mesh.

    A rank holds its shards of parameters, gradients and optimizer states, and the full parameters
    of the module that computes and of the next one.

    Args:
        module: The module, or several that are gathered together; changed in place.
        mesh: One axis: shard along it. Two: replicate along the first, shard along the second.
            None: all ranks.
        reshard_after_forward: Free full parameters after forward, and gather them again in
            backward; None: True, but for the outermost module.
        shard_placement_fn: The dim to shard of a parameter; None, or returning None: the first.
        mp_policy: Dtypes of computation and reduction.
        offload_policy: Accepted for modules on the CPU, where everything is there already.
        ignored_params: Parameters to leave as they are.

    Returns:
        The module, whose class is now also an FSDPModule.

    Raises:
        ValueError: The module is sharded already, a parameter has no dims, or the mesh does not
            fit.
        TypeError: A module is none, or a container without forward.

    Example:
        >>> import torch
        >>> from tilework.parallel import fully_shard
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     model = torch.nn.Linear(4, 4, bias=False)
        ...     torch.nn.init.ones_(model.weight)
        ...     fully_shard(model)
        ...     model(torch.ones(1, 4) * rank).sum().backward()
        ...     return model.weight.to_local().shape, model.weight.grad.full_tensor()[0, 0].item()
        >>> run_ranks(2, program)
        [(torch.Size([2, 4]), 0.5), (torch.Size([2, 4]), 0.5)]
    """
    modules = list(module) if isinstance(module, list | tuple) else [module]
    mesh = None if mesh is None else mesh_or_current(mesh)
    _check(modules, mesh, offload_policy)
    mesh = _mesh_of_all_ranks() if mesh is None else mesh
    policy = mp_policy or MixedPrecisionPolicy()
    shard_group, replicate_group = _groups_of(mesh)
    params = [
        sharded_param(
            name,
            places,
            parameter,
            mesh,
            shard_placement_fn(parameter) if shard_placement_fn else None,
        )
        for name, places, parameter in collect(modules, set(ignored_params or ()))
    ]
    kinds: dict[Any, list[Any]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.requires_grad), []).append(param)
    groups = [FlatGroup(alike, shard_group, replicate_group, policy) for alike in kinds.values()]
    for group in groups:
        group.shard()
    state = State(modules, groups, policy, reshard_after_forward)
    for each in modules:
        _install(each, state)
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather parameters around another method than ``forward``, as around it. Local.

    Raises:
        ValueError: The module was not given to :func:`fully_shard`, or has no such method.

    Example:
        >>> import torch
        >>> from tilework.parallel import fully_shard, register_fsdp_forward_method
        >>> from tilework.testing import run_ranks
        >>> class Coder(torch.nn.Linear):
        ...     def encode(self, x):
        ...         return x @ self.weight.t()
        >>> def program(rank):
        ...     coder = fully_shard(Coder(2, 3))
        ...     register_fsdp_forward_method(coder, "encode")
        ...     return coder.encode(torch.ones(1, 2)).shape
        >>> run_ranks(2, program)[0]
        torch.Size([1, 3])
    """
    if not isinstance(module, FSDPModule):
        raise ValueError(f"{type(module).__name__} was not given to fully_shard")
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    state = module._fsdp_state

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = state.before_forward(args, kwargs)
        return state.after_forward(method(*args, **kwargs))

    setattr(module, method_name, wrapped)


def _check(
    modules: list[nn.Module], mesh: DeviceMesh | None, offload_policy: OffloadPolicy | None
) -> None:
    for module in modules:
        check_is_module(module, "fully_shard")
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise TypeError(
                f"{type(module).__name__} has no forward, before which parameters could be "
                f"gathered: call fully_shard on each module in it"
            )
        if hasattr(module, "_fsdp_state"):
            raise ValueError(f"{type(module).__name__} was given to fully_shard before")
        for name, inner in module.named_modules():
            if isinstance(inner, DistributedDataParallel):
                raise ValueError(
                    f"module {name or 'itself'} is a DistributedDataParallel, whose parameters are "
                    f"replicas: shard the plain module (ddp.module), on a mesh of two axes to have "
                    f"replicas of shards"
                )
            if getattr(inner, "sparse", False) is True:
                raise NotImplementedError(
                    f"{type(inner).__name__} {name!r} has sparse gradients, which cannot be "
                    f"reduced to shards: make it with sparse=False"
                )
    if mesh is not None and mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard takes a mesh of one axis (shard) or two (replicate, shard), got {mesh}"
        )
    devices = {p.device.type for module in modules for p in module.parameters()} - {"cpu", "meta"}
    if isinstance(offload_policy, CPUOffloadPolicy) and devices:
        raise NotImplementedError(
            f"CPUOffloadPolicy is for modules that compute on the CPU, got parameters on {devices}"
        )


@dataclass
class _MeshOfAllRanks:
    """The mesh that modules are sharded on by default, made once for a default group."""

    of: dict[ProcessGroup, DeviceMesh] = field(default_factory=dict)

    def forget_groups(self) -> None:
        """Drop the mesh: the default group is another one."""
        self.of.clear()


def _mesh_of_all_ranks() -> DeviceMesh:
    group, known = get_default_group(), current_world().state(_MeshOfAllRanks).of
    if group not in known:
        known.clear()
        known[group] = init_device_mesh("cpu", (group.size(),))
    return known[group]


def _groups_of(mesh: DeviceMesh) -> tuple[ProcessGroup, ProcessGroup | None]:
    groups = mesh.get_all_groups()
    return groups[-1], groups[0] if mesh.ndim == 2 else None


def _install(module: nn.Module, state: State) -> None:
    """Give a module its new class, its hooks and its state."""
    each: Any = module
    each.__class__ = _subclass(type(module))
    object.__setattr__(module, "_fsdp_state", state)
    module.register_forward_pre_hook(
        lambda _, args, kwargs: state.before_forward(args, kwargs), prepend=True, with_kwargs=True
    )
    module.register_forward_hook(lambda _, args, output: state.after_forward(output))
    each.register_state_dict_pre_hook(lambda *_: state.free())
    each.register_load_state_dict_pre_hook(lambda *_: state.free())


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _subclass(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _classes:
        _classes[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
    return _classes[kind]


def _states(module: Any, recurse: bool) -> list[State]:
    modules = module.modules() if recurse else [module]
    states = [getattr(each, "_fsdp_state", None) for each in modules]
    return list(dict.fromkeys(cast("list[State]", [state for state in states if state])))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return replace_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)
