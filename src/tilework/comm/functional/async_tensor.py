"""Asynchronous tensors: results of collectives that wait by themselves when first used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import Work


class AsyncTensor(Tensor):
    """The result of a collective that may still be in flight.

    Behaves like a plain tensor. Code that reads or writes elements first waits, and then works on
    (and returns) plain tensors. The shape, dtype, device and place in the autograd graph are known
    without a wait. The wrapper has no memory, so nothing can read data before the wait. It may be
    dropped at any time. If the operation failed, every use raises the error.

    Made by the functional collectives only.
    """

    _value: Tensor
    _work: Work | None

    @staticmethod
    def __new__(cls, value: Tensor, work: Work) -> AsyncTensor:
        """A tensor that looks like ``value``, and resolves to it once ``work`` is done."""
        self = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )
        assert isinstance(self, AsyncTensor)
        self._value, self._work = value, work
        return self

    def wait(self) -> Tensor:
        """Block until the operation is done; return the result as a plain tensor.

        The result has the same place in the autograd graph. Later calls return the same tensor.

        Raises:
            DistBackendError: The operation failed (the error's subclass says how).
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._value

    def is_completed(self) -> bool:
        """True if a use of the tensor would not block. Never blocks."""
        return self._work is None or self._work.is_completed()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        get = _peek if func in _METADATA else AsyncTensor.wait
        return func(*_plain(args, get), **_plain(dict(kwargs or {}), get))

    # C++ code below autograd reaches the wrapper without __torch_function__.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func._schema.is_mutable:
            _check_written(func, args, kwargs or {})
        return func(*_plain(args, AsyncTensor.wait), **_plain(dict(kwargs or {}), AsyncTensor.wait))


def attached(value: Tensor, work: Work) -> AsyncTensor:
    """An :class:`AsyncTensor` for ``value``, at the same place in the autograd graph."""
    if not value.requires_grad:
        return AsyncTensor(value, work)
    attached_tensor: AsyncTensor = _Attach.apply(value, work)  # type: ignore[no-untyped-call]
    return attached_tensor


class _Attach(torch.autograd.Function):
    """The autograd step from ``value`` to the wrapper, which passes gradients to ``value``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, work: Work) -> Tensor:
        return AsyncTensor(value, work)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _peek(tensor: AsyncTensor) -> Tensor:
    return tensor._value


def _plain(value: Any, get: Callable[[AsyncTensor], Tensor]) -> Any:
    """``value``, also nested lists, tuples and dicts, with ``get(x)`` for each AsyncTensor x."""
    if isinstance(value, AsyncTensor):
        return get(value)
    if value.__class__ is tuple or value.__class__ is list:
        return value.__class__(_plain(item, get) for item in value)
    if value.__class__ is dict:
        return {key: _plain(item, get) for key, item in value.items()}
    return value


def _check_written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a write to an AsyncTensor that requires a gradient: the graph would miss it."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if isinstance(value, AsyncTensor) and value._value.requires_grad:
            raise RuntimeError(
                f"{func} would overwrite the result of a collective that is still wrapped and "
                f"takes part in autograd; pass wait_tensor(result) instead"
            )


#: Functions that need no elements, as passed to __torch_function__.
_METADATA = {
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement),
    *(Tensor.stride, Tensor.element_size, Tensor.storage_offset, Tensor.__len__),
    *(Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed),
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize"),
            *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized"),
            *("requires_grad", "is_leaf", "grad_fn"),
        )
    ),
}
