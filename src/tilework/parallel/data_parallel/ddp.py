"""DistributedDataParallel: a replica of a module on every rank, with averaged gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilework.comm.contract import ProcessGroup, ReduceOp
from tilework.comm.operations.internal import all_reduce
from tilework.comm.world import AnyGroup, get_default_group
from tilework.mesh import DeviceMesh
from tilework.parallel.comm_hooks.bucket import CommHook
from tilework.parallel.comm_hooks.hooks import allreduce_hook, fp16_compress_hook
from tilework.parallel.data_parallel.arguments import (
    MixedPrecision,
    cast_floats,
    check_layouts,
    check_module,
    checked_precision,
    devices_of,
    group_of,
    moved,
    sends_buffers,
)
from tilework.parallel.data_parallel.buckets import size_limits_of
from tilework.parallel.data_parallel.join import Join, Joinable, JoinHook, active_group
from tilework.parallel.data_parallel.leaves import grad_leaves, local_tensors
from tilework.parallel.data_parallel.outputs import (
    call_before_backward,
    leaves_of_graph,
    tensors_of,
)
from tilework.parallel.data_parallel.reducer import DelayedReduction, Reducer, ReducerOptions
from tilework.parallel.data_parallel.replicas import Replica, broadcast_tensors, check_replicas
from tilework.parallel.data_parallel.report import StepReport
from tilework.parallel.data_parallel.structure import ModuleStructure
from tilework.parallel.passes import Passes

_IGNORED = "_ddp_params_and_buffers_to_ignore"
_BUILT_IN = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}


def ignored_names(module: nn.Module) -> tuple[str, ...]:
    """The names that ``module`` excludes from broadcasts and reductions."""
    return tuple(getattr(module, _IGNORED, ()))


class TorchDDPNames:
    """Methods of DistributedDataParallel under their names in torch."""

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Exclude names from broadcasts and reductions before wrapping; unknown names raise."""
        names = list(params_and_buffers_to_ignore)
        known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(
                f"params_and_buffers_to_ignore has {unknown}, but {type(module).__name__} has no "
                f"parameters or buffers of these names: see named_parameters() and named_buffers()"
            )
        setattr(module, _IGNORED, names)

    @property
    def parameters_to_ignore(self: Any) -> set[str]:
        """The names of parameters and buffers that are neither broadcast nor reduced."""
        return set(self._ignored)

    @property
    def device(self: Any) -> torch.device:
        """The device of the first parameter."""
        found: torch.device = next(self.module.parameters()).device
        return found

    join_device = device

    def will_sync_module_buffers(self: Any) -> bool:
        """True if the next forward pass begins with the first rank's buffers."""
        syncs = self.require_backward_grad_sync and self.broadcast_buffers
        return bool(syncs and self._structure.has_buffers())

    def _get_ddp_logging_data(self: Any) -> dict[str, Any]:
        """:meth:`DistributedDataParallel.get_ddp_logging_data`."""
        data: dict[str, Any] = self.get_ddp_logging_data()
        return data

    def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        """Register the hook that a member of torch's enumeration of hooks stands for."""
        name = str(getattr(comm_hook_type, "name", comm_hook_type))
        if name not in _BUILT_IN:
            raise ValueError(
                f"{comm_hook_type!r} is not a built-in hook, which are {', '.join(_BUILT_IN)}; "
                f"register_comm_hook takes any hook"
            )
        self.register_comm_hook(None, _BUILT_IN[name])

    def _set_static_graph(self: Any) -> None:
        """Set ``static_graph=True`` after construction, before the first backward."""
        if not self.static_graph:
            self.static_graph = True
            self._new_reducer()


_TRANSFORMED = (
    "DistributedDataParallel within torch.func.grad, vjp, jacrev or hessian: call ddp.module\n"
    "Only backward() averages gradients over the ranks. Average what these transforms give: "
    "dist.all_reduce(grad, op=dist.ReduceOp.AVG)"
)
_COMPUTED = (
    "{name} of {kind} was computed from other tensors, and DistributedDataParallel averages "
    "gradients of parameters. Call torch.func.functional_call(ddp.module, ...), whose names have "
    "no 'module.' in front, and average the gradients: dist.all_reduce(parameter.grad, "
    "op=dist.ReduceOp.AVG)"
)


