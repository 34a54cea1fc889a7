"""The sharding of calls, as data: what propagation finds, and dispatch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

from tilework.dtensor.spec import DTensorSpec, Ints

#: The layout that an input must have, and the axes along which its gradient is then partial.
InputLayout = tuple[DTensorSpec, Ints]


class Finish(IntEnum):
    """A step from the local result of a call to the result."""

    #: Computed anew where a number is not finite: infinity times a part of a partial sum that is
    #: zero, or of the other sign, is no part of infinity.
    WHOLE_SUMS = auto()
    #: The result may be the first tensor itself.
    MAYBE_INPUT = auto()
    #: It is a copy in torch, though the local operator may give a view.
    OWN_MEMORY = auto()
    #: Local results become DTensors.
    WRAP = auto()
    #: And are reduced, where gradients are recorded: they are partial otherwise than as sums, but
    #: no input is.
    WRAP_REDUCED = auto()
    #: Results are views of the first tensor.
    VIEW = auto()
    #: And the local operator may have made a copy.
    MAYBE_COPY = auto()
    #: And they are copies: elements were moved.
    COPIED_VIEW = auto()
    #: The operator has written to the first tensor.
    WRITTEN = auto()
    #: It was computed anew, and is written there now.
    WRITE = auto()


@dataclass(eq=False, slots=True)
class Composed:
    """Other operators on DTensors compute the call, from the arguments.

    Args:
        run: Called with the arguments.
        overwrites: True if nothing depends on what a plain tensor that is written to held before.
        strides: Those of results, where they are not those that the composition gives.
        knows_strides: True once these are known.
    """

    run: Callable[..., Any]
    overwrites: bool = False
    strides: Sequence[Ints] | None = None
    knows_strides: bool = False


@dataclass(eq=False, slots=True)
class OnLocals:
    """The call runs on local tensors.

    Args:
        run: Called with the local tensors; None: the operator is called, with its other arguments.
        meta_result: The result without memory, for ranks outside the mesh; None: it is unknown.
        replays: True if the local results have no elements where the full ones have: torch must
            then keep how they were made, to make them again where their base is written to. The
            gradient of what it makes otherwise, ``as_strided``, has no graph for them, unlike the
            other ranks'.
    """

    run: Callable[..., Any] | None = None
    meta_result: Any = None
    replays: bool = False


@dataclass(eq=False, slots=True)
class Gathered:
    """The operator runs on full tensors, which every rank gets.

    Args:
        meta_result: As for :class:`OnLocals`.
        silent_writes: Numbers of the tensors that it writes to without torch counting the write.
    """

    meta_result: Any = None
    silent_writes: frozenset[int] = frozenset()


Way = Composed | OnLocals | Gathered
_VIEWS = frozenset({Finish.VIEW, Finish.MAYBE_COPY, Finish.COPIED_VIEW})


@dataclass(eq=False, slots=True)
class OpSharding:
    """The sharding of calls of one signature, as a mesh caches it."""

    #: What computes the local results, or the call.
    way: Way
    #: For each tensor the layout that it must have; None if it is taken as it is.
    inputs: Sequence[InputLayout | None] = ()
    #: The layouts of results; None: replicated, with shapes that are known afterwards.
    outputs: list[DTensorSpec] | None = None
    #: What is done with local results.
    finish: tuple[Finish, ...] = ()
    #: True if the operator runs on the local tensors as they are: always, or while none of them
    #: requires a gradient. Never so on a rank outside the mesh.
    as_is: bool = False
    as_is_without_grad: bool = False
    #: The layout of the only result, if it is only wrapped.
    output: DTensorSpec | None = None
    #: The layouts in the cache's key, which has no more than their ids: kept alive here.
    specs: Sequence[DTensorSpec] = ()
    #: Everything about the call but its tensors and the numbers that the cache's key lacks.
    digest: int = 0

    @property
    def makes_views(self) -> bool:
        """True if results are views of the first tensor."""
        return bool(self.finish) and self.finish[-1] in _VIEWS

    @property
    def stands_in(self) -> bool:
        """True if other code than the call's function computes it."""
        return isinstance(self.way, Composed) or (
            isinstance(self.way, OnLocals) and self.way.run is not None
        )

    def looks_first(self) -> None:
        """Have the operator never run before the call is looked at."""
        self.as_is = self.as_is_without_grad = False
