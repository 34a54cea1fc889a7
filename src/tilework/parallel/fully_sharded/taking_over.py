"""Taking the parameters of modules over into shards, and noticing when they change."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions
from torch.utils.weak import WeakTensorKeyDictionary

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree_equal
from tilework.dtensor import DTensor
from tilework.dtensor.internal import (
    DTensorSpec,
    hash_of,
    is_shown_elsewhere,
    layout_of,
    local_tensor_of,
    mode,
    unseen,
    wrap,
)
from tilework.errors import CollectiveMismatchError
from tilework.layout import Shard
from tilework.mesh import DeviceMesh
from tilework.parallel.data_parallel.leaves import grad_dtype_of
from tilework.parallel.data_parallel.structure import Members
from tilework.parallel.fully_sharded.flat import Flat
from tilework.parallel.fully_sharded.policies import MixedPrecisionPolicy
from tilework.parallel.fully_sharded.sharded_param import (
    Places,
    ShardedParam,
    dim_of,
    sharded_param,
)
from tilework.parallel.stale_optimizers import RefusedGradient, mark_replaced

_storages: Any = torch.UntypedStorage
_weak_reference: Any = reductions.StorageWeakRef


@dataclass(frozen=True)
class _Former:
    """The former memory of a parameter. It is freed as usual: only a weak reference is kept."""

    name: str
    storage: Any
    #: The offset, the sizes and the strides.
    where: tuple[Any, ...]
    dtype: torch.dtype
    content: int

    def tensor(self) -> Tensor | None:
        """The former tensor; None if nobody holds the memory."""
        storage = _storages._new_with_weak_ptr(self.storage.cdata)
        if storage is None or not storage.nbytes():
            return None
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.where)


class FormerMemory:
    """The parameters' former memory, as long as aliases hold it; writes show in the content."""

    def __init__(self) -> None:
        self._formers: list[_Former] = []

    def watch(self, name: str, tensor: Tensor, now: Tensor) -> None:
        """Watch the memory that ``tensor`` showed before it showed ``now``, if another. Local."""
        storage = tensor.untyped_storage()
        content = 0 if mode() == "off" else hash_of(tensor.detach(), False)
        if content and storage.data_ptr() != now.untyped_storage().data_ptr():
            where = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
            former = _Former(name, _weak_reference(storage), where, tensor.dtype, content)
            self._formers.append(former)

    def check(self, owner: str) -> None:
        """Raise if the program has written to such memory. Local."""
        if not self._formers:
            return
        held = []
        with unseen(), torch.no_grad():
            for former in self._formers:
                tensor = former.tensor()
                if tensor is None:
                    continue
                held.append(former)
                if hash_of(tensor, False) != former.content:
                    raise RuntimeError(
                        f"a write to former memory of parameter {former.name} of {owner} is lost\n"
                        f"An alias (p.data, p.detach(), a slice of a flat tensor) was taken before "
                        f"fully_shard took the parameter over, and was written to after. Take "
                        f"aliases after the next forward pass or unshard(), and make optimizers "
                        f"that keep them then; clone what is to be other memory"
                    )
        self._formers = held


@dataclass(frozen=True, eq=False)
class OwningUnit:
    """A call of fully_shard as the owner of parameters, with the settings for sharding them."""

    name: str
    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    placement: Callable[[nn.Parameter], Shard | None] | None
    #: The unit's sharded parameters, by id.
    held: dict[int, Any] = field(init=False, default_factory=dict)
    former: FormerMemory = field(init=False, default_factory=FormerMemory)

    def check_former(self) -> None:
        """Raise if the program wrote to memory that the parameters have left. Local."""
        self.former.check(self.name)

    @cached_property
    def shard_group(self) -> ProcessGroup:
        """The ranks that parameters are sharded over."""
        return self.mesh.get_all_groups()[-1]

    @cached_property
    def replicate_group(self) -> ProcessGroup | None:
        """The ranks with the same shards; None: there are none."""
        return self.mesh.get_all_groups()[0] if self.mesh.ndim == 2 else None


