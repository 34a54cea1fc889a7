"""Hooks on modules' outputs: reshard them, or return this rank's shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilework.sharded.checks import check_spec
from tilework.sharded.specs import ChunkShardingSpec, ShardingSpec
from tilework.sharded.tensor import ShardedTensor

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

    Example:
        >>> import torch
        >>> from tilework.sharded import ChunkShardingSpec, ones, reshard_output
        >>> from tilework.testing import run_ranks
        >>> class Ones(torch.nn.Module):
        ...     def forward(self, spec):
        ...         return ones(spec, 4, 6)
        >>> def program(rank):
        ...     rows, columns = (ChunkShardingSpec(d, ["rank:0/cpu", "rank:1/cpu"]) for d in (0, 1))
        ...     return reshard_output(Ones(), columns)(rows).local_tensor().shape
        >>> run_ranks(2, program)
        [torch.Size([4, 3]), torch.Size([4, 3])]
    """
    module.register_forward_hook(_Reshard(check_spec(resharding_spec)))
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

    Example:
        >>> import torch
        >>> from tilework.sharded import ChunkShardingSpec, collect_local_shard, ones
        >>> from tilework.testing import run_ranks
        >>> class Ones(torch.nn.Module):
        ...     def forward(self, spec):
        ...         return ones(spec, 2, 3)
        >>> def program(rank):
        ...     rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        ...     return collect_local_shard(Ones())(rows).tolist()
        >>> run_ranks(2, program)
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    module.register_forward_hook(_Collect())
    return module


@dataclass(frozen=True)
class _Reshard:
    """The forward hook of :func:`reshard_output`; unlike a closure, it can be pickled."""

    #: The spec that each sharded tensor among the outputs gets.
    spec: ShardingSpec

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return pytree.tree_map_only(ShardedTensor, lambda st: st.resharded(self.spec), output)


@dataclass(frozen=True)
class _Collect:
    """The forward hook of :func:`collect_local_shard`; it can be pickled, too."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return pytree.tree_map_only(ShardedTensor, _local_output, output)


def _local_output(tensor: ShardedTensor) -> Tensor:
    shard, spec = tensor.local_tensor(), tensor.sharding_spec()
    if isinstance(spec, ChunkShardingSpec) and shard.size(spec.dim) == 1:
        return shard.squeeze(spec.dim)
    return shard
