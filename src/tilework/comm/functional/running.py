"""Calls of functional collectives: run now, or written into a trace.

Without a trace, a call goes straight to the group, through one autograd function if it may need a
gradient. Under torch.compile, torch.export, make_fx and for tensors of foreign classes, a call goes
through the operators of :mod:`.ops`, which are the same collectives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup, Work
from tilework.comm.functional.async_tensor import AsyncTensor, attached
from tilework.comm.groups import new_group
from tilework.comm.per_call import checks
from tilework.comm.per_call.call_recorder import current_recorder
from tilework.comm.pretence import current_pretence
from tilework.comm.world import AnyGroup, NonMember, current_world, get_group_rank, native_group

_Fn = TypeVar("_Fn", bound=Callable[..., Any])

_PLAIN = (Tensor, torch.nn.Parameter, AsyncTensor)


def traced(x: Tensor) -> bool:
    """True if a call with ``x`` must go through operators, for a tracer to see or transform it."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or x.__class__ not in _PLAIN
    )


def transformed() -> bool:
    """True inside a transform of torch.func, or inside forward-mode autograd."""
    return (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )


def constant(fn: _Fn) -> _Fn:
    """``fn``, marked so that torch.compile calls it while it traces: the result is a constant."""
    # The same as torch.compiler.assume_constant_result, which takes a second to import.
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


#: Smaller collectives finish before the call returns: another thread would cost more.
AT_ONCE_BYTES = 1 << 16

#: A group of this rank, or its name (in traces).
GroupOrName = ProcessGroup | str


class MeshLike(Protocol):
    """A mesh, which gives the process group along an axis by ``get_group``."""

    def get_group(self, mesh_dim: Any = None) -> Any: ...


#: Every collective by name, to be registered as an operator.
KINDS: dict[str, type[FunctionalCollective]] = {}


class FunctionalCollective(ABC):
    """A collective with its static arguments: an operation from a tensor to a new tensor.

    The constructor takes the arguments that ``schema`` lists, and sets attributes of their names.
    """

    #: The operator's name.
    name: ClassVar[str]
    #: The arguments between the tensor and the group, as in an operator's schema.
    schema: ClassVar[str]
    #: True if the collective involves only this rank.
    local: ClassVar[bool] = False
    #: True if every element is treated equally at every place: then torch.vmap can map it.
    elementwise: ClassVar[bool] = False
    #: The names of the arguments.
    parameters: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            cls.parameters = tuple(text.split()[1] for text in cls.schema.split(", ") if text)
            made: Any = make_dataclass("Arguments", cls.parameters)
            setattr(cls, "__init__", made.__init__)  # noqa: B010  # mypy permits no assignment
            KINDS[cls.name] = cls

    def __init__(self, *args: Any) -> None:
        raise NotImplementedError

    @property
    def keeps_input(self) -> bool:
        """True if the adjoint needs the input's values."""
        return False

    @abstractmethod
    def start(self, group: ProcessGroup, x: Tensor, async_op: bool) -> tuple[Tensor, Work | None]:
        """Start the collective; return the result, which has values once the work is done.

        ``x`` is not changed. With ``async_op``, ``x`` is not read after the return.
        """

    def empty(self, x: Tensor, group_rank: Callable[[], int]) -> Tensor:
        """A tensor like the result for ``x``, for traces; ``group_rank()`` is this rank's."""
        return empty_like(x)

    @abstractmethod
    def adjoint(self, grad: Tensor, x: Tensor | None, group: GroupOrName) -> Tensor:
        """The gradient of the input, from ``grad``, that of the result. Collective; differentiable.

        ``x`` is the input if ``keeps_input``, else None.
        """