#: The last owner of a sharded parameter, by the parameter's id. Parameters that can be swapped have
#: no weak references.
_owners: weakref.WeakValueDictionary[int, OwningUnit] = weakref.WeakValueDictionary()
#: The owner of a full parameter that a sharded one has replaced.
_owners_of_full: Any = WeakTensorKeyDictionary()


def _owner_of(parameter: Any) -> OwningUnit | None:
    owner = _owners.get(id(parameter))
    if owner is not None and owner.held.get(id(parameter)) is parameter:
        return owner
    known = _owners_of_full.get(parameter)
    return None if known is None else known()


class ModuleTables:
    """The submodules and parameters of a unit's modules, without those of other units."""

    def __init__(self, modules: Sequence[nn.Module], ignored: Iterable[nn.Parameter]) -> None:
        self._roots = modules
        self._members: Members | None = None
        left_out = {id(parameter) for parameter in ignored}
        self._scan()
        self._ignored = {
            (module, name)
            for _, module in self._modules
            for name, parameter in module._parameters.items()
            if id(parameter) in left_out
        }

    def of_copies(self, modules: Sequence[nn.Module], memo: dict[int, Any]) -> ModuleTables:
        """The tables of copies of the modules, as ``copy.deepcopy`` has made them."""
        tables = copy.copy(self)
        tables._roots, tables._members = modules, None
        tables._ignored = {(copy.deepcopy(module, memo), name) for module, name in self._ignored}
        return tables

    def _scan(self) -> None:
        self._modules = list(chain.from_iterable(own_modules(root, "") for root in self._roots))
        #: Layers that also keep a list of their weights.
        self.recurrent: list[Any] = [m for _, m in self._modules if isinstance(m, nn.RNNBase)]
        #: Modules that read weights of their first layer, to choose a path, before they call it.
        self.encoders = [m for _, m in self._modules if isinstance(m, nn.TransformerEncoder)]

    def is_current(self) -> bool:
        """True unless submodules or parameters were added, replaced or removed since ``note``."""
        return self._members is not None and self._members.is_current()

    def note(self) -> None:
        """Remember the current submodules and parameters, for :meth:`is_current`."""
        self._scan()
        self._members = Members([module for _, module in self._modules])

    def parameters(self) -> list[tuple[str, Places, nn.Parameter]]:
        """Each parameter that is not ignored, once: the first name, all places, the parameter."""
        self._scan()
        found: dict[int, tuple[str, Places, nn.Parameter]] = {}
        for prefix, module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and (module, name) not in self._ignored:
                    known = found.setdefault(id(parameter), (f"{prefix}{name}", [], parameter))
                    known[1].append((module, name))
        return list(found.values())

    def make_buffers_whole(self, mesh: DeviceMesh) -> None:
        """Gather buffers that were computed from sharded parameters. Collective if any."""
        for _, module in self._modules:
            for name, buffer in module._buffers.items():
                if isinstance(buffer, DTensor) and buffer.device_mesh == mesh:
                    module._buffers[name] = buffer.full_tensor().detach()


