"""Lightning's Trainer, with DDP and with torch's fully_shard, and with metrics.

Lightning refuses the strategy FSDP on CPUs; the strategy of model parallelism takes them.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import tilework.torch_backend  # noqa: F401  # registers the backend
from tests.clients.program import loss_of, net, report, rows

Batch = tuple[Tensor, Tensor]


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, shards: bool) -> None:
        super().__init__()
        self.shards = shards
        self.seen: list[Any] = []
        self.mean = torchmetrics.MeanMetric()
        self.accuracy = torchmetrics.classification.BinaryAccuracy()

    def configure_model(self) -> None:
        self.net = net()
        if self.shards:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Batch, number: int) -> Tensor:
        loss = loss_of(self.net, batch)
        self.mean.update(loss)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("rows", len(batch[0]), sync_dist=True)
        self.log("sum", float(number), sync_dist=True, reduce_fx="sum")
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, number: int) -> None:
        self.accuracy(self.net(batch[0]).sigmoid(), (batch[1] > 0).int())
        self.log("accuracy", self.accuracy, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.seen.append({name: float(value) for name, value in metrics.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def train(strategy: Any, shards: bool) -> list[Any]:
    lightning.seed_everything(0)
    module = Module(shards)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tempfile.mkdtemp(),
    )
    trainer.fit(module, DataLoader(rows(), 4, shuffle=True), DataLoader(rows(), 5))
    return [trainer.global_rank, module.seen]


if __name__ == "__main__":
    backend = sys.argv[1]
    replicas = train(DDPStrategy(process_group_backend=backend), False)
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    cut = train(ModelParallelStrategy(**sizes, process_group_backend=backend), True)
    report([replicas, cut])
