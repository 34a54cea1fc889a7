"""``generate()`` of models that are tensor-parallel writes what one process writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.hugging_face import NAMES, VOCABULARY, build, plan
from tilework.mesh import init_device_mesh
from tilework.parallel import fully_shard, parallelize_module
from tilework.testing import run_ranks


def written(model: Any, **settings: Any) -> list[list[int]]:
    prompt = torch.randint(3, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(prompt)
    model.eval()
    found = model.generate(
        prompt, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, **settings
    )
    return [list(row) for row in found.tolist()]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_greedy(name: str, cached: bool) -> None:
    wanted = written(build(name), do_sample=False, use_cache=cached)
    models = [build(name) for _ in range(2)]

    def program(rank: int) -> list[list[int]]:
        parallelize_module(models[rank], init_device_mesh("cpu", (2,)), plan(name))
        return written(models[rank], do_sample=False, use_cache=cached)

    assert run_ranks(2, program) == [wanted, wanted]
    assert len(wanted[0]) == 11


def test_beams() -> None:
    wanted = written(build("llama"), num_beams=3, do_sample=False)
    models = [build("llama") for _ in range(2)]

    def program(rank: int) -> list[list[int]]:
        parallelize_module(models[rank], init_device_mesh("cpu", (2,)), plan("llama"))
        return written(models[rank], num_beams=3, do_sample=False)

    assert run_ranks(2, program) == [wanted, wanted]


def test_fully_sharded() -> None:
    """Each forward pass gathers; ``generate`` calls forward through the module."""
    wanted = written(build("llama"), do_sample=False)
    models = [build("llama") for _ in range(2)]

    def program(rank: int) -> list[list[int]]:
        for block in models[rank].model.layers:
            fully_shard(block)
        fully_shard(models[rank])
        return written(models[rank], do_sample=False)

    assert run_ranks(2, program) == [wanted, wanted]
