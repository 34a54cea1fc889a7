"""From plain tensors to sharded ones: a tensor, a module's parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilework.comm.agreement import agree
from tilework.comm.transfer import run_plan
from tilework.comm.world import (
    AnyGroup,
    NonMember,
    get_process_group_ranks,
    get_rank,
    resolve,
)
from tilework.layout import plan
from tilework.sharded.metadata import TensorProperties
from tilework.sharded.moves import whole_on
from tilework.sharded.placement import parse_and_validate_remote_device
from tilework.sharded.specs import EnumerableShardingSpec, ShardingSpec
from tilework.sharded.tensor import ShardedTensor

#: What ranks must agree on: for each thing, what is known of it.
Facts = Mapping[str, Mapping[str, Any]]


class PartialCoverError(NotImplementedError, ValueError):
    """An EnumerableShardingSpec does not cover the tensor exactly.

    A ValueError, as for every spec that does not fit; and a NotImplementedError, as
    torch.distributed raises there.
    """


def shard_tensor(
    tensor: Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: AnyGroup = None,
) -> ShardedTensor:
    """A sharded tensor with the values that one rank has.

    Collective over the group; blocks. What is wrong on one rank raises on all, and nothing has
    moved then. The result shares no memory with ``tensor``. It requires a gradient if the tensor
    of ``src_rank`` does, and is a leaf: nothing flows back into ``tensor``.

    Args:
        tensor: On ``src_rank`` the values. Of the same size and dtype on the other ranks, where its
            values are not used: a meta tensor will do.
        sharding_spec: Any that covers the tensor.
        src_rank: The global rank whose tensor it is.
        process_group: The group; the default group if None. A rank outside it gets the
            metadata, and no shard.

    Raises:
        ValueError: The tensor is not contiguous or is sharded already, the spec does not fit it, or
            ranks disagree on a size, a dtype, the spec or ``src_rank``.
        PartialCoverError: An EnumerableShardingSpec does not cover the tensor.

    Example:
        >>> import torch
        >>> from tilework.sharded import ChunkShardingSpec, shard_tensor
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     tensor = torch.arange(4) if rank == 0 else torch.empty(4, dtype=int, device="meta")
        ...     spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        ...     return shard_tensor(tensor, spec).local_tensor().tolist()
        >>> run_ranks(2, program)
        [[0, 1], [2, 3]]
    """
    cut = Cut("input tensor", tensor, sharding_spec, src_rank, process_group)
    said = agree_on(lambda: {"shard_tensor": cut.facts()}, process_group)
    return cut.scatter(said["shard_tensor"]["requires_grad"])


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: AnyGroup = None,
) -> None:
    """Replace a parameter by a sharded one with the values that one rank has.

    Collective over the group; blocks. As :func:`shard_tensor` otherwise. Where other modules
    share the parameter they keep the plain one: :func:`shard_module` replaces all of them.

    Args:
        module: Where it is; changed in place.
        param_name: The name of a parameter, a buffer or a plain tensor of this very module.
            It becomes a parameter, which requires a gradient if it did before.
        sharding_spec: Any that covers it.
        src_rank: The global rank whose values count.
        process_group: The group; the default group if None.

    Raises:
        AttributeError: The module has no such attribute.
        ValueError: It is no tensor, or see :func:`shard_tensor`.

    Example:
        >>> import torch
        >>> from tilework.sharded import ChunkShardingSpec, shard_parameter
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     linear = torch.nn.Linear(3, 4)
        ...     rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        ...     shard_parameter(linear, "weight", rows)
        ...     return linear.weight.local_tensor().shape
        >>> run_ranks(2, program)
        [torch.Size([2, 3]), torch.Size([2, 3])]
    """
    cuts: list[Cut] = []

    def check() -> Facts:
        tensor = tensor_of(module, param_name)
        name = f"param: {param_name}"
        cuts.append(Cut(name, tensor, sharding_spec, src_rank, process_group))
        return {param_name: cuts[0].facts()}

    said = agree_on(check, process_group)
    sharded = cuts[0].scatter(said[param_name]["requires_grad"])
    put_parameter(module, param_name, as_parameter(sharded))


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """The tensor that can be replaced in ``module`` under this name."""
    kind = type(module).__name__
    if not hasattr(module, name):
        raise AttributeError(f"{kind} has no attribute `{name}`")
    found = getattr(module, name)
    if not isinstance(found, Tensor):
        raise ValueError(f"Expected {kind}.{name} to be a Tensor, but found {type(found).__name__}")
    if not any(name in own for own in (module._parameters, module._buffers, vars(module))):
        raise ValueError(
            f"{kind}.{name} is computed from something else: shard what it is computed from"
        )
    return found


def as_parameter(tensor: ShardedTensor) -> nn.Parameter:
    """A parameter of these shards."""
    return nn.Parameter(tensor, requires_grad=tensor.requires_grad)


def put_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put it in the place of what has this name."""
    if name not in module._parameters:  # else it keeps its place among the parameters
        delattr(module, name)
    module.register_parameter(name, parameter)