class DistributedDataParallel(nn.Module, Joinable, TorchDDPNames):
    """A module replicated on every rank of a group, whose gradients are the average over the ranks.

    Construction and each synchronised backward pass are collective over the group, and block. Each
    rank runs on different inputs. With losses that are means over equally many rows on each rank,
    the gradients are those of the mean over all rows. The gradients have the same bits on every
    rank, in every run, and for every bucket size: reductions combine the ranks in ascending order.

    Gradients are reduced in buckets while backward continues. If a gradient is missing on a rank,
    every rank raises at the end of backward, naming the parameters. With ``find_unused_parameters``
    a missing gradient counts as zero instead, and is left alone where no rank has it.

    Args:
        module: Parameters and buffers become those of the group's first rank. DTensor and
            ShardedTensor parameters are averaged shard by shard: their mesh must not include
            the axis of this group.
        device_ids: None, or the one device of a module on an accelerator; inputs are moved to it.
        output_device: Accepted for torch's sake; must be the only device of ``device_ids``.
        broadcast_buffers: The first synchronised forward pass of each step begins with the first
            rank's buffers; not further forward passes before the same backward pass. None: True.
        init_sync: False: parameters are not sent, but compared; buffers stay as they are.
        process_group: The group; None: the default group.
        bucket_cap_mb: The size of a bucket in MiB; None: 25. The first has at most 1 MiB.
        find_unused_parameters: Outputs need not depend on all parameters. The graph is searched
            after each forward pass, so that buckets with unused parameters are reduced early.
        gradient_as_bucket_view: Gradients are views of the buckets, which saves memory; not those
            of 256 KiB or more on CPUs, which are averaged where they lie, unless a hook is there.
        static_graph: Every step uses the same parameters, equally often. Then reentrant checkpoints
            may run a module several times, and unused parameters need no search.
        delay_all_reduce_named_params: (name, parameter) pairs that are averaged together, outside
            of the buckets, when the gradient of ...
        param_to_hook_all_reduce: ... this parameter is ready.
        mixed_precision: Dtypes of computation and reduction.
        device_mesh: A mesh of one axis, in place of ``process_group``.
        skip_all_reduce_unused_params: Accepted for torch's sake: with ``find_unused_parameters``,
            parameters that no rank uses are left alone already.
        bucket_cap_mb_list: The size of each bucket in MiB, in the order in which they are reduced,
            in place of ``bucket_cap_mb``; the last one serves all others.
        dim, check_reduction, batched_grad_copy: Accepted for torch's sake.
        forward_sync_buffers: Another name of ``broadcast_buffers``.

    Raises:
        RuntimeError: No parameter requires a gradient; the module is wrapped already.
        ValueError: Arguments do not fit; parameters differ between ranks, by name.

    Example:
        >>> import torch
        >>> from tilework.parallel import DistributedDataParallel
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     model(torch.tensor([[rank + 1.0]])).sum().backward()
        ...     return model.module.weight.grad.item()
        >>> run_ranks(2, program)
        [1.5, 1.5]
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: AnyGroup = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        check_module(module, DistributedDataParallel)
        self.process_group = group_of(process_group, device_mesh)
        self.device_mesh = device_mesh
        self.dim = dim
        self.broadcast_buffers = sends_buffers(broadcast_buffers, forward_sync_buffers)
        self._size_limits = size_limits_of(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = max(self._size_limits)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.mixed_precision = checked_precision(mixed_precision)
        #: False within ``no_sync()``.
        self.require_backward_grad_sync = True
        self._delayed_names = tuple(name for name, _ in delay_all_reduce_named_params or ())
        self._delay_trigger = param_to_hook_all_reduce
        self._ignored = ignored_names(module)
        self._forward_count = 0
        self.module = module
        self._cast_buffers()
        self._structure = ModuleStructure(module)
        named = self._structure.parameters
        averaged = [each for each in named if each[0] not in self._ignored]
        check_layouts(averaged, self.process_group)
        parameters = [parameter for _, parameter in named]
        self.device_ids, self.output_device = devices_of(parameters, device_ids, output_device)
        self.is_multi_device_module = len({parameter.device for parameter in parameters}) > 1
        self._start(init_sync)

    def _start(self, init_sync: bool) -> None:
        """Compare and synchronise the replicas, and make the reducer. Collective."""
        parameters = self._structure.parameters
        values = () if init_sync else [name for name, _ in parameters]
        check_replicas(parameters, self.process_group, self._ignored, values=values)
        if init_sync:
            broadcast_tensors(self._state_tensors(), self.process_group)
        self._count_passes()
        self._make_reducer()

    def _count_passes(self) -> None:
        names = [(name, list(parameter.shape)) for name, parameter in self._structure.parameters]
        kind = f"DistributedDataParallel of {type(self.module).__name__}"
        self._passes = Passes(kind, names)

    def _make_reducer(self) -> None:
        leaves = grad_leaves(self._structure.modules, (*self._ignored, *self._delayed_names))
        options = ReducerOptions(
            self._size_limits,
            self.find_unused_parameters,
            self.static_graph,
            self.gradient_as_bucket_view,
            self.mixed_precision.reduce_dtype if self.mixed_precision else None,
        )
        replica = Replica(self._passes, self.replicated_parameters)
        self.reducer = Reducer(leaves, self.process_group, options, replica)
        self._delayed = self._make_delayed()

    def _make_delayed(self) -> DelayedReduction | None:
        if not self._delayed_names:
            return None
        if self._delay_trigger is None:
            raise ValueError(
                "delay_all_reduce_named_params needs param_to_hook_all_reduce: the parameter whose "
                "gradient starts the reduction of the others"
            )
        every = grad_leaves(self._structure.modules)
        leaves = [leaf for leaf in every if leaf.name in self._delayed_names]
        return DelayedReduction(leaves, self._delay_trigger, self.reducer)

    # -- forward -----------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's outputs for this rank's inputs.

        Collective where gradients are enabled and buffers are broadcast, or in a join context.
        """
        self._before_forward()
        if self.device_ids:
            inputs, kwargs = moved((inputs, kwargs), self.device_ids[0])
        outputs = self._run_module(inputs, kwargs)
        return self._after_forward(outputs, (inputs, kwargs))

    def _before_forward(self) -> None:
        if torch._C._are_functorch_transforms_active() and _is_in_grad():
            raise RuntimeError(_TRANSFORMED)
        if not torch.is_grad_enabled():
            return
        self.reducer.abandon()
        if self.join_context is not None:
            Join.notify_join_context(self)
        self.reducer.active = active = active_group(self.process_group)
        self.reducer.accumulating = not self.require_backward_grad_sync
        if not self.require_backward_grad_sync:
            return
        self._passes.begin_forward()
        is_current = self._structure.is_current(self.module) and self.reducer.is_current()
        # Not between forward passes of one backward pass: autograd may have saved the buffers.
        sends_buffers = (
            self.broadcast_buffers and not self.reducer.expecting and self._structure.has_buffers()
        )
        if is_current and self.reducer.rebuilt and not sends_buffers:
            return  # nothing is sent
        with self._passes.carried():
            if not is_current:
                self._follow_changes()
            if self.reducer.active is self.process_group:
                self.reducer.rebuild()
            if sends_buffers:
                broadcast_tensors(self._buffers_to_send(), active)

    def _follow_changes(self) -> None:
        """Make a new reducer, as parameters were frozen, added or replaced. Collective."""
        known = {id(parameter) for _, parameter in self._structure.parameters}
        if self._structure.modules[0][1] is not self.module:
            self._ignored = ignored_names(self.module)
            self._cast_buffers()
        now = ModuleStructure(self.module)
        for name, parameter in now.parameters:
            if not parameter.is_leaf:
                raise TypeError(_COMPUTED.format(name=name, kind=type(self.module).__name__))
        new = [name for name, parameter in now.parameters if id(parameter) not in known]
        check_replicas(now.parameters, self.process_group, self._ignored, values=new)
        self._structure.places.mark_replaced(by="an assignment")
        self._structure = now
        self.reducer.reduce_frozen()
        self._new_reducer()

    def _new_reducer(self) -> None:
        """Replace the reducer by a new reducer, which takes over the hook and waiting gradients."""
        before = self.reducer
        before.close()
        if self._delayed is not None:
            self._delayed.close()
        self._make_reducer()
        self.reducer.go_on_from(before)

    def _run_module(self, inputs: Any, kwargs: Any) -> Any:
        precision = self.mixed_precision
        if precision is None or precision.param_dtype is None:
            return self.module(*inputs, **kwargs)
        dtype = precision.param_dtype
        if precision.cast_forward_inputs:
            inputs, kwargs = cast_floats((inputs, kwargs), dtype)
        parameters = {
            name: parameter.to(dtype) if parameter.is_floating_point() else parameter
            for name, parameter in self.module.named_parameters()
        }
        return torch.func.functional_call(self.module, parameters, inputs, kwargs)

    def _after_forward(self, outputs: Any, inputs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.require_backward_grad_sync):
            return outputs
        self._forward_count += 1
        unused = None
        if self.find_unused_parameters and not self.static_graph:
            reached = leaves_of_graph(tensors_of(outputs))
            leaves = enumerate(self.reducer.leaves)
            unused = {at for at, leaf in leaves if id(leaf.tensor) not in reached}
        self.reducer.expect(unused)
        # The current reducer begins, even if forward used an older one.
        return call_before_backward(outputs, lambda: self.reducer.begin(), inputs)

    # -- settings ----------------------------------------------------------------------------

    @contextmanager
    def buffers_sent(self) -> Iterator[None]:
        """A context that sends buffers once, for several forward passes. Collective."""
        sends, self.broadcast_buffers = self.broadcast_buffers, False
        try:
            if sends and self._structure.has_buffers():
                broadcast_tensors(self._buffers_to_send(), self.process_group)
            yield
        finally:
            self.broadcast_buffers = sends

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients accumulate on each rank and are not averaged.

        Run forward *and* backward within it. The first forward pass after it synchronises all
        accumulated gradients. Local.

        Example:
            >>> import torch
            >>> from tilework.parallel import DistributedDataParallel
            >>> from tilework.testing import run_ranks
            >>> def program(rank):
            ...     model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
            ...     with model.no_sync():
            ...         model(torch.ones(1, 1)).sum().backward()
            ...     model(torch.full((1, 1), float(rank))).sum().backward()
            ...     return model.module.weight.grad.item()
            >>> run_ranks(2, program)
            [1.5, 1.5]
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce buckets by ``hook(state, bucket)`` instead of an average. Local.

        Args:
            state: Handed to the hook.
            hook: Takes a GradBucket, starts a reduction, and returns a ``torch.futures.Future`` of
                the tensor that replaces the bucket's buffer. The hook has to average.

        Raises:
            RuntimeError: There is a hook already.
            TypeError: The hook cannot be called.
        """
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        if self.reducer.hook is not None:
            raise RuntimeError("register_comm_hook can only be called once.")
        self.reducer.hook = (state, hook)

    # -- uneven inputs -----------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of inputs. Collective at the end.

        Ranks that have run out follow the others. At the end all ranks have the parameters of a
        rank that ran out last. SyncBatchNorm layers, ``no_sync`` and other joinables work within.

        Args:
            divide_by_initial_world_size: Gradients are divided by the number of all ranks, so that
                each row counts equally; False: by the number of ranks that still have inputs.
            enable: False: the context does nothing.
            throw_on_early_termination: Raise on every rank as soon as one has run out.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook by which this module ends a join context, with equal parameters."""
        self.reducer.divide_by_initial_size = kwargs.get("divide_by_initial_world_size", True)
        return _FinalSync(self)

    @property
    def join_process_group(self) -> ProcessGroup:
        return self.process_group

    # -- reports -------------------------------------------------------------------------

    def report(self) -> StepReport:
        """The last synchronised backward pass on this rank: buckets, bytes, times. Local.

        Raises:
            RuntimeError: There was none.
        """
        return self.reducer.report()

    def get_ddp_logging_data(self) -> dict[str, Any]:
        """Settings and counts of this module, by torch's names. Local.

        Integers, strings and bools; lists are strings of numbers separated by commas.
        """
        reducer = self.reducer
        sizes = [0 if b.memory is None else b.memory.nbytes for b in reducer.buckets]
        parameters = [leaf.tensor for leaf in reducer.leaves]
        rebuilt = ", ".join(map(str, sizes))
        _, hook = reducer.hook or (None, None)
        return {
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "module_name": type(self.module).__name__,
            "backend_name": self.process_group.getBackendName(),
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else str(self.output_device),
            "broadcast_buffers": self.broadcast_buffers,
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "is_multi_device_module": self.is_multi_device_module,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
            "dtypes": ", ".join(sorted({str(p.dtype)[6:] for p in parameters})),
            "bucket_sizes": rebuilt,
            "has_rebuilt_buckets": reducer.rebuilt,
            "rebuilt_bucket_sizes": rebuilt if reducer.rebuilt else "",
            "num_buckets_reduced": len(sizes),
            "iteration": self._forward_count,
            "comm_hook": getattr(hook, "__qualname__", ""),
        }

    # -- copies and files --------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"reducer", "process_group", "device_mesh", "_delayed", "_structure", "_passes"}
        left_out.add("_compiled_call_impl")  # calls this module; copies compile again
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        state["join_context"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.process_group, self.device_mesh = get_default_group(), None
        self._structure = ModuleStructure(self.module)
        self._count_passes()
        self._make_reducer()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        made.process_group, made.device_mesh = self.process_group, self.device_mesh
        made._structure = ModuleStructure(made.module)
        made._count_passes()
        made._make_reducer()
        return made

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Accept state dicts of the plain module, too: keys without ``module.``."""
        own = [key for key in state_dict if key.startswith(prefix)]
        if own and not any(key.startswith(f"{prefix}module.") for key in own):
            for key in own:
                state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # -- parameters and buffers --------------------------------------------------------------

    def replicated_parameters(self) -> list[tuple[str, Tensor]]:
        """The local tensors, with names, that are the same on all ranks of the group. Local."""
        return [
            (name, local)
            for name, parameter in self._structure.parameters
            if name not in self._ignored
            for local in local_tensors(parameter.detach())
        ]

    def _state_tensors(self) -> list[Tensor]:
        return [*(local for _, local in self.replicated_parameters()), *self._buffers_to_send()]

    def _buffers_to_send(self) -> list[Tensor]:
        if not self._structure.has_buffers():
            return []
        return [
            local
            for name, buffer in self._structure.named_buffers()
            if name not in self._ignored
            for local in local_tensors(buffer)
        ]

    def _cast_buffers(self) -> None:
        dtype = self.mixed_precision.buffer_dtype if self.mixed_precision else None
        if dtype is not None:
            for buffer in self.module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(dtype)


class _FinalSync(JoinHook):
    """Gives all ranks the parameters and buffers of a rank that ran out of inputs last."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    def post_hook(self, is_last_joiner: bool) -> None:
        ddp = self._ddp
        group = ddp.process_group
        facts = torch.tensor([group.rank() if is_last_joiner else -1, ddp.reducer.passes])
        all_reduce(facts, ReduceOp.MAX, group)
        last, passes = facts.tolist()
        broadcast_tensors(ddp._state_tensors(), group, last)
        ddp.reducer.passes = passes  # without inputs, too: all ranks assign buckets together
        ddp._passes.reset()
        ddp.reducer.active = group
        ddp.reducer.divide_by_initial_size = True


def _is_in_grad() -> bool:
    """True within torch.func.grad, vjp, jacrev or hessian."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Grad for level in levels)