def empty_like(x: Tensor) -> Tensor:
    """A dense tensor of the shape of ``x``, with undefined elements."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def run(kind: type[FunctionalCollective], x: Tensor, group: GroupOrName, *args: Any) -> Tensor:
    """The result of the collective ``kind(*args)`` on ``x``, over ``group``.

    The collective is written as operators into a trace, if there is one. Otherwise it is started
    now, and a large result is waited for at the first use.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {x!r} of {type(x)}")
    checks.refuse_parts(x, "tensor")
    if torch.compiler.is_compiling():
        return _operators(kind, x, group, args)
    # A captured step has the group's own calls, which its ranks compare and vote on; so has a plan.
    transforms, is_recorded = transformed(), current_recorder() is not None
    is_called = transforms or is_recorded or current_pretence() is not None
    if traced(x) and not is_called:
        return _operators(kind, x, group, args)
    if isinstance(x, AsyncTensor):
        x = x.wait()
    members = group_named(group) if isinstance(group, str) else group
    call = _Call(kind, args, members, wait=is_called)
    if transforms or (x.requires_grad and torch.is_grad_enabled()):
        out: Tensor = _Differentiable.apply(x, call)  # type: ignore[no-untyped-call]
    else:
        out = call.start(x)
    return out if call.work is None else attached(out, call.work)


def _operators(
    kind: type[FunctionalCollective], x: Tensor, group: GroupOrName, args: tuple[Any, ...]
) -> Tensor:
    name = group if isinstance(group, str) else group.group_name
    result: Tensor = getattr(torch.ops.tilework, kind.name)(x, *args, name)
    if not kind.local:
        result = torch.ops.tilework.wait(result)
    return result


def begin(
    collective: FunctionalCollective, group: ProcessGroup, x: Tensor
) -> tuple[Tensor, Work | None]:
    """Start ``collective`` on ``x``; return the result and the Work; None if it is done already."""
    x = checks.check_tensor(x, "tensor")
    async_op = x.nbytes > AT_ONCE_BYTES
    out, work = collective.start(group, x, async_op)
    if work is None or async_op:
        return out, work
    work.wait()
    return out, None


class _Call:
    """The arguments and group of a collective; backward may run in another World."""

    __slots__ = ("args", "collective", "group", "kind", "wait", "work")

    def __init__(
        self,
        kind: type[FunctionalCollective],
        args: tuple[Any, ...],
        group: ProcessGroup,
        wait: bool,
    ) -> None:
        self.kind, self.args, self.group = kind, args, group
        self.collective = kind(*args)
        #: True to wait for results of any size.
        self.wait = wait
        self.work: Work | None = None

    def start(self, x: Tensor) -> Tensor:
        """Start the collective on ``x``; the result has values once ``self.work`` is done."""
        is_traced = traced(x) and current_recorder() is None and current_pretence() is None
        if self.wait and is_traced:  # a transform within a trace
            return _operators(self.kind, x, self.group, self.args)
        out, work = begin(self.collective, self.group, x)
        if work is not None and self.wait:
            work.wait()
        else:
            self.work = work
        return out


class _Differentiable(torch.autograd.Function):
    """Any collective, for autograd and torch.func."""

    @staticmethod
    def forward(x: Tensor, call: _Call) -> Tensor:
        return call.start(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Call], output: Tensor) -> None:
        x, ctx.call = inputs
        if ctx.call.collective.keeps_input:
            ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        collective = ctx.call.collective
        x = ctx.saved_tensors[0] if collective.keeps_input else None
        return collective.adjoint(grad, x, ctx.call.group), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        call = ctx.call
        if call.collective.keeps_input:
            raise NotImplementedError(
                f"forward-mode derivatives of {call.kind.name} exist for linear reductions "
                f"only (sum, avg, premul_sum); use reverse mode"
            )
        return run(call.kind, tangent, call.group, *call.args)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, call: _Call) -> Any:
        check_batched(call.kind)
        return run(call.kind, x, call.group, *call.args), in_dims[0]


def check_batched(kind: type[FunctionalCollective]) -> None:
    """Raise unless torch.vmap of ``kind`` can be one call on the whole batch."""
    if not kind.elementwise:
        raise NotImplementedError(
            f"torch.vmap of {kind.name} is not implemented; call it outside the mapped function, "
            f"on the whole batch with its dims shifted by one"
        )


# -- groups, by name -------------------------------------------------------------------------