@dataclass(frozen=True)
class Cut:
    """A tensor that is to be sharded."""

    name: str
    tensor: Tensor
    spec: ShardingSpec
    src_rank: int
    group: AnyGroup

    def facts(self) -> dict[str, Any]:
        """What ranks must agree on, once this rank has checked it."""
        tensor, spec = self.tensor, self.spec
        if isinstance(tensor, ShardedTensor):
            raise ValueError(f"{self.name} is sharded already: use its reshard(spec)")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{self.name} is not a contiguous Tensor: its strides are {tensor.stride()}; "
                f"call contiguous() first"
            )
        if not isinstance(spec, ShardingSpec):
            raise ValueError(
                f"Expecting ShardingSpec but got: {type(spec).__name__} for {self.name}; make a "
                f"ChunkShardingSpec or an EnumerableShardingSpec"
            )
        self._check_source()
        self._check_cover()
        return {
            "src_rank": self.src_rank,
            "sharding_spec": repr(spec),
            "size": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "requires_grad": tensor.requires_grad,
        }

    def _check_source(self) -> None:
        ranks = get_process_group_ranks(self.group)
        if self.src_rank not in ranks:
            raise ValueError(f"src_rank={self.src_rank} is not part of the group of ranks {ranks}")
        if self.tensor.is_meta and get_rank() == self.src_rank:
            raise ValueError(f"{self.name} is a meta tensor on src_rank={self.src_rank}: no values")

    def _check_cover(self) -> None:
        try:
            properties = TensorProperties.create_from_tensor(self.tensor)
            metadata = self.spec.build_metadata(self.tensor.shape, properties)
        except ValueError as error:
            if not isinstance(self.spec, EnumerableShardingSpec):
                raise
            raise PartialCoverError(
                f"{self.name} of size {tuple(self.tensor.shape)} is not covered exactly by its "
                f"EnumerableShardingSpec, and sharding a part is not implemented yet! {error}"
            ) from error
        for shard in metadata.shards_metadata:
            parse_and_validate_remote_device(self.group, shard.placement)

    def scatter(self, requires_grad: bool) -> ShardedTensor:
        """Move the values from ``src_rank``. Collective, after ranks have agreed on the facts."""
        tensor, rank = self.tensor.detach(), get_rank()
        made = ShardedTensor(
            self.spec,
            tensor.shape,
            dtype=tensor.dtype,
            requires_grad=requires_grad,
            process_group=self.group,
        )
        if isinstance(made.process_group, NonMember):
            return made
        tiles = [tile.detach() for tile in made.local_tiles()]
        where = tensor.device
        if tensor.is_meta:  # here nothing comes from it
            where = tiles[0].device if tiles else torch.device("cpu")
        straight = all(tile.device == where for tile in tiles)
        moved = run_plan(
            plan(whole_on(tuple(tensor.shape), (self.src_rank,)), made.tiling, rank),
            [tensor] if rank == self.src_rank else [],
            self.group,
            out=tiles if straight else None,
            dtype=tensor.dtype,
            device=where,
        )
        if not straight:
            for tile, values in zip(tiles, moved, strict=True):
                tile.copy_(values)
        return made


def agree_on(check: Callable[[], Facts], group: AnyGroup) -> Facts:
    """``check()`` of the rank whose tensors count, if all ranks have checked and said the same.

    Collective. On a rank outside the group, its own.

    Raises:
        Exception: A check failed, on any rank.
        ValueError: Ranks said different things.
    """
    if isinstance(resolve(group), NonMember):
        return check()
    said, ranks, me = agree(check, group), get_process_group_ranks(group), get_rank()
    mine = said[ranks.index(me)]
    for rank, others in zip(ranks, said, strict=True):
        for thing in [*mine, *others]:
            if thing not in mine or thing not in others:
                has, lacks = (rank, me) if thing in others else (me, rank)
                raise ValueError(f"rank {has} shards {thing!r}, rank {lacks} does not")
            for fact, value in mine[thing].items():
                # Of a tensor without values it says nothing.
                if fact != "requires_grad" and others[thing].get(fact) != value:
                    raise ValueError(
                        f"{thing}: {fact}={value} on rank {me} does not match with "
                        f"{fact}={others[thing].get(fact)} on rank {rank}"
                    )
    sources = [facts["src_rank"] for facts in mine.values() if "src_rank" in facts]
    return said[ranks.index(sources[0])] if sources else mine
