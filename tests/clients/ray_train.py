"""Ray Train's TorchTrainer. Ray makes the group in workers, which import tilework first."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader

from tests.clients.program import loss_of, net, report, rows


def import_tilework() -> None:
    importlib.import_module("tilework.torch_backend")


def train(config: dict[str, Any]) -> None:
    model = prepare_model(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = prepare_data_loader(DataLoader(rows(), 4, shuffle=True))
    seen = []
    for batch in loader:
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    Path(config["path"]).write_text(json.dumps([dist.get_backend(), every]))


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": import_tilework},
    )
    trainer = TorchTrainer(
        train,
        train_loop_config={"path": f"{folder}/values"},
        torch_config=TorchConfig(backend=sys.argv[1]),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=folder),
    )
    trainer.fit()
    backend, losses = json.loads(Path(folder, "values").read_text())
    assert backend == sys.argv[1]
    report(losses)
