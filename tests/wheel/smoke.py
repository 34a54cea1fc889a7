"""The test of ``make wheel``: 2 ranks in an environment with the wheel alone, no compiler."""

from __future__ import annotations

import shutil

import torch

import tilework.distributed as dist
from tilework.dtensor import DTensor, Replicate, Shard, distribute_tensor
from tilework.mesh import init_device_mesh

assert not any(shutil.which(name) for name in ("cc", "c++", "gcc", "g++", "clang", "cmake"))

dist.init_process_group(backend="shm")
ranks = dist.get_world_size()
tensor = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
assert tensor.eq(ranks * (ranks + 1) / 2).all()

mesh = init_device_mesh("cpu", (ranks,))
matrix = torch.arange(12.0).reshape(4, 3)
sharded = distribute_tensor(matrix, mesh, [Shard(0)])
product = sharded @ distribute_tensor(matrix.t().contiguous(), mesh, [Replicate()])
assert isinstance(product, DTensor)
torch.testing.assert_close(product.full_tensor(), matrix @ matrix.t())

print(f"rank {dist.get_rank()} of {ranks}: all_reduce over shared memory and a DTensor are right")
dist.destroy_process_group()
