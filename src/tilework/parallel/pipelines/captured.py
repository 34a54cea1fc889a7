"""Stages as programs: each (stage, kind of action) is captured, and messages go between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from tilework.dtensor import DTensor
from tilework.late_names import late_name
from tilework.parallel.data_parallel.ddp import DistributedDataParallel
from tilework.parallel.pipelines.stage import Route


def stage_forward(
    module: Callable[..., Any], stage: int, route: Route, trains: bool
) -> Callable[..., Any]:
    """The function from values, and the model's arguments, to the stage's values or result.

    Values are compared with the route; they get the route's dtype where that loses nothing, as
    after a policy of mixed precision.
    """
    known = ref(route)  # ghosts are no state of the function
    count = len(route.cuts[stage - 1]) if stage else 0

    def forward(*given: Any, **kwargs: Any) -> Any:
        route: Any = known()
        made = module((route, *given[:count]), *given[count:], **kwargs)
        if stage == len(route.cuts):
            return made
        return tuple(
            _checked(value, stage, crossing, trains)
            for value, crossing in zip(made, route.cuts[stage], strict=True)
        )

    return forward


def _checked(value: Tensor, stage: int, crossing: Any, trains: bool) -> Tensor:
    is_wider = torch.promote_types(value.dtype, crossing.dtype) == crossing.dtype
    if is_wider and value.is_floating_point():
        value = value.to(crossing.dtype)
    if isinstance(value, DTensor):
        raise TypeError(
            f"a DTensor crosses the cut after stage {stage}: {crossing}. Plain tensors go "
            f"between stages: let a style give local tensors there (use_local_output=True)"
        )
    if tuple(value.shape) != crossing.shape or value.dtype != crossing.dtype:
        raise RuntimeError(
            f"stage {stage} made {list(value.shape)} {value.dtype} for {crossing}: stages can "
            f"follow a forward only if shapes of inputs decide the shapes of results"
        )
    if trains and value.requires_grad and not crossing.has_gradient:
        raise RuntimeError(
            f"parameters of stage {stage} or before require gradients, and none did when "
            f"pipeline() was called: unfreeze them before pipeline()"
        )
    return value


#: The programs of a rank's stages, by stage, and identity of module and route, with the module's
#: call by the program. They are no state of a step that is captured as a whole.
_programs: Final[WeakKeyDictionary[CapturedStages, dict[tuple[int, int, int], Any]]] = (
    WeakKeyDictionary()
)


class CapturedStages:
    """Runs forwards of a rank's stages as programs, whose backward may be cut in two."""

    def __init__(self, backend: str, cuts: bool) -> None:
        self._backend, self._cuts = backend, cuts
        _programs[self] = {}

    def run(
        self, part: nn.Module, stage: int, route: Route, given: Sequence[Any], kwargs: Any
    ) -> tuple[Any, Any]:
        """The result of a stage; and the call, if a program with a cut backward pass ran."""
        inner: Any = part.module if isinstance(part, DistributedDataParallel) else part
        known, key = _programs[self], (stage, id(inner), id(route))
        if key not in known:
            known[key] = self._captured(inner, stage, route)
        program, as_module = known[key]
        if inner is part:
            return program(*given, **kwargs), program.take_last()
        count = len(route.cuts[stage - 1]) if stage else 0
        before, inner._compiled_call_impl = inner._compiled_call_impl, as_module
        try:
            made = part((route, *given[:count]), *given[count:], **kwargs)
            return made, program.take_last()
        finally:
            inner._compiled_call_impl = before

    def _captured(self, inner: nn.Module, stage: int, route: Route) -> tuple[Any, Any]:
        forward = stage_forward(inner._call_impl, stage, route, trains=True)
        forward.__name__ = f"stage_{stage}"
        program = late_name("parallel", "CompiledFunction")(forward, self._backend, self._cuts)
        return program, lambda received, *args, **kwargs: program(*received[1:], *args, **kwargs)
