"""``torch.autocast`` for tensors without memory: the casts that torch makes on the job's device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilework.comm.per_call.internal import call_site
from tilework.errors import PretendError
from tilework.plan.attention import on_cpu

#: A key above autograd's that no tensor here has.
_KEY: Any = torch._C.DispatchKey.__members__["AutocastIPU"]
_aten = torch.ops.aten
#: Casts of parameters, which torch keeps until the outermost block ends: by identity.
_casts: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
_libraries: list[Any] = []


def autocast_entered(original: Any, device: torch.device) -> Any:
    """``torch.autocast.__enter__`` that casts tensors without memory, too."""

    @functools.wraps(original)
    def enter(self: Any) -> Any:
        if self._enabled and self.device != "cpu":
            raise PretendError(
                f"torch.autocast({self.device!r}) at {call_site()} casts as that device does, "
                f"which is not known here: cast the model for a plan, or pass enabled=False"
            )
        result = original(self)
        _include(torch.is_autocast_enabled("cpu") and device.type == "cpu")
        return result

    return enter


def autocast_left(original: Any) -> Any:
    """``torch.autocast.__exit__`` to :func:`autocast_entered`."""

    @functools.wraps(original)
    def leave(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        is_on = torch.is_autocast_enabled("cpu")
        _include(is_on)
        if not is_on:
            _casts.clear()
        return result

    return leave


def _include(is_on: bool) -> None:
    if is_on and not _libraries:
        _libraries.append(_library())
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, is_on)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, not is_on)


def _library() -> Any:
    """Kernels of all operators that torch casts for: the casts are asked of torch's own."""
    kind: Any = getattr(torch.library, "Library")  # noqa: B009 - without types
    rest, made = kind("_", "IMPL", "AutocastIPU"), kind("aten", "IMPL", "AutocastIPU")
    rest.fallback(torch.library.fallthrough_kernel)
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"):
        if full.startswith("aten::"):
            name, _, overload = full.removeprefix("aten::").partition(".")
            made.impl(full, functools.partial(_cast, name, overload or "default"))
    return rest, made


def _cast(name: str, overload: str, *args: Any, **kwargs: Any) -> Any:
    operator = getattr(getattr(_aten, name), overload)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
        flat, shape = tree_flatten((args, kwargs))
        for place, dtype in _wanted(operator, flat, shape).items():  # in torch's order
            flat[place] = _as(flat[place], dtype)
        args, kwargs = tree_unflatten(flat, shape)
        with torch._C._DisableAutocast():
            return operator(*args, **kwargs)


def _wanted(operator: Callable[..., Any], flat: list[Any], shape: Any) -> dict[int, torch.dtype]:
    """By place, the dtypes that torch casts tensors on the CPU to, which look like those given."""
    look = _Look()
    stand_ins = [on_cpu(x, x.dtype) if isinstance(x, Tensor) else x for x in flat]
    look.places = {id(x): i for i, x in enumerate(stand_ins) if isinstance(x, Tensor)}
    args, kwargs = tree_unflatten(stand_ins, shape)
    try:
        with look:
            operator(*args, **kwargs)
    except _Seen:
        pass
    return look.wanted


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    is_kept = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf
    if not is_kept or not torch.is_autocast_cache_enabled() or tensor._is_view():
        return tensor.to(dtype)
    key = id(tensor), dtype
    if key not in _casts:
        _casts[key] = tensor, tensor.to(dtype)
    return _casts[key][1]


class _Seen(Exception):
    """The operator itself was reached: all casts are known."""


class _Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the casts of stand-ins, and ends at the first other operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[int, int] = {}
        self.wanted: dict[int, torch.dtype] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would load the compiler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not _aten._to_copy.default or id(args[0]) not in self.places:
            raise _Seen
        dtype = (kwargs or {})["dtype"]
        self.wanted[self.places[id(args[0])]] = dtype
        return on_cpu(args[0], dtype)
