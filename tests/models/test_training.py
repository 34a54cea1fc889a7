"""Models of Hugging Face, parallel in each way, have the losses of one process."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import tilework.distributed as dist
from tests.models.hugging_face import NAMES, VOCABULARY, blocks, build, plan
from tests.rounding import assert_close
from tests.tables import pairs
from tilework.dtensor import DTensor
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.parallel import DistributedDataParallel, fully_shard, parallelize_module
from tilework.testing import run_ranks

STEPS, ROWS, LENGTH = 2, 4, 7
MESHES = {"ddp": (2, 1), "fsdp": (2, 1), "tp": (1, 2), "ddp,tp": (2, 2), "fsdp,tp": (2, 2)}


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(STEPS)]


def in_parallel(name: str, model: Any, way: str, mesh: DeviceMesh) -> Any:
    first = way.split(",")[0]
    if "tp" in way:
        parallelize_module(model, mesh["tp"], plan(name))
    if first == "ddp":
        return DistributedDataParallel(model, device_mesh=mesh["dp"])
    if first == "fsdp":
        for block in blocks(model):
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def unsynchronised(model: Any, first: str, accumulating: bool) -> Any:
    """The context of a micro-batch whose gradients are not to be sent yet."""
    if first == "fsdp":
        model.set_requires_gradient_sync(not accumulating)
    return model.no_sync() if first == "ddp" and accumulating else nullcontext()


def train(model: Any, feature: str, first: str = "", part: slice = slice(None)) -> list[Tensor]:
    """The losses of some steps on rows of the batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    micro_batches = 2 if feature == "accumulation" else 1
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        total = torch.zeros(())
        pieces = batch[part].chunk(micro_batches)
        for number, ids in enumerate(pieces, 1):
            with (
                unsynchronised(model, first, number < len(pieces)),
                torch.autocast("cpu", torch.bfloat16, enabled=feature == "autocast"),
            ):
                loss = model(input_ids=ids, labels=ids).loss / len(pieces)
                loss.backward()
            total += loss.full_tensor() if isinstance(loss, DTensor) else loss.detach()
        optimizer.step()
        losses.append(total.detach())
    return losses


def prepared(model: Any, feature: str) -> Any:
    model.train()
    if feature == "checkpointing":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the name is to be another one
            model.gradient_checkpointing_enable()
    return model


@pairs(feature=["plain", "accumulation", "checkpointing", "autocast"], way=list(MESHES), name=NAMES)
def test_losses_are_those_of_one_process(name: str, way: str, feature: str) -> None:
    # One process takes each rank's rows as a micro-batch would be: means of means are the same.
    wanted = torch.stack(train(prepared(build(name), feature), feature))
    dp, tp = MESHES[way]
    first = way.split(",")[0]
    models = [prepared(build(name), feature) for _ in range(dp * tp)]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        model = in_parallel(name, models[rank], way, mesh)
        at = mesh.get_local_rank("dp")
        losses = torch.stack(train(model, feature, first, slice(at, None, dp)))
        dist.all_reduce(losses, dist.ReduceOp.AVG, mesh.get_group("dp"))
        tolerance = 0.02 if feature == "autocast" else 1e-5
        assert_close(losses, wanted, rtol=tolerance, atol=0)

    run_ranks(dp * tp, program)
