"""One process beside ranks: what differs between the plain model's program and the ranks'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tilework.comm.functional.api import all_gather_tensor
from tilework.dtensor import DTensor, Shard, distribute_tensor
from tilework.parallel import (
    DistributedDataParallel,
    FSDPModule,
    SyncBatchNorm,
    ZeroRedundancyOptimizer,
    clip_grad_norm_,
    fully_shard,
)

Batch = dict[str, Tensor]


class Side:
    """One process with the whole batch: the plain model."""

    def share(self, batch: Batch) -> Batch:
        """The rows of this rank."""
        return batch

    def mean(self, loss: Tensor) -> Tensor:
        """The loss of the whole batch."""
        return loss.detach()

    def wrap(self, model: nn.Module) -> Any:
        return model

    def optimizer(self, parameters: Any, kind: Any, settings: Mapping[str, Any]) -> Any:
        return kind(parameters, **settings)

    def without_sync(self, model: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def first_row(self, count: int) -> int:
        return 0

    def all_rows(self, mine: Tensor) -> Tensor:
        return mine

    def whole(self, value: Tensor) -> Tensor:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        return value.detach().clone()


@dataclass
class OnRanks(Side):
    """Each rank has rows of its own, where ``group`` is not None."""

    wrapper: Callable[[Any], Any]
    group: Any = None
    spreads: bool = False
    distributes: Any = None

    def share(self, batch: Batch) -> Batch:
        if self.distributes is not None:
            mesh = self.distributes
            return {name: distribute_tensor(v, mesh, [Shard(0)]) for name, v in batch.items()}
        if self.group is None:
            return batch
        size, rank = self.group.size(), self.group.rank()
        return {name: value.chunk(size)[rank] for name, value in batch.items()}

    def mean(self, loss: Tensor) -> Tensor:
        value = self.whole(loss)
        if self.group is not None:
            dist.all_reduce(value, dist.ReduceOp.AVG, self.group)
        return value

    def wrap(self, model: nn.Module) -> Any:
        return self.wrapper(model)

    def optimizer(self, parameters: Any, kind: Any, settings: Mapping[str, Any]) -> Any:
        if not self.spreads:
            return kind(parameters, **settings)
        return ZeroRedundancyOptimizer(parameters, kind, self.group, **settings)

    @contextmanager
    def without_sync(self, model: Any) -> Iterator[None]:
        if isinstance(model, DistributedDataParallel):
            with model.no_sync():
                yield
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)
        else:
            yield

    def first_row(self, count: int) -> int:
        return 0 if self.group is None else int(self.group.rank()) * count

    def all_rows(self, mine: Tensor) -> Tensor:
        if self.group is None:
            return mine
        return all_gather_tensor(mine, 0, self.group)


def clip_norm(parameters: Iterable[Any], most: float, kind: float = 2.0) -> Tensor:
    """``clip_grad_norm_``: torch's, or that for parameters on several meshes."""
    listed = list(parameters)
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in listed}
    clip: Any = torch.nn.utils.clip_grad_norm_ if len(meshes) == 1 else clip_grad_norm_
    norm: Tensor = clip(listed, most, norm_type=kind)
    return norm


def synchronised(model: nn.Module, group: Any) -> Any:
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        return SyncBatchNorm.convert_sync_batchnorm(model, group)
    return model


def sharded(model: Any, names: tuple[str, ...], mesh: Any = None, **options: Any) -> Any:
    for name in names:
        if name in dict(model.named_modules()):
            fully_shard(model.get_submodule(name), mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)
