"""torch.nn.init on sharded tensors, where it is not composed of other operators already.

Random numbers come from each rank's own generator, tile by tile: ranks with the same seed fill
their tiles with the same numbers. Bounds that depend on a shape depend on the global shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import init

from tilework.sharded.registry import Handler


def _fills(fill: Callable[..., Tensor]) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Tensor:
        with torch.no_grad():
            return fill(*args, **kwargs)

    return handler


def _uniform(
    tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    return tensor.uniform_(a, b, generator=generator)


def _normal(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    return tensor.normal_(mean, std, generator=generator)


def _constant(tensor: Tensor, val: float) -> Tensor:
    return tensor.fill_(val)


def _kaiming_uniform(
    tensor: Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: torch.Generator | None = None,
) -> Tensor:
    fan = init._calculate_correct_fan(tensor, mode)  # type: ignore[arg-type]
    gain = init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]
    bound = gain * math.sqrt(3 / fan)
    return tensor.uniform_(-bound, bound, generator=generator)


TABLE: dict[Callable[..., Any], Handler] = {
    init.uniform_: _fills(_uniform),
    init.normal_: _fills(_normal),
    init.constant_: _fills(_constant),
    init.kaiming_uniform_: _fills(_kaiming_uniform),
}
