"""Random operators: each element is drawn from a common key, by the element's global index."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.autograd import local_graph
from tilework.dtensor.dispatch.results import replicated, write
from tilework.dtensor.propagation.dtensor_call import replicated_spec, without_override_checks
from tilework.dtensor.random.generator import fill_local, next_key, seeded_generator
from tilework.dtensor.random.philox import Bernoulli, Distribution, Integers, Normal, Uniform
from tilework.dtensor.spec import spec_of
from tilework.dtensor.tensor import DTensor, wrap
from tilework.dtensor.views import moved_views
from tilework.layout import Replicate, Shard
from tilework.tiled import (
    Decomposition,
    RuleResult,
    composed,
    dtensor_handler,
    dtensor_rule,
    register,
    unchanged,
)

#: A distribution, and a function to apply to the drawn numbers; None: they stay as they are.
Draw = tuple[Distribution, Callable[[Tensor], Tensor] | None]


def _fill(tensor: DTensor, drawn: Draw, generator: torch.Generator | None) -> DTensor:
    """Fill a tensor in place with random numbers, and return it."""
    distribution, then = drawn
    spec = tensor._spec.dual
    key = next_key(spec.mesh, generator)
    if not spec.takes_part:
        return tensor
    local = local_graph.local_of(tensor)
    graded = torch.is_grad_enabled() and local.requires_grad
    if then is None and not graded and spec is tensor._spec:
        fill_local(local, key, distribution, spec)
        moved_views.wrote(tensor, "a random fill")
        return tensor
    dtype = torch.promote_types(local.dtype, torch.float32) if then else local.dtype
    values = fill_local(
        torch.empty(spec.local_shape, dtype=dtype, device=local.device), key, distribution, spec
    )
    write(tensor, values if then is None else then(values).to(local.dtype), spec, "a random fill")
    moved_views.wrote(tensor, "a random fill")
    return tensor


def _register_fill(name: str, draw: Callable[..., Draw]) -> None:
    """Register ``Tensor.<name>``, which fills a DTensor; ``draw`` gives the distribution."""
    signature = inspect.signature(draw)

    def fill(func: Any, args: Any, kwargs: Any) -> Any:
        body = without_override_checks(func)
        if body is not None:  # a function of torch.nn.init, which calls the tensor's method
            return body(*args, **kwargs)
        tensor, *others = args
        generator = kwargs.pop("generator", None)
        bound = signature.bind(tensor.dtype, *others, **_torch_names(kwargs))
        return _fill(tensor, draw(*bound.args, **bound.kwargs), generator)

    dtensor_handler(name)(fill)


def _torch_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {{"from": "low", "to": "high"}.get(name, name): v for name, v in kwargs.items()}


def _uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Draw:
    return Uniform(float(low), float(high)), None


def _normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Draw:
    return Normal(float(mean), float(std)), None


def _check_real(name: str, dtype: torch.dtype) -> None:
    """Raise RuntimeError, as torch does, for dtypes that are not of real numbers."""
    if not dtype.is_floating_point:
        raise RuntimeError(
            f"{name} needs a tensor of a floating-point dtype (not complex), got {dtype}: fill a "
            f"tensor of such a dtype, and convert it with to()"
        )


def _check_not_complex(name: str, dtype: torch.dtype) -> None:
    if dtype.is_complex:
        raise NotImplementedError(
            f"{name} needs a tensor of a real dtype, got {dtype}: fill a real tensor, and convert "
            f"it with to()"
        )


def _check_all(what: str, fine: Tensor) -> None:
    """Raise if an element of the local part violates the condition ``what``. Local."""
    local = fine._local_tensor if isinstance(fine, DTensor) else fine
    if not local.all():
        raise RuntimeError(f"{what}, but this rank's part has an element that does not meet this")


def _log_normal(dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Draw:
    _check_real("log_normal_", dtype)
    if not std > 0:
        raise RuntimeError(f"log_normal_ expects std > 0.0, but found std={std}")
    return Normal(float(mean), float(std)), torch.exp


def _exponential(dtype: torch.dtype, lambd: float = 1.0) -> Draw:
    _check_real("exponential_", dtype)
    if not lambd > 0:
        raise RuntimeError(f"exponential_ expects lambda > 0.0, but found lambda={lambd}")
    return Uniform(), lambda u: torch.log1p(-u) / -lambd


def _cauchy(dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Draw:
    _check_real("cauchy_", dtype)
    if not sigma > 0:
        raise RuntimeError(f"cauchy_ expects sigma > 0.0, but found sigma={sigma}")
    return Uniform(), lambda u: torch.tan((u - 0.5) * torch.pi) * sigma + median


def _geometric(dtype: torch.dtype, p: float) -> Draw:
    _check_not_complex("geometric_", dtype)
    if not 0 < p < 1:
        raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={p}")
    rate = torch.log1p(torch.tensor(-p, dtype=torch.float64)).item()
    return Uniform(), lambda u: (torch.log1p(-u) / rate).ceil().clamp(min=1)


def _random(dtype: torch.dtype, low: int | None = None, high: int | None = None) -> Draw:
    if low is not None and high is None:
        low, high = 0, low
    if high is None:
        high = _largest(dtype) + 1
    return Integers(int(low or 0), int(high)), None


def _largest(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 1
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


_register_fill("uniform_", _uniform)
_register_fill("normal_", _normal)
_register_fill("log_normal_", _log_normal)
_register_fill("exponential_", _exponential)
_register_fill("cauchy_", _cauchy)
_register_fill("geometric_", _geometric)
_register_fill("random_", _random)


@dtensor_handler("bernoulli_")
def _bernoulli_(func: Any, args: Any, kwargs: Any) -> DTensor:
    tensor, p = args[0], (args[1] if len(args) > 1 else kwargs.get("p", 0.5))
    generator = kwargs.get("generator")
    _check_not_complex("bernoulli_", tensor.dtype)
    if isinstance(p, Tensor):
        return tensor.copy_(_bernoulli_of(p, tensor, generator))  # type: ignore[no-any-return]
    return _fill(tensor, (Bernoulli(float(p)), None), generator)


def _bernoulli_of(p: Tensor, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Ones with these probabilities, otherwise zeros, in the shape and the layout of ``like``."""
    with torch.no_grad():
        _check_all("bernoulli expects probabilities in [0, 1]", (p >= 0) & (p <= 1))
        # Before torch 2.9, rand_like does not take a generator.
        drawn = torch.empty_like(like, dtype=p.dtype).uniform_(generator=generator)
        return (drawn < p).to(p.dtype)


