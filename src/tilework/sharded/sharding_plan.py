"""Sharding of a whole module by a plan: specs for parameters and outputs, hooks on outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilework.comm.operations.internal import agree_equal
from tilework.comm.world import AnyGroup
from tilework.models import check_is_module, close_names, is_pattern, matching_names, split_name
from tilework.sharded.checks import check_spec
from tilework.sharded.shard_tensor import ShardRequest, as_parameter, put_parameter, tensor_of
from tilework.sharded.specs import ChunkShardingSpec, ShardingSpec
from tilework.sharded.tensor import ShardedTensor


class Sharder(ABC):
    """Shards a submodule in a way that no spec can express."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The module that replaces ``module``; may be the same module, changed.

        It is called on every rank of the group, in the same order, and may therefore communicate.
        """


@dataclass(frozen=True)
class ShardingPlan:
    """The specs of a module's parameters and outputs; immutable.

    Names are those of ``named_parameters()`` and ``named_modules()``; ``""`` is the module itself.
    In a parameter's name each part between dots may have wildcards: ``"layers.*.weight"`` names
    that parameter of each of the layers. An exact name goes before a wildcard.

    Args:
        plan: For parameters (also buffers and plain tensors, by their exact names) a spec, for
            submodules a :class:`Sharder`.
        output_plan: For modules the spec of their outputs (:func:`reshard_output`); None leaves the
            output as it is.
        return_local_tensor: Modules that return this rank's shard (:func:`collect_local_shard`),
            after ``output_plan``.

    Raises:
        TypeError: Something else is given.
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    output_plan: Mapping[str, ShardingSpec | None] | None = None
    return_local_tensor: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name, how in self.plan.items():
            if not isinstance(how, ShardingSpec | Sharder):
                raise TypeError(
                    f"Only `ShardingSpec` and `Sharder` are supported to shard '{name}', got "
                    f"{type(how).__name__}"
                )
            if isinstance(how, Sharder) and name == "":
                raise KeyError("Module path must not be empty for custom sharder!")
        for name, spec in (self.output_plan or {}).items():
            if not isinstance(spec, ShardingSpec | None):
                raise TypeError(
                    f"Only `ShardingSpec` is supported as output_plan for '{name}', got "
                    f"{type(spec).__name__}"
                )
        if isinstance(self.return_local_tensor, str):
            raise TypeError(
                f"return_local_tensor is a list of module names, got the string "
                f"{self.return_local_tensor!r}"
            )


