"""Sharded tensors of one rank's values: shard_tensor, shard_parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilework.comm.operations.internal import agree_equal, run_plan
from tilework.comm.world import AnyGroup, NonMember, get_process_group_ranks, get_rank
from tilework.late_names import late_name
from tilework.layout.internal import replicated_tiling, transfer_plan
from tilework.sharded.checks import check_spec, parse_and_validate_remote_device
from tilework.sharded.metadata import TensorProperties
from tilework.sharded.specs import EnumerableShardingSpec, ShardingSpec
from tilework.sharded.tensor import ShardedTensor


class PartialCoverError(NotImplementedError, ValueError):
    """An EnumerableShardingSpec does not cover the tensor exactly.

    It is a ValueError, as for every spec that does not fit, and also a NotImplementedError, which
    torch.distributed raises in this case.
    """


def shard_tensor(
    tensor: Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: AnyGroup = None
) -> ShardedTensor:
    """A sharded tensor with the values of ``tensor`` on rank ``src_rank``.

    Collective over the group; blocks. An error on one rank raises on all ranks before anything has
    moved. The result shares no memory with ``tensor``. It requires a gradient if ``tensor`` does,
    and is a leaf: no gradient flows back into ``tensor``.

    Args:
        tensor: On ``src_rank`` the values. On the others a tensor of the same size, dtype and
            ``requires_grad``, whose values are not used: a meta tensor is enough.
        sharding_spec: Any spec that covers the tensor.
        process_group: The group; the default group if None. A rank outside the group gets the
            metadata, and no shard.

    Raises:
        ValueError: The tensor is not contiguous or is sharded already, the spec does not fit it, or
            ranks differ in the tensor's size, dtype or ``requires_grad``, the spec or ``src_rank``.
        PartialCoverError: An EnumerableShardingSpec does not cover the tensor.

    Example: see docs/how-to/sharded-tensors.md.
    """
    request = ShardRequest("input tensor", tensor, sharding_spec, src_rank, process_group)
    agree_equal(request.facts, process_group)
    return request.scatter()


ShardingSpec._shard_tensor = staticmethod(shard_tensor)


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: AnyGroup = None,
) -> None:
    """Replace a parameter by a sharded parameter with one rank's values.

    Collective over the group; blocks. Otherwise like :func:`shard_tensor`. If other modules share
    the parameter, they keep the plain one: :func:`shard_module` replaces all of them.

    Args:
        param_name: The name of a parameter, a buffer or a plain tensor directly in the module. It
            becomes a parameter, which requires a gradient if the tensor did.
        sharding_spec: Any spec that covers the tensor.

    Raises:
        AttributeError: The module has no such attribute.
        ValueError: The attribute is not a tensor; also as :func:`shard_tensor`.

    Example: see docs/how-to/shard-a-model.md.
    """
    requests: list[ShardRequest] = []

    def facts() -> Mapping[str, Any]:
        tensor = tensor_of(module, param_name)
        name = f"param: {param_name}"
        requests.append(ShardRequest(name, tensor, sharding_spec, src_rank, process_group))
        return requests[0].facts()

    agree_equal(facts, process_group)
    put_parameter(module, param_name, as_parameter(requests[0].scatter()))


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """The attribute ``name`` of ``module``; raise unless it is a tensor that can be replaced."""
    kind = type(module).__name__
    if not hasattr(module, name):
        raise AttributeError(f"{kind} has no attribute `{name}`")
    tensor = getattr(module, name)
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"Expected {kind}.{name} to be a Tensor, but found {type(tensor).__name__}"
        )
    if not any(name in own for own in (module._parameters, module._buffers, vars(module))):
        raise ValueError(
            f"{kind}.{name} is computed from something else: shard what it is computed from"
        )
    return tensor


def as_parameter(tensor: ShardedTensor) -> nn.Parameter:
    """An nn.Parameter that shares the shards of ``tensor``."""
    return nn.Parameter(tensor, requires_grad=tensor.requires_grad)


def put_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace the attribute ``name`` of ``module`` by ``parameter``."""
    old = getattr(module, name)
    if name not in module._parameters:  # else the place among the parameters stays
        delattr(module, name)
    module.register_parameter(name, parameter)
    if old is not parameter:
        late_name("sharded", "mark_replaced")(old, module, name, by="shard_parameter")


@dataclass(frozen=True)
class ShardRequest:
    """A plain tensor to shard, a name for errors, the spec, and the rank whose values are taken."""

    name: str
    tensor: Tensor
    spec: ShardingSpec
    src_rank: int
    group: AnyGroup

    def facts(self) -> dict[str, Any]:
        """The facts that ranks must agree on, after this rank has checked its arguments."""
        tensor, spec = self.tensor, self.spec
        if isinstance(tensor, ShardedTensor):
            raise ValueError(f"{self.name} is sharded already: use its reshard(spec)")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{self.name} must be a tensor, got {type(tensor).__name__}")
        if hasattr(tensor, "full_tensor"):
            raise TypeError(
                f"{self.name} is a {type(tensor).__name__} of {type(tensor).__module__}, which is "
                f"distributed already: to_sharded() of tilework.dtensor takes a DTensor; "
                f"DTensor.from_torch() converts a torch DTensor"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{self.name} is not a contiguous Tensor: its strides are {tensor.stride()}; "
                f"call contiguous() first"
            )
        check_spec(spec)
        self._check_source()
        self._check_cover()
        facts = {
            "src_rank": self.src_rank,
            "sharding_spec": repr(spec),
            "size": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "requires_grad": tensor.requires_grad,
        }
        return {f"{self.name}: {fact}": value for fact, value in facts.items()}

    def _check_source(self) -> None:
        ranks = get_process_group_ranks(self.group)
        if self.src_rank not in ranks:
            raise ValueError(f"src_rank={self.src_rank} is not part of the group of ranks {ranks}")
        if self.tensor.is_meta and get_rank() == self.src_rank:
            raise ValueError(
                f"{self.name} is a meta tensor on src_rank={self.src_rank}, without values: pass "
                f"a tensor with values on that rank"
            )

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

    def scatter(self) -> ShardedTensor:
        tensor, rank = self.tensor.detach(), get_rank()
        sharded = ShardedTensor(
            self.spec,
            tensor.shape,
            dtype=tensor.dtype,
            requires_grad=self.tensor.requires_grad,
            process_group=self.group,
        )
        if isinstance(sharded.process_group, NonMember):
            return sharded
        tiles = [tile.detach() for tile in sharded.local_tiles()]
        device = tensor.device
        if tensor.is_meta:  # on ranks that only receive
            device = tiles[0].device if tiles else torch.device("cpu")
        in_place = all(tile.device == device for tile in tiles)
        source = replicated_tiling(tuple(tensor.shape), (self.src_rank,))
        moved = run_plan(
            transfer_plan(source, sharded.tiling, rank),
            [tensor] if rank == self.src_rank else [],
            self.group,
            out=tiles if in_place else None,
            dtype=tensor.dtype,
            device=device,
        )
        if not in_place:
            for tile, values in zip(tiles, moved, strict=True):
                tile.copy_(values)
        return sharded
