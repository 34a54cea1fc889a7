"""torchmetrics: metrics of each rank's batches, computed over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torchmetrics

from tests.clients.program import main


def train() -> list[Any]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    metrics: Any = torchmetrics.MetricCollection(
        {
            "accuracy": torchmetrics.classification.MulticlassAccuracy(5),
            "confusion": torchmetrics.classification.MulticlassConfusionMatrix(5),
            "calibration": torchmetrics.classification.MulticlassCalibrationError(5),
        }
    )
    rows = torchmetrics.CatMetric()
    for batch in range(2 + dist.get_rank()):  # ranks have unequal numbers of rows
        scores = torch.randn(3, 5, generator=generator)
        metrics.update(scores, torch.randint(5, (3,), generator=generator))
        rows.update(scores[:, 0] + batch)
    found = {name: value.tolist() for name, value in metrics.compute().items()}
    return [found, rows.compute().tolist()]


if __name__ == "__main__":
    main(train)
