"""Objects of this library's that code of torch.distributed's asks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tables import each
from tilework.layout import Partial, Replicate, Shard
from tilework.layout.placements import refuse_torch_caller


def _asked_by(module: str, source: str, value: object) -> Any:
    return eval(source, {"__name__": module, "value": value})


@each("placement", [Shard(0), Replicate(), Partial()])
@each("source", ["value.is_shard()", "f'{value}'", "value.is_partial()"])
def test_placements_say_whose_they_are(placement: object, source: str) -> None:
    with pytest.raises(TypeError, match="tilework"):
        _asked_by("torch.distributed.tensor._api", source, placement)
    for module in ("torch", "torch.optim.adam", "program", "transformers.model"):
        assert _asked_by(module, source, placement) is not None


def test_the_caller_of_the_method_counts() -> None:
    class Thing:
        def __repr__(self) -> str:
            return "thing"

        def ask(self) -> None:
            refuse_torch_caller(self, "ours")

    Thing().ask()
    with pytest.raises(TypeError, match="thing is ours"):
        _asked_by("torch.distributed", "value.ask()", Thing())
