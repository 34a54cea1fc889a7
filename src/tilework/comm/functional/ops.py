"""The operators that stand for collectives in traces: ``torch.ops.tilework.*``.

A collective is two operators there. The first operator starts the collective and returns a
*ticket*: a tensor of the result's shape with meaningless elements. ``wait`` turns a ticket into the
result, in separate memory: compilers may reuse a ticket's memory, and nobody can read a result too
early.

Collectives are registered as having effects, so compilers keep unused collectives, and the order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx.node import has_side_effect

from tilework.comm.contract import Work
from tilework.comm.functional.running import (
    KINDS,
    FunctionalCollective,
    begin,
    check_batched,
    group_named,
)

_library = torch.library.Library("tilework", "DEF")  # type: ignore[no-untyped-call]

#: The attribute of a ticket that holds (result, work); lives as long as the ticket.
_RESULT = "_tilework_result"


def _register(kind: type[FunctionalCollective]) -> None:
    name = f"tilework::{kind.name}"
    between = f", {kind.schema}" if kind.schema else ""
    _define(f"{kind.name}(Tensor x{between}, str group) -> Tensor", _implementation(kind))
    torch.library.register_fake(name, _fake(kind), lib=_library)
    torch.library.register_autograd(name, _backward(kind), setup_context=_setup(kind), lib=_library)
    torch.library.register_vmap(name, _batched(kind), lib=_library)
    if not kind.local:
        operator = getattr(torch.ops.tilework, kind.name).default
        _register_effectful_op(operator, _EffectType.ORDERED)
        has_side_effect(operator)


def _define(schema: str, implementation: Callable[..., Tensor]) -> None:
    _library.define(schema)  # type: ignore[no-untyped-call]
    name, _, _ = schema.partition("(")
    _library.impl(name, implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _implementation(kind: type[FunctionalCollective]) -> Callable[..., Tensor]:
    def start(x: Tensor, *args: Any) -> Tensor:
        *given, group = args
        out, work = begin(kind(*given), group_named(group), x)
        if kind.local:
            shared = out.untyped_storage()._cdata == x.untyped_storage()._cdata
            return out.clone() if shared else out
        return _ticket(out, work)

    return start


def _fake(kind: type[FunctionalCollective]) -> Callable[..., Tensor]:
    def fake(x: Tensor, *args: Any) -> Tensor:
        *given, group = args
        return kind(*given).empty(x, lambda: group_named(group).rank())

    return fake


def _batched(kind: type[FunctionalCollective]) -> Callable[..., tuple[Tensor, int | None]]:
    def batched(
        info: Any, in_dims: tuple[int | None, ...], *args: Any
    ) -> tuple[Tensor, int | None]:
        check_batched(kind)
        return getattr(torch.ops.tilework, kind.name)(*args), in_dims[0]

    return batched


def _setup(kind: type[FunctionalCollective]) -> Callable[..., None]:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *given, ctx.group = inputs
        ctx.collective = kind(*given)
        if ctx.collective.keeps_input:
            ctx.save_for_backward(x)

    return setup_context


def _backward(kind: type[FunctionalCollective]) -> Callable[..., tuple[Any, ...]]:
    others = len(kind.parameters) + 1

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x = ctx.saved_tensors[0] if ctx.collective.keeps_input else None
        return (ctx.collective.adjoint(grad, x, ctx.group), *[None] * others)

    return backward


# -- tickets -------------------------------------------------------------------------------


def _ticket(out: Tensor, work: Work | None) -> Tensor:
    ticket = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
    setattr(ticket, _RESULT, (out, work))
    return ticket


def _wait(ticket: Tensor) -> Tensor:
    found: tuple[Tensor, Work | None] | None = getattr(ticket, _RESULT, None)
    if found is None:
        raise RuntimeError(
            "tilework::wait needs the tensor that a collective's operator returned, and takes it "
            "once; got another tensor, or one that was waited for already. Use the result of the "
            "first wait"
        )
    delattr(ticket, _RESULT)
    out, work = found
    if work is not None:
        work.wait()
    return out


def _register_wait() -> None:
    _define("wait(Tensor ticket) -> Tensor", _wait)
    torch.library.register_fake("tilework::wait", lambda ticket: _like(ticket), lib=_library)
    torch.library.register_autograd("tilework::wait", lambda ctx, grad: grad, lib=_library)
    torch.library.register_vmap(
        "tilework::wait",
        lambda info, in_dims, ticket: (torch.ops.tilework.wait(ticket), in_dims[0]),
        lib=_library,
    )


def _like(ticket: Tensor) -> Tensor:
    return torch.empty_strided(
        ticket.shape, ticket.stride(), dtype=ticket.dtype, device=ticket.device
    )


for _kind in KINDS.values():
    _register(_kind)
_register_wait()
