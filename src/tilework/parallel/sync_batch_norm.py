"""SyncBatchNorm: batch normalisation over the rows of all ranks, on any device.

Converting a layer changes only the class of the object: parameters, hooks, attributes and
parametrizations stay. A layer of a subclass of ``nn.BatchNorm2d`` gets a class that inherits from
this subclass and from SyncBatchNorm. There ``super().forward(x)`` synchronises, and everything else
that the subclass does stays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from tilework.comm.contract import ProcessGroup
from tilework.comm.functional import internal as functional
from tilework.comm.world import get_default_group
from tilework.models import check_is_module
from tilework.parallel.data_parallel.join import active_group

_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
#: The attributes of made classes: the layer's former class, and the synchronised class.
_BEFORE, _SYNCHRONISED = "_class_before", "_synchronised_class"


class _AnyDimBatchNorm(_BatchNorm):
    """Batch normalisation of inputs with two dims or more."""

    def _check_input_dim(self, input: Any) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def _check_can_synchronise(name: str, layer: nn.Module, synchronised: Any) -> None:
    """Raise TypeError if a layer's class has a forward without ``super().forward``. Local."""
    if not isinstance(layer, _BatchNorm) or isinstance(layer, synchronised):
        return
    kind = type(layer).__bases__[0] if is_parametrized(layer) else type(layer)
    for each in () if kind in _KNOWN else kind.__mro__:
        if each in (*_KNOWN[:3], _BatchNorm) or issubclass(each, LazyModuleMixin):
            return
        forward = vars(each).get("forward")
        names = getattr(getattr(forward, "__code__", None), "co_names", ("super", "forward"))
        if forward is not None and not {"super", "forward"} <= set(names):
            raise TypeError(
                f"{name or 'the module'} is a {kind.__name__}, whose forward does not call "
                f"super().forward(): its own computation would use the statistics of "
                f"each rank alone. Let {each.__name__}.forward call super().forward(x), or put a "
                f"SyncBatchNorm in its place"
            )


def _with_base(layer: nn.Module, change: Callable[[Any], Any]) -> Any:
    """The changed class of a layer; of a parametrized layer ``change`` gets the class below."""
    kind: Any = type(layer)
    if not is_parametrized(layer):
        return change(kind)
    own = {name: value for name, value in vars(kind).items() if name not in _AUTOMATIC}
    return type(kind.__name__, (change(kind.__bases__[0]),), own)


_AUTOMATIC = ("__dict__", "__weakref__")


@cache
def _class_of(kind: Any, synchronised: Any) -> Any:
    """The class that makes a layer of class ``kind`` synchronised."""
    if kind in _KNOWN:
        return synchronised
    own: dict[str, Any] = {"__module__": kind.__module__, _BEFORE: kind}
    own[_SYNCHRONISED] = synchronised
    own["__reduce_ex__"] = _reduced
    if issubclass(kind, LazyModuleMixin):
        own["cls_to_become"] = synchronised
    return type(f"Sync{kind.__name__}", (kind, synchronised), own)


def _reduced(layer: Any, protocol: Any) -> Any:
    """The ``__reduce_ex__`` of made classes: pickle stores the former class, to change it again."""
    kind = type(layer)
    if is_parametrized(layer):
        return object.__reduce_ex__(layer, protocol)  # torch's refusal
    return _made_again, (getattr(kind, _BEFORE), getattr(kind, _SYNCHRONISED)), vars(layer)


