"""Models of Hugging Face, captured: each step does to every bit what it does without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.twins import run_twins, tensors_of
from tests.models.hugging_face import VOCABULARY, build
from tests.models.test_training import in_parallel
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks


@pytest.mark.parametrize(
    ("name", "way", "shape"),
    [
        ("llama", "ddp,tp", (2, 2)),
        ("llama", "fsdp,tp", (2, 2)),
        ("gpt2", "fsdp", (2, 1)),
        ("gpt2", "tp", (1, 2)),
    ],
)
def test_training(name: str, way: str, shape: tuple[int, int]) -> None:
    def program(rank: int) -> None:
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))

        def make() -> Any:
            model = build(name)
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.1
            wrapped = in_parallel(name, model.train(), way, mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

            def step(ids: Tensor) -> Any:
                optimizer.zero_grad()
                loss = wrapped(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                return loss.detach()

            return step, tensors_of(model, optimizer)

        torch.manual_seed(1 + mesh.get_local_rank("dp"))
        # Not the padding token, of which GPT-2 warns where it comes.
        run_twins(make, [(torch.randint(1, VOCABULARY, (4, 7)),) for _ in range(4)])

    run_ranks(shape[0] * shape[1], program)