def own_modules(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    """A module and the modules within that belong to the same unit, with name prefixes."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and "_fsdp_state" not in vars(child):
            yield from own_modules(child, f"{prefix}{name}.")


@dataclass(frozen=True)
class _Taken:
    """A parameter to take over: the description, and a function for this rank's shard."""

    #: With ``full``, ``param.sharded`` is the full parameter until :func:`_replace` is done.
    param: ShardedParam
    shard: Callable[[], Tensor]
    #: The full parameter that the sharded one replaces; None: modules hold a sharded parameter.
    full: Any = None


def take_over(
    tables: ModuleTables, before: Sequence[ShardedParam], owner: OwningUnit
) -> list[Flat]:
    """The modules' parameters, sharded in whatever memory they have. Collective if any are new."""
    at = {(module, name): p for p in before for module, name in p.places}
    known = {id(param.sharded): param for param in before}
    taken = []
    for name, places, parameter in tables.parameters():
        _check(name, parameter, owner)
        old = known.get(id(parameter)) or next((at[p] for p in places if p in at), None)
        taken.append(_describe(name, places, parameter, old, owner))
    tables.make_buffers_whole(owner.mesh)
    fresh = [(each.param.name, each.full) for each in taken if each.full is not None]
    _compare(fresh, owner.mesh, owner.name)
    keeps_objects = bool(before)
    kinds: dict[Any, list[_Taken]] = {}
    for each in taken:
        value = each.param.sharded if each.full is None else each.full
        kinds.setdefault((value.dtype, value.device), []).append(each)
    flats = [_fill(owner, alike, keeps_objects) for alike in kinds.values()]
    _mark_gone(at)
    owner.held.clear()
    owner.held.update((id(each.param.sharded), each.param.sharded) for each in taken)
    _owners.update((key, owner) for key in owner.held)
    return flats


def _check(name: str, parameter: Any, owner: OwningUnit) -> None:
    """Raise if this unit cannot own a parameter."""
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"{name} of {owner.name} is a {type(parameter).__name__}, and must be an nn.Parameter\n"
            f"fully_shard has sharded the module. Assign a parameter, and do not use "
            f"torch.func.functional_call on this module"
        )
    for each in (parameter, parameter.data, _local_full(parameter)):
        if hasattr(each, "fsdp_pre_all_gather") or hasattr(each, "fsdp_post_all_gather"):
            raise NotImplementedError(
                f"parameter {name} is a {type(each).__name__}, which has extensions of FSDP "
                f"(fsdp_pre_all_gather): fully_shard does not call them. Convert the parameter "
                f"to a plain one, or pass it in ignored_params; or use torch's fully_shard with "
                f"torch.distributed.init_process_group('tilework')"
            )
    other = _owner_of(parameter)
    if other is not None and other is not owner:
        raise ValueError(
            f"parameter {name} of {owner.name} belongs to {other.name}, which was given to "
            f"fully_shard in another call: call fully_shard on inner modules before outer modules. "
            f"Give modules that share a weight in a single call, fully_shard([first, second]), or "
            f"give only the module that contains both"
        )


def _describe(
    name: str, places: Places, parameter: Any, old: ShardedParam | None, owner: OwningUnit
) -> _Taken:
    dim = dim_of(name, parameter, owner.placement(parameter) if owner.placement else None)
    if isinstance(parameter, DTensor):
        param, spec = None, layout_of(parameter)
        if old is not None and (spec.mesh, spec.shape) == (old.spec.mesh, old.spec.shape):
            if old.sharded is parameter:
                old.name, old.places = name, places
                param = old
            else:
                param = replace(old, name=name, places=places, sharded=parameter)
        elif spec.mesh == owner.mesh:  # computed by a parametrization from sharded parameters
            param = sharded_param(name, places, parameter, owner.mesh, dim, on_mesh=True)
        if param is not None:
            _lay_out(name, parameter, param.spec, owner)
            return _Taken(param, lambda: local_tensor_of(parameter))
    param = sharded_param(name, places, parameter, owner.mesh, dim)
    if old is not None and param.tensor_parallel != old.tensor_parallel and old.tensor_parallel:
        raise ValueError(
            f"parameter {name} of {owner.name} was sharded by tensor parallelism, and was replaced "
            f"by a plain tensor: assign a DTensor of that layout, or load without assign=True"
        )
    full = _local_full(parameter, detached=False)
    hooks = [*(full._backward_hooks or {}).values()]
    hooks += (getattr(full, "_post_accumulate_grad_hooks", None) or {}).values()
    if not all(isinstance(hook, RefusedGradient) for hook in hooks):
        raise ValueError(
            f"parameter {name} of {owner.name} has hooks, which would be lost with the full "
            f"parameter: register them after fully_shard; on a parameter that was assigned later, "
            f"after the next forward pass or unshard()"
        )
    rank = owner.shard_group.rank()
    return _Taken(param, lambda: param.of_full(_local_full(parameter), rank), parameter)


