"""The style of a model whose ranks share the sequence."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from tilework.dtensor import DTensor, Replicate, Shard, context_parallel, distribute_module
from tilework.dtensor.internal import layout_of
from tilework.mesh import DeviceMesh
from tilework.parallel.data_parallel.outputs import replace_tensors, tensors_of
from tilework.parallel.tensor_parallel.styles import Style


class ContextParallel(Style):
    """Each rank runs the model on a part of the sequence: for models that know nothing of ranks.

    Parameters become DTensors, replicated along ``axis``; a plan's other styles may shard them
    along other axes. Plain inputs are the same on all ranks of the mesh: those that have the length
    of the sequence in ``sequence_dim`` are sharded there along ``axis``, without communication.
    DTensors are taken as they are. The model computes with DTensors, as a single process: attention
    runs in the way of :func:`~tilework.dtensor.context_parallel`, positions are global, the loss is
    that of all tokens. Of the outputs, what has no shards (a loss) becomes plain; the rest
    (logits) stays sharded DTensors.

    Args:
        sequence_dim: The dim of the inputs that is the sequence.
        way: The way of attention, also where a checkpointed layer is computed again.
        axis: The axis, by name or number, where the mesh has several axes.
        turns: 2 deals two blocks of the sequence to each rank, forth and back, so that ranks have
            equally much to do in causal attention: see :class:`~tilework.layout.Shard`.

    Raises:
        ValueError: There is no such way, or number of turns; or, on a forward, no input has the dim
            ``sequence_dim``.
    """

    def __init__(
        self, *, sequence_dim: int = 1, way: Any = "auto", axis: str | int = "cp", turns: int = 1
    ) -> None:
        Shard(0, turns=turns)  # raises for a wrong number
        with context_parallel(way):  # raises for another
            self.sequence_dim, self.way, self.axis, self.turns = sequence_dim, way, axis, turns

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Replicate parameters, and shard the module's inputs. Collective over the mesh; blocks."""
        number = 0 if device_mesh.ndim == 1 else device_mesh.spec.axis(self.axis)
        dim = self.sequence_dim

        def before(_: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = tensors_of((inputs, kwargs))
            length = next((x.shape[dim] for x in given if _has(x, dim)), None)
            if length is None and not all(isinstance(x, DTensor) for x in given):
                raise ValueError(
                    f"{self} shards dim {dim} of inputs, and no input has this dim: their shapes "
                    f"are {[list(x.shape) for x in given]}. Pass sequence_dim=, the dim of the "
                    f"sequence"
                )

            def sharded(x: Tensor) -> Tensor:
                if isinstance(x, DTensor):
                    return x
                placements: list[Any] = [Replicate()] * device_mesh.ndim
                if _has(x, dim) and x.shape[dim] == length:
                    placements[number] = Shard(dim % x.dim(), turns=self.turns)
                whole = DTensor.from_local(x, device_mesh, [Replicate()] * device_mesh.ndim)
                return whole.redistribute(placements=placements)

            return replace_tensors((inputs, kwargs), sharded)

        def after(_: nn.Module, inputs: object, output: Any) -> Any:
            return replace_tensors(output, _plain)

        distribute_module(module, device_mesh)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        if self.way != "auto":
            for each in module.modules():  # a checkpoint may call any of them again
                self._fix_way(each)
        return module

    def _fix_way(self, module: nn.Module) -> None:
        """Let calls of the module run attention in the style's way."""
        open_blocks: list[ExitStack] = []

        def enter(*_: object) -> None:
            block = ExitStack()
            block.enter_context(context_parallel(self.way))
            open_blocks.append(block)

        def leave(*_: object) -> None:
            if open_blocks:
                open_blocks.pop().close()

        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, always_call=True)


def _has(x: Tensor, dim: int) -> bool:
    return -x.dim() <= dim < x.dim()


def _plain(x: Tensor) -> Tensor:
    """The full tensor if ranks hold no shards of it; collective if they hold terms of a sum."""
    if not isinstance(x, DTensor) or layout_of(x).sharded_axes:
        return x
    return x.full_tensor()