def _made_again(kind: type, synchronised: type) -> Any:
    made: Any = _class_of(kind, synchronised)
    return made.__new__(made)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with statistics over the rows of all ranks.

    Outputs, gradients and running statistics are those of ``nn.BatchNorm`` over the whole batch;
    ranks may have different numbers of rows, or none. In training, forward and backward are each
    one collective over the group, and block. Differentiable twice.

    Args:
        num_features: Channels: the size of dim 1 of the input. This and the other arguments are
            those of ``nn.BatchNorm2d``.
        process_group: The ranks; None: the default group at the time of the call.

    Example:
        >>> import torch
        >>> from tilework.parallel import SyncBatchNorm
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     layer = SyncBatchNorm(1, affine=False, eps=0)
        ...     return layer(torch.tensor([[float(rank)]])).item()
        >>> run_ranks(2, program)
        [-1.0, 1.0]
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:
            self.register_parameter("bias", None)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features:
            raise ValueError(
                f"SyncBatchNorm of {self.num_features} channels got an input of shape "
                f"{list(input.shape)}, which has {input.size(1)} in dim 1"
            )

    def forward(self, input: Tensor) -> Tensor:
        """The normalised input, in the same shape and dtype. Collective in training."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        if not uses_batch:
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=False,
                eps=self.eps,
            )
        mean, var, count = self._statistics(input)
        if self.training and self.track_running_stats and count > 0:
            self._update(mean.detach(), var.detach(), count)
        return self._normalised(input, mean, var)

    def _statistics(self, input: Tensor) -> tuple[Tensor, Tensor, int]:
        """Mean and biased variance of each channel over all ranks' rows, and the number of rows."""
        dtype = torch.promote_types(input.dtype, torch.float32)
        x = input.to(dtype)
        dims = [0, *range(2, x.dim())]
        rows = x.numel() // max(1, x.size(1))
        mean = x.sum(dims) / max(1, rows)
        squares = (x - self._by_channel(mean, x)).square().sum(dims)
        own = torch.cat([mean, squares, x.new_tensor([float(rows), float(x.requires_grad)])])
        group = self._group()
        if group is None:
            return mean, squares / max(1, rows), rows
        if torch.is_grad_enabled() and not own.requires_grad:
            own.requires_grad_()  # backward is collective where any rank's input needs a gradient
        every = functional.all_gather_tensor(own.unsqueeze(0), 0, group)
        if not every.is_meta and not every[:, -1].any():
            every = every.detach()
        channels = self.num_features
        counts = every[:, -2:-1].detach()
        total = counts.sum()
        means = every[:, :channels]
        mean = (means * counts).sum(0) / total.clamp_min(1)
        # Chan, Golub, LeVeque: the squares around the common mean, from the squares around each
        # rank's mean.
        apart = ((means - mean).square() * counts).sum(0)
        var = (every[:, channels:-2].sum(0) + apart) / total.clamp_min(1)
        # Pretended ranks have as many rows each.
        return mean, var, rows * group.size() if total.is_meta else int(total)

    def _group(self) -> ProcessGroup | None:
        """The group of the statistics, in ``Join`` of ranks with inputs; None: this rank alone."""
        if not self.training:
            return None
        given = self.process_group
        group = active_group(get_default_group() if given is None else given)
        return group if group.size() > 1 else None

    def _by_channel(self, values: Tensor, x: Tensor) -> Tensor:
        return values.view(1, -1, *([1] * (x.dim() - 2)))

    def _normalised(self, input: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        x = input.to(mean.dtype)
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight.to(scale.dtype)
        centred = x - self._by_channel(mean, x)
        if self.bias is None:
            out = centred * self._by_channel(scale, x)
        else:
            bias = self._by_channel(self.bias.to(scale.dtype), x)
            out = torch.addcmul(bias, centred, self._by_channel(scale, x))
        return _dense_as_torch(out.to(input.dtype))

    @torch.no_grad()
    def _update(self, mean: Tensor, var: Tensor, count: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked)
        unbiased = var * (count / max(1, count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: ProcessGroup | None = None
    ) -> nn.Module:
        """Make every batch normalisation in a module a SyncBatchNorm, in place. Local.

        Layers stay the same objects, with parameters, statistics, settings, hooks and
        parametrizations; lazy layers stay lazy. A subclass still does everything that it adds
        around ``super().forward(x)``, which synchronises. Wrap the module in
        DistributedDataParallel before or after this call.

        Args:
            module: Changed in place, and returned.
            process_group: The ranks; None: the default group.

        Raises:
            TypeError: A subclass has a forward that does not call ``super().forward``; nothing has
                changed then.
        """
        check_is_module(module, "convert_sync_batchnorm")
        for name, layer in module.named_modules():
            _check_can_synchronise(name, layer, cls)
        plain = (each for each in module.modules() if isinstance(each, _BatchNorm))
        layers: list[Any] = [each for each in plain if not isinstance(each, cls)]
        synchronised: Any = cls
        for layer in layers:
            layer.__class__ = _with_base(layer, lambda base: _class_of(base, synchronised))
            layer.process_group = process_group
        return module

    @classmethod
    def revert_sync_batchnorm(cls, module: nn.Module) -> nn.Module:
        """Make every SyncBatchNorm in a module a plain batch normalisation, in place. Local.

        The opposite of :meth:`convert_sync_batchnorm`: subclasses become what they were, other
        layers accept inputs with any number of dims.
        """
        check_is_module(module, "revert_sync_batchnorm")
        layers: list[Any] = [each for each in module.modules() if isinstance(each, SyncBatchNorm)]
        for layer in layers:
            former = _with_base(layer, lambda base: vars(base).get(_BEFORE, _AnyDimBatchNorm))
            layer.__class__ = former
            del layer.process_group
        return module


def _dense_as_torch(out: Tensor) -> Tensor:
    """The tensor in the memory format of torch's batch normalisation."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(out.dim())
    if last is not None and out.is_contiguous(memory_format=last):
        return out
    return out.contiguous()