def _lay_out(name: str, parameter: Any, spec: DTensorSpec, owner: OwningUnit) -> None:
    """Give a sharded parameter the layout ``spec``, in place. Collective if the layout changes."""
    given = parameter.detach()
    if layout_of(given) == spec:
        return
    grad = parameter.grad
    if grad is not None and is_shown_elsewhere(grad):
        raise ValueError(
            f"parameter {name} of {owner.name} was given data by {list(given.placements)}, and has "
            f"a gradient in memory that another tensor shows\n"
            f"fully_shard lays both out by {list(spec.placements)}, in other memory: that tensor "
            f"would not see gradients. Make flat tensors of several parameters of p.to_local()"
        )
    with torch.no_grad():
        parameter.data = given.redistribute(spec.mesh, spec.placements, order=spec.order)
    owner.former.watch(name, local_tensor_of(given), local_tensor_of(parameter))


def _fill(owner: OwningUnit, taken: Sequence[_Taken], keeps_objects: bool) -> Flat:
    """Put this rank's shards of parameters of one dtype and device where they are gathered from."""
    params = [each.param for each in taken]
    kept = [None if each.full is not None else each.shard() for each in taken]
    flat = Flat(params, kept, owner.shard_group, owner.replicate_group, owner.policy)
    with torch.no_grad():
        for each, shard in zip(taken, flat.shards, strict=True):
            if each.full is not None:
                owner.former.watch(each.param.name, _local_full(each.full), shard)
                if not shard.is_meta:
                    shard.copy_(each.shard())
                _replace(each, shard.data, owner, keeps_objects)
    return flat


def _replace(taken: _Taken, local: Tensor, owner: OwningUnit, keeps_object: bool) -> None:
    """Replace a full parameter by a sharded parameter, perhaps in the object itself."""
    param, full = taken.param, taken.full
    param.sharded = nn.Parameter(wrap(local, param.spec), requires_grad=full.requires_grad)
    dtype = grad_dtype_of(full)
    if dtype != full.dtype:
        param.sharded.grad_dtype = dtype
    vars(param.sharded).update({k: v for k, v in vars(full).items() if not k.startswith("_")})
    if keeps_object:
        try:
            torch.utils.swap_tensors(full, param.sharded)  # type: ignore[no-untyped-call]
        except RuntimeError:  # referenced elsewhere; an optimizer made later is not affected
            pass
        else:
            param.sharded = full
            return
    for module, name in param.places:
        module._parameters[name] = param.sharded
    module, name = param.places[0]
    mark_replaced(full, module, name, name=param.name, by="fully_shard")
    _owners_of_full[full] = weakref.ref(owner)


def _mark_gone(at: Mapping[tuple[nn.Module, str], ShardedParam]) -> None:
    """Make optimizers raise for sharded parameters that the modules no longer hold."""
    for (module, name), param in at.items():
        now = module._parameters.get(name)
        if now is not None and now is not param.sharded and (module, name) == param.places[0]:
            mark_replaced(param.sharded, module, name, name=param.name, by="an assignment")


def _local_full(parameter: Any, detached: bool = True) -> Tensor:
    local: Tensor = local_tensor_of(parameter) if isinstance(parameter, DTensor) else parameter
    return local.detach() if detached else local


# -- the same model on all ranks -------------------------------------------------------------


def _compare(fulls: Sequence[tuple[str, Any]], mesh: DeviceMesh, where: str) -> None:
    """Raise unless all ranks have the same full parameters. Collective; blocks."""
    if mesh.size() == 1 or not fulls or mode() == "off":
        return

    def facts() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, full in fulls:
            text = f"{full.dtype} {list(full.shape)}, hash {hash_of(_local_full(full))}"
            found.setdefault(name, []).append(text)  # modules given together may share names
        return found

    agree_equal(
        facts,
        mesh.axes_group(range(mesh.ndim)),
        f"parameter {{name}} of {where} is not the same on all ranks:",
        hint=": fully_shard makes one model of all shards. Give all ranks the same values (a "
        "seed, a loaded state dict), or take those of one: fully_shard(..., src_data_rank=0)",
        error=CollectiveMismatchError,
    )
