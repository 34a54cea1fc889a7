"""Dropout: the mask depends on a key and each element's global index, not on the layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.random.generator import fill_local, next_key
from tilework.dtensor.random.philox import Bernoulli
from tilework.dtensor.spec import spec_of
from tilework.dtensor.tensor import DTensor, wrap
from tilework.layout import Replicate, Shard
from tilework.tiled import Decomposition, RuleResult, dtensor_rule, unchanged

#: SELU's limit far below zero, negated; see the paper on self-normalising networks.
_ALPHA = 1.7580993408473766


def dropout_mask(input: DTensor, p: float, value: float = 1.0, features: bool = False) -> DTensor:
    """A random tensor that is ``value`` with probability ``1 - p``, else 0. Collective.

    Args:
        input: The tensor that the mask will be multiplied with.
        p: The probability of 0.
        value: The mask's value for elements that are kept.
        features: True to keep or drop whole channels (dim 1).
    """
    spec = input._spec.dual
    if features:
        shape = (*spec.shape[:2], *(1,) * (spec.ndim - 2))
        placements = [
            Replicate() if isinstance(placement, Shard) and placement.dim > 1 else placement
            for placement in spec.placements
        ]
        spec = spec_of(spec.mesh, placements, shape, spec.order)
    key = next_key(spec.mesh)
    local = torch.empty(spec.local_shape, dtype=input.dtype, device=input.device)
    return wrap(fill_local(local, key, Bernoulli(1 - p, value), spec), spec)


def _check(input: DTensor, p: float, features: bool) -> None:
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not (input.is_floating_point() or input.is_complex()):
        raise RuntimeError(f"dropout is for floating-point tensors, got {input.dtype}")
    if features and input.ndim < 2:
        raise RuntimeError(
            f"feature dropout requires at least 2 dimensions in the input, got {input.ndim}"
        )


def _dropout(features: bool) -> Callable[..., Tensor]:
    def run(input: DTensor, p: float, train: bool) -> Tensor:
        _check(input, p, features)
        value = 1 / (1 - p) if p < 1 else 0.0
        return input * dropout_mask(input, p, value, features)

    return run


def _alpha_dropout(features: bool) -> Callable[..., Tensor]:
    """The function of alpha dropout, which keeps the mean and the variance of SELU's results."""

    def run(input: DTensor, p: float, train: bool) -> Tensor:
        _check(input, p, features)
        if p == 1:
            return input * 0
        noise = dropout_mask(input, p, features=features)
        scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
        shift = (noise - 1) * (_ALPHA * scale) + _ALPHA * scale * p
        return input * (noise * scale) + shift

    return run


def _native_dropout(input: DTensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    _check(input, p, features=False)
    mask = dropout_mask(input, p)
    return input * (mask * (1 / (1 - p) if p < 1 else 0.0)), mask.bool()


def _register(name: str, run: Callable[..., Any], **facts: Any) -> None:
    def answer(input: Any, p: float, train: bool | None) -> RuleResult:
        idle = not (train and p) and name != "native_dropout"
        return Decomposition(unchanged if idle else run)

    dtensor_rule(name, **facts)(answer)


_register("dropout", _dropout(features=False))
_register("feature_dropout", _dropout(features=True), is_random=True)
_register("alpha_dropout", _alpha_dropout(features=False))
_register("feature_alpha_dropout", _alpha_dropout(features=True), is_random=True)
_register("native_dropout", _native_dropout)