class ShardingPlanner(ABC):
    """Makes plans for modules."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """The plan for ``module``; the same on every rank."""


def shard_module(
    module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: AnyGroup = None
) -> None:
    """Shard a module in place by a plan, with the values of rank ``src_rank``.

    Collective over the group; blocks. All ranks first check the whole plan: an error on one rank
    raises on all ranks, and the module does not change. Parameters that are shared between modules
    stay shared.

    Args:
        module: Changed in place. On ranks other than ``src_rank`` it may be on the meta device, as
            far as the plan shards it.
        plan: The plan, the same on every rank.

    Raises:
        AttributeError: The module has no attribute of a name or wildcard in the plan.
        RuntimeError: A parameter belongs to a submodule that a Sharder is to shard.
        ValueError: A spec does not fit, a parameter gets two, or ranks have different plans.
        TypeError: A Sharder did not return a module.

    Example: see docs/how-to/shard-a-model.md.
    """
    resolutions: list[_ResolvedPlan] = []

    def facts() -> Mapping[str, Any]:
        resolutions.append(_ResolvedPlan(module, plan, src_rank, process_group))
        return resolutions[0].facts()

    agree_equal(facts, process_group)
    resolved = resolutions[0]
    for request in resolved.requests.values():
        parameter = as_parameter(request.scatter())
        for name in resolved.names_of(request.tensor):
            put_parameter(*split_name(module, name), parameter)
    for name, sharder in resolved.sharders.items():
        _replace_module(module, name, sharder)
    for name, spec in resolved.outputs.items():
        reshard_output(module.get_submodule(name), spec)
    for name in plan.return_local_tensor or ():
        collect_local_shard(module.get_submodule(name))


class _ResolvedPlan:
    def __init__(
        self, module: nn.Module, plan: ShardingPlan, src_rank: int, group: AnyGroup
    ) -> None:
        check_is_module(module, "shard_module")
        self.module, self.plan = module, plan
        # A shared parameter is listed under each name.
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.modules = dict(module.named_modules(remove_duplicate=False))
        specs, self.sharders = self._specs_and_sharders()
        self.requests: dict[str, ShardRequest] = {}
        for name in (*specs, *self.sharders):
            self._check_free(name)
        for name, spec in specs.items():
            tensor = tensor_of(*split_name(module, name))
            if not self._is_requested(name, tensor, spec):
                self.requests[name] = ShardRequest(name, tensor, spec, src_rank, group)
        outputs = (plan.output_plan or {}).items()
        self.outputs = {name: spec for name, spec in outputs if spec is not None}
        for name in (*self.sharders, *self.outputs, *(plan.return_local_tensor or ())):
            self._require(name, self.modules)

    def facts(self) -> Mapping[str, Any]:
        """The facts by name, for ranks to compare: what the plan does to the module."""
        facts: dict[str, Any] = {}
        for request in self.requests.values():
            facts.update(request.facts())
        for name, sharder in self.sharders.items():
            facts[f"{name}: sharder"] = type(sharder).__name__
        for name, spec in self.outputs.items():
            facts[f"{name}: output_plan"] = repr(spec)
        facts["return_local_tensor"] = sorted(self.plan.return_local_tensor or ())
        return facts

    def names_of(self, tensor: Tensor) -> list[str]:
        names = [name for name, parameter in self.parameters.items() if parameter is tensor]
        if names:
            return names
        return [name for name, request in self.requests.items() if request.tensor is tensor]

    def _specs_and_sharders(self) -> tuple[dict[str, ShardingSpec], dict[str, Sharder]]:
        specs: dict[str, ShardingSpec] = {}
        sharders: dict[str, Sharder] = {}
        # Wildcards first, so that exact names override them.
        for name, how in sorted(self.plan.plan.items(), key=lambda entry: not is_pattern(entry[0])):
            if isinstance(how, Sharder):
                sharders[name] = how
            elif not is_pattern(name):
                self._require(name, self.parameters)
                specs[name] = how
            else:
                names = matching_names(name, self.parameters)
                if not names:
                    raise self._unknown(name, self.parameters)
                for matched in names:
                    if specs.setdefault(matched, how) != how:
                        raise ValueError(
                            f"two wildcards of the plan give {matched!r} different specs: {how} "
                            f"and {specs[matched]}; name it exactly, which goes before wildcards"
                        )
        # In the same order on all ranks, whatever the order in which they wrote the plan.
        return dict(sorted(specs.items())), dict(sorted(sharders.items()))

    def _require(self, name: str, known: Mapping[str, object]) -> None:
        if name not in known:
            owner, _, last = name.rpartition(".")
            # A name of neither a parameter nor a module may still be a plain tensor.
            if known is self.modules or not hasattr(self.modules.get(owner), last):
                raise self._unknown(name, known)

    def _unknown(self, name: str, known: Iterable[str]) -> AttributeError:
        close = close_names(name, known, cutoff=0.4)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        return AttributeError(f"{type(self.module).__name__} has no attribute `{name}`{hint}")

    def _check_free(self, name: str) -> None:
        for sharder in self.sharders:
            if name.startswith(f"{sharder}."):
                raise RuntimeError(
                    f"the plan has {name!r}, but also a Sharder for the module {sharder!r} that "
                    f"it is in: leave out one of them"
                )

    def _is_requested(self, name: str, tensor: Tensor, spec: ShardingSpec) -> bool:
        """True if another name of the same tensor is already in the requests; specs must agree."""
        for other, request in self.requests.items():
            if request.tensor is tensor:
                if request.spec != spec:
                    raise ValueError(
                        f"{other!r} and {name!r} are one parameter, but the plan gives them "
                        f"different specs: {request.spec} and {spec}"
                    )
                return True
        return False


def _replace_module(module: nn.Module, name: str, sharder: Sharder) -> None:
    owner, last = split_name(module, name)
    replacement = sharder.shard(module.get_submodule(name))
    if not isinstance(replacement, nn.Module):
        raise TypeError(
            f"{type(sharder).__name__}.shard returned {type(replacement).__name__} for {name!r}: "
            f"it must return a module"
        )
    setattr(owner, last, replacement)


# -- hooks on outputs --------------------------------------------------------------------------


ModuleT = TypeVar("ModuleT", bound=nn.Module)


def reshard_output(module: ModuleT, resharding_spec: ShardingSpec) -> ModuleT:
    """Reshard the sharded tensors that ``module`` returns, in each forward pass.

    Local; but the module's forward becomes collective over the group of the output, and so does
    backward. The output is a new tensor; tensors that the module keeps do not change.

    Args:
        module: Hooked in place. Other results than sharded tensors are left alone.
        resharding_spec: Any spec whose placements are on ranks of the output's group.

    Returns:
        ``module``.

    Raises:
        ValueError: ``resharding_spec`` is not a spec.

    Example: ``reshard_output(model.linear, columns)``.
    """
    # Unlike closures, these hooks can be pickled.
    module.register_forward_hook(partial(_resharded, check_spec(resharding_spec)))
    return module


def collect_local_shard(module: ModuleT) -> ModuleT:
    """Return this rank's shard of each sharded tensor that ``module`` returns, as a plain tensor.

    Local; not collective. Gradients flow. If a chunk has the extent 1 along the sharded dim, that
    dim is left out: for a tensor of size [4, 16] in 4 chunks each rank gets a tensor of size [16].

    Args:
        module: Hooked in place. Forward raises NotImplementedError where this rank holds no shard
            or several. Other results than sharded tensors are left alone.

    Returns:
        ``module``.

    Example: ``collect_local_shard(reshard_output(model.linear, rows))``.
    """
    module.register_forward_hook(_collected)
    return module


def _resharded(spec: ShardingSpec, module: nn.Module, args: Any, output: Any) -> Any:
    return pytree.tree_map_only(ShardedTensor, lambda st: st.resharded(spec), output)


def _collected(module: nn.Module, args: Any, output: Any) -> Any:
    return pytree.tree_map_only(ShardedTensor, _local_output, output)


def _local_output(tensor: ShardedTensor) -> Tensor:
    shard, spec = tensor.local_tensor(), tensor.sharding_spec()
    if isinstance(spec, ChunkShardingSpec) and shard.size(spec.dim) == 1:
        return shard.squeeze(spec.dim)
    return shard
