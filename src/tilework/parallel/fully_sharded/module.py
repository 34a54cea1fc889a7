"""The methods of modules that fully_shard has sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any, NoReturn, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from tilework.comm.provenance_digest import more_advice
from tilework.comm.world import current_world
from tilework.parallel.fully_sharded.unit import Unit

#: Compiled calls of a module. They call that module, also from a copy: copies compile again.
_COMPILED = ("_compiled_run", "_compiled_call_impl")


class FSDPModule:
    """The additional methods of a module after :func:`fully_shard`, as a base of the class."""

    _fsdp_state: Unit

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the former class, as ``nn.Sequential`` does for slices."""
        plain: Any = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        module = plain.__new__(plain, *args, **kwargs)
        plain.__init__(module, *args, **kwargs)
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward with full parameters. Collective over the mesh; blocks."""
        run = self.__dict__.get("_compiled_run", self._run)
        return run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_state.run(super().__call__, args, kwargs)  # type: ignore[misc]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile :meth:`__call__`, collectives included; arguments as for torch.compile.

        Local; the first calls compile. Of nested modules compile only the outermost.
        """
        self.__dict__["_compiled_run"] = torch.compile(self._run, *args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's parameters now. Collective over the mesh.

        Attributes (``module.weight``) are then full tensors, until :meth:`reshard` or the end of
        the next forward or backward pass that frees them. ``parameters()`` are always the shards.

        Args:
            async_op: Return at once; wait with the handle, or by running forward.
        """
        self._fsdp_state.look()
        self._fsdp_state.start_gather(async_op)
        handle = UnshardHandle(self._fsdp_state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the full parameters; attributes are DTensors again. Local."""
        self._fsdp_state.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """True: reduce gradients in backward. False: add up full gradients on each rank. Local."""
        for unit in units_of(self, recurse):
            unit.reduction.is_due = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """True: reduce gradients in backward. False: with replicas, keep full gradients. Local.

        Full gradients wait on each rank, reduced over neither shards nor replicas. Without replicas
        this method changes nothing.
        """
        for unit in units_of(self, recurse):
            unit.reduction.reduces_replicas = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients by ``factor`` instead of the number of ranks. Local.

        Raises:
            ValueError: ``factor`` is not above zero.
        """
        if not factor > 0:
            raise ValueError(f"the factor that divides gradients must be above zero, got {factor}")
        self._fsdp_state.reduction.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call :meth:`set_gradient_divide_factor`: the older name in torch. Local."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sum gradients in collectives, and divide afterwards. Local."""
        self._fsdp_state.reduction.sums = enable

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None] | None, *, stream: Any = None
    ) -> None:
        """Call ``hook`` with each tensor of reduced gradients of the module, to change it. Local.

        Args:
            hook: Called after reduce-scatter, and after the all-reduce over replicas; or None.
            stream: Accepted for torch's sake: the hook runs where the reduction runs.
        """
        self._fsdp_state.reduction.hook = hook

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """True: gather parameters when backward reaches the module. False: when needed. Local.

        They are needed when an operator's backward reads a parameter. So False saves the gather
        where backward reads none, as in an embedding.
        """
        self._fsdp_state.unshards_in_backward = unshard_in_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Change nothing: each pass frees everything at the end. Local."""

    def set_post_optim_event(self, event: Any) -> None:
        """Change nothing: gathering waits for no other stream. Local."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Change nothing: buffers lie in the group's fastest memory already. Local."""

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Raise: a backend can be registered instead."""
        raise NotImplementedError(
            "fully_shard gathers by the group of the mesh: register a backend "
            "(tilework.distributed.register_backend) for collectives of your own"
        )

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Raise: a backend can be registered instead."""
        self.set_custom_all_gather(comm)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """True: free full parameters after forward. False: keep them until backward ends. Local.

        Raises:
            ValueError: It is something else, as in torch: also a number of ranks.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward is True or False, got {reshard_after_forward!r}"
            )
        for unit in units_of(self, recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """True: free full parameters after backward. False: keep them for the next pass. Local."""
        for unit in units_of(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather these modules' parameters while this module's forward computes. Local.

        By default the module that ran next in the first forward pass is prefetched.
        """
        self._fsdp_state.forward_prefetch = [module._fsdp_state for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather these modules' parameters while this module's backward computes. Local."""
        self._fsdp_state.backward_prefetch = [module._fsdp_state for module in modules]

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Raise: gradients are reduced to shards, but hooks are for whole buckets."""
        raise NotImplementedError(
            "fully_shard has no communication hooks: gradients are reduce-scattered, not averaged "
            "in buckets. For fewer bytes use MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)"
        )

    def no_sync(self) -> None:
        """Raise: use :meth:`set_requires_gradient_sync` to accumulate."""
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A deep copy that is sharded, too, as an average of weights needs. Local.

        Each rank copies the local shards; gradients and hooks are copied as torch copies them. If
        several modules were given together, copying one copies all of them.
        """
        for unit in units_of(self, True):
            unit.reshard()
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        state = {name: value for name, value in vars(self).items() if name not in _COMPILED}
        copied.__dict__ = copy.deepcopy(state, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise: the process groups of a module cannot be pickled."""
        raise TypeError(
            f"{type(self).__name__} was given to fully_shard and cannot be pickled or copied by "
            f"copy.copy: save model.state_dict(), or copy.deepcopy(model)"
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Move or cast the shards, as ``to()``, ``half()`` and ``to_empty()`` do. Local."""
        units = units_of(self, True)
        for unit in units:
            unit.reshard()
        found = [places for unit in units for _, places, _ in unit.tables.parameters()]
        ties = [places for places in found if len(places) > 1]
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        for places in ties:  # torch unties parameters where it cannot set data
            first = places[0][0]._parameters[places[0][1]]
            for module, name in places[1:]:
                module._parameters[name] = first
        for unit in units:
            unit.look()
        return result


class UnshardHandle:
    """The handle of an asynchronous :meth:`FSDPModule.unshard`."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Block until the module's attributes are full parameters."""
        self._unit.unshard()


_classes: dict[type[nn.Module], type[nn.Module]] = {}
_units: WeakSet[Unit] = WeakSet()


def _advice_on_uses() -> str:
    """Advice for errors of operators on DTensors, if fully_shard has sharded modules."""
    groups = current_world().records
    names = sorted({unit.owner.name for unit in _units if unit.owner.shard_group in groups})
    if not names:
        return ""
    return (
        f"Weights of fully_shard (of {', '.join(names[:3])}) are gathered only while the module "
        f"runs that was given to it. Where another module reads them, or where a module within is "
        f"called, as in model.head(x), they are shards: call the whole module, or a method after "
        f"register_fsdp_forward_method(model, name)."
    )


more_advice.append(_advice_on_uses)


def install(module: nn.Module, unit: Unit) -> None:
    """Give a module the methods of FSDPModule, by a change of class, and the unit for them."""
    each: Any = module
    each.__class__ = _class_for(module)
    object.__setattr__(module, "_fsdp_state", unit)
    _units.add(unit)
    # Newly assigned parameters are sharded before an optimizer can get them.
    each.register_load_state_dict_post_hook(lambda loaded, _: loaded._fsdp_state.look())
    each.register_state_dict_pre_hook(lambda saved, *_: saved._fsdp_state.owner.check_former())


def _class_for(module: Any) -> type[nn.Module]:
    """The class of a module with FSDPModule, below a class of parametrizations."""
    kind = type(module)
    if is_parametrized(module) and all(name in vars(kind) for name in module.parametrizations):
        properties = {name: vars(kind)[name] for name in module.parametrizations}
        return type(f"FSDP{kind.__name__}", (_class_of(kind.__bases__[0]),), properties)
    return _class_of(kind)


def _class_of(kind: Any) -> type[nn.Module]:
    if kind not in _classes:
        _classes[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
    return _classes[kind]


def units_of(module: Any, recurse: bool) -> list[Unit]:
    """The units of a module and, with ``recurse``, of the modules within."""
    modules = module.modules() if recurse else [module]
    units = [getattr(each, "_fsdp_state", None) for each in modules]
    return list(dict.fromkeys(cast("list[Unit]", [unit for unit in units if unit])))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the module's parameters for calls of another method, as for ``forward``. Local.

    Args:
        module: A module that was given to :func:`fully_shard`.
        method_name: The name of the method, which is replaced on this module.

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
        raise ValueError(
            f"{type(module).__name__} was not given to fully_shard: call fully_shard(module) first"
        )
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    # Copies of a partial call the copied module; a function would call the original.
    call = partial(_run_gathered, module, method)
    setattr(module, method_name, update_wrapper(call, method))


def _run_gathered(module: FSDPModule, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return module._fsdp_state.run(method, args, kwargs)