def group_named(name: str) -> ProcessGroup:
    """The group of this rank's World with that name, if this rank is in it; else a ValueError."""
    records = current_world().records
    for group in records:
        if group.group_name == name:
            return group
    known = ", ".join(repr(group.group_name) for group in records) or "none"
    raise ValueError(
        f"this rank has no group named {name!r} (it has: {known}): it was destroyed, or this "
        f"rank is not in it. A traced function runs on groups with the names of those that it "
        f"was traced with"
    )


@constant
def _default_name() -> str:
    return current_world().default().group_name


@constant
def _size_of(name: str) -> int:
    return group_named(name).size()


@constant
def _root_of(name: str, rank: int) -> int:
    return get_group_rank(group_named(name), rank)


@constant
def _name_of(*group: Any) -> str:
    """The name of the group that a mesh, a mesh and an axis, or a list of ranks stands for."""
    alone = len(group) == 1 and not isinstance(group[0], int)
    return _member(group[0] if alone else group).group_name


class _ByRanks(dict[tuple[int, ...], ProcessGroup]):
    """The groups that :func:`_group_of_ranks` has made on this rank, by their global ranks."""

    def forget_groups(self) -> None:
        """Forget all groups, since ranks have new numbers."""
        self.clear()


def _group_of_ranks(ranks: Sequence[int]) -> ProcessGroup | NonMember:
    """The group of global ``ranks``, or a NonMember. Collective at the first call."""
    world = current_world()
    numbers = tuple(int(rank) for rank in ranks)
    if numbers == world.default().global_ranks:
        return world.default()
    if world.default().global_ranks[world.default().rank()] not in numbers:
        return NonMember(f"ranks {list(numbers)}", numbers)
    known = world.state(_ByRanks)
    if known.get(numbers) not in world.records:
        made = new_group(numbers, use_local_synchronization=True, sort_ranks=False)
        assert isinstance(made, ProcessGroup)
        known[numbers] = made
    return known[numbers]


def _from_mesh(group: Any) -> Any:
    """The group that a mesh, a mesh and an axis, or a list of ranks stands for."""
    if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
        mesh, axis = group
        return mesh.get_group(axis)
    if isinstance(group, list | tuple):
        if not all(isinstance(rank, int) for rank in group):
            raise TypeError(
                f"a list as group must have global ranks, such as [0, 1], or be a pair of a mesh "
                f"and an axis, such as (mesh, 'tp'); got {group!r}"
            )
        return _group_of_ranks(group)
    return group.get_group() if hasattr(group, "get_group") else group


def _member(group: Any) -> ProcessGroup:
    """The group of a ``group`` argument; raises if this rank is not in it."""
    if group is None:
        return current_world().default()
    if isinstance(group, str):
        return group_named(group)
    found = native_group(group if isinstance(group, ProcessGroup) else _from_mesh(group))
    if isinstance(found, NonMember):
        raise ValueError(
            f"this rank is not in {found!r}, so there is no result here; call functional "
            f"collectives on member ranks only (rank_not_in_group(group) shows which)"
        )
    return found


def named(
    group: AnyGroup | str | MeshLike | tuple[MeshLike, int | str] | Sequence[int],
) -> GroupOrName:
    """The group that ``group`` stands for, in a trace its name; raises if this rank is outside."""
    if torch.compiler.is_compiling():
        if group is None:
            return _default_name()
        if isinstance(group, str):
            return group
        if isinstance(group, ProcessGroup):
            return group.group_name
        return _name_of(*group) if isinstance(group, list | tuple) else _name_of(group)
    return _member(group)


def size_of(group: GroupOrName) -> int:
    """The number of ranks in ``group``."""
    return _size_of(group) if isinstance(group, str) else group.size()


def rank_in(group: GroupOrName) -> int:
    """This rank's number within the group."""
    return (group_named(group) if isinstance(group, str) else group).rank()


def root_of(group: GroupOrName, rank: int) -> int:
    """The group rank of a global rank; a ValueError if it is not part of the group."""
    return _root_of(group, rank) if isinstance(group, str) else get_group_rank(group, rank)