def _with_zero_gradient(drawn: Tensor, input: Tensor) -> Tensor:
    """Connect a drawn tensor to ``input`` in the graph, with a gradient of 0, as in torch."""
    if not (input.requires_grad and torch.is_grad_enabled()):
        return drawn
    return torch.where(torch.ones_like(input, dtype=torch.bool), drawn, input)


@dtensor_rule("bernoulli")
@composed
def _bernoulli(input: Tensor, p: float | None = None, *, generator: Any = None) -> Tensor:
    if p is None:
        return _with_zero_gradient(_bernoulli_of(input, input, generator), input)
    return _with_zero_gradient(torch.empty_like(input).bernoulli_(p, generator=generator), input)


@dtensor_rule("normal")
@composed
def _normal_of(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Tensor:
    if isinstance(std, Tensor):
        _check_all("normal expects all elements of std >= 0", std >= 0)
    elif not std >= 0:
        raise RuntimeError(f"normal expects std >= 0, but found {std}")
    like = mean + std  # has the shape and the layout that both broadcast to
    with torch.no_grad():
        drawn = mean + std * torch.empty_like(like).normal_(generator=generator)
    return _with_zero_gradient(drawn, like)


def _without_checks(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the body of a function of torch.nn.init, whose operators have rules for DTensors."""
    body = without_override_checks(func)
    assert body is not None
    return body(*args, **kwargs)


dtensor_handler("kaiming_uniform_", "constant_")(_without_checks)


def _register_full_draw(name: str) -> None:
    """Register an operator that draws on full tensors, from a generator of one seed."""
    operator = getattr(torch, name)

    def run(*args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        mesh = next(arg.device_mesh for arg in args if isinstance(arg, DTensor))
        key = next_key(mesh, generator)
        full = [arg.full_tensor() if isinstance(arg, DTensor) else arg for arg in args]
        if not mesh.here:  # a rank outside has no elements: 1 is a parameter that torch accepts
            full = [
                torch.ones(x.shape, dtype=x.dtype, device=x.device) if isinstance(x, Tensor) else x
                for x in args
            ]
        own = seeded_generator(key, full[0].device)
        drawn = operator(*full, **kwargs, generator=own)
        if not mesh.here:
            return wrap(drawn.new_empty(0), replicated_spec(drawn, mesh))
        return replicated(drawn, mesh)

    dtensor_rule(name)(lambda *args, **kwargs: Decomposition(run))


for _name in ("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"):
    _register_full_draw(_name)

# Python functions that draw plain tensors: run on full tensors, with the same seed on all ranks.
for _name in (
    *("svd_lowrank", "pca_lowrank"),
    *("fractional_max_pool2d", "fractional_max_pool2d_with_indices"),
    *("fractional_max_pool3d", "fractional_max_pool3d_with_indices"),
):
    register(_name, is_random=True, is_opaque=True)


#: SELU's limit far below zero, negated; see the paper on self-normalising networks.
_ALPHA = 1.7580993408473766


def dropout_mask(input: DTensor, p: float, value: float = 1.0, features: bool = False) -> DTensor:
    """Factors: ``value`` with probability ``1 - p``, else 0; perhaps by channel. Collective."""
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
