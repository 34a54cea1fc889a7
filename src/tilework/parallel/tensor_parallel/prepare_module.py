"""Styles of inputs and outputs alone, which change no parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tilework.layout import Placement
from tilework.layout.internal import native_placement
from tilework.parallel.tensor_parallel.axis import MeshAxis
from tilework.parallel.tensor_parallel.styles import ParallelStyle

#: One layout for each value; None for a value that stays as it is.
Layouts = Placement | Sequence[Placement | None]


class _WithoutParameters(ParallelStyle):
    def parameter_layouts(self, module: nn.Module) -> Mapping[str, Placement]:
        return {}


class PrepareModuleInput(_WithoutParameters):
    """Make a module's inputs DTensors in the layouts that the module needs.

    Args:
        input_layouts: The layouts of positional inputs along the axis, if they are plain tensors:
            one placement, or one for each input; None for an input that stays as it is.
        desired_input_layouts: The layouts in which the module gets them; in the same form.
        input_kwarg_layouts: The layouts of inputs passed by name; others stay as they are.
        desired_input_kwarg_layouts: The layouts in which the module gets them; the same names.
        use_local_output: Whether the module gets plain tensors: the local tensors of the desired
            layouts.

    Raises:
        ValueError: Layouts and desired layouts do not match; or, on forward, there are not as many
            inputs as layouts.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tilework.layout import Replicate, Shard
        >>> from tilework.mesh import init_device_mesh
        >>> from tilework.parallel import PrepareModuleInput, parallelize_module
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     whole = PrepareModuleInput(
        ...         input_layouts=Shard(0), desired_input_layouts=Replicate()
        ...     )
        ...     module = parallelize_module(nn.Tanh(), mesh, whole)
        ...     return module(torch.ones(5, 3)).to_local().shape
        >>> run_ranks(2, program)[0]
        torch.Size([10, 3])
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _sequence(input_layouts)
        self.desired_input_layouts = _sequence(desired_input_layouts)
        _check_pairs("input", self.input_layouts, self.desired_input_layouts)
        self.input_kwarg_layouts = _by_name(input_kwarg_layouts)
        self.desired_input_kwarg_layouts = _by_name(desired_input_kwarg_layouts)
        if set(self.input_kwarg_layouts) != set(self.desired_input_kwarg_layouts):
            raise ValueError(
                f"input_kwarg_layouts and desired_input_kwarg_layouts name the same inputs, got "
                f"{sorted(self.input_kwarg_layouts)} and {sorted(self.desired_input_kwarg_layouts)}"
            )
        self.use_local_output = use_local_output

    def attach(self, module: nn.Module, axis: MeshAxis) -> None:
        name = type(module).__name__

        def prepare(
            value: Any, layout: Placement | None, desired: Placement | None, key: Any
        ) -> Any:
            if layout is None:
                return value
            tensor = axis.annotate(value, layout, f"input {key!r} of {name}")
            tensor = axis.move_input(tensor, desired or layout)
            return axis.to_local(tensor) if self.use_local_output else tensor

        def before(_: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.input_layouts is not None:
                assert self.desired_input_layouts is not None
                _check_count(f"inputs of {name}", inputs, "input_layouts", self.input_layouts)
                layouts = zip(self.input_layouts, self.desired_input_layouts, strict=True)
                inputs = tuple(
                    prepare(value, *pair, number)
                    for number, (value, pair) in enumerate(zip(inputs, layouts, strict=True))
                )
            layouts_by_name, desired = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
            named = {
                key: prepare(value, layouts_by_name.get(key), desired.get(key), key)
                for key, value in kwargs.items()
            }
            return inputs, named

        module.register_forward_pre_hook(before, with_kwargs=True)

    def __repr__(self) -> str:
        return (
            f"PrepareModuleInput(input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, "
            f"input_kwarg_layouts={self.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleOutput(_WithoutParameters):
    """Make a module's outputs DTensors with the layouts that the next module needs.

    Args:
        output_layouts: The layouts of outputs along the axis, if they are plain tensors: one
            placement, or one for each of a tuple; None for an output that stays as it is.
        desired_output_layouts: The layouts after the module; in the same form.
        use_local_output: Whether outputs are local tensors; else DTensors.

    Raises:
        ValueError: Layouts and desired layouts do not match; or, on forward, there are not as many
            outputs as layouts.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tilework.layout import Replicate, Shard
        >>> from tilework.mesh import init_device_mesh
        >>> from tilework.parallel import PrepareModuleOutput, parallelize_module
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     parts = PrepareModuleOutput(
        ...         output_layouts=Replicate(), desired_output_layouts=Shard(0)
        ...     )
        ...     return parallelize_module(nn.Tanh(), mesh, parts)(torch.ones(6, 3)).shape
        >>> run_ranks(2, program)[0]
        torch.Size([3, 3])
    """

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _sequence(output_layouts) or ()
        self.desired_output_layouts = _sequence(desired_output_layouts) or ()
        _check_pairs("output", self.output_layouts, self.desired_output_layouts)
        self.use_local_output = use_local_output

    def attach(self, module: nn.Module, axis: MeshAxis) -> None:
        name = type(module).__name__

        def prepare(
            value: Any, layout: Placement | None, desired: Placement | None, number: int
        ) -> Any:
            if layout is None:
                return value
            tensor = axis.annotate(value, layout, f"output {number} of {name}")
            tensor = axis.move(tensor, desired or layout)
            return axis.to_local(tensor) if self.use_local_output else tensor

        def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            several = isinstance(output, (tuple, list))
            outputs = output if several else (output,)
            _check_count(f"outputs of {name}", outputs, "output_layouts", self.output_layouts)
            pairs = zip(self.output_layouts, self.desired_output_layouts, strict=True)
            prepared = [
                prepare(value, *pair, number)
                for number, (value, pair) in enumerate(zip(outputs, pairs, strict=True))
            ]
            return tuple(prepared) if several else prepared[0]

        module.register_forward_hook(after)

    def __repr__(self) -> str:
        return (
            f"PrepareModuleOutput(output_layouts={self.output_layouts}, "
            f"desired_output_layouts={self.desired_output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleInputOutput(_WithoutParameters):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one, with their arguments.

    ``use_local_input`` is the ``use_local_output`` of the former.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tilework.layout import Replicate, Shard
        >>> from tilework.mesh import init_device_mesh
        >>> from tilework.parallel import PrepareModuleInputOutput, parallelize_module
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     whole_within = PrepareModuleInputOutput(
        ...         input_layouts=Shard(0),
        ...         desired_input_layouts=Replicate(),
        ...         output_layouts=Replicate(),
        ...         desired_output_layouts=Shard(0),
        ...     )
        ...     return parallelize_module(nn.Tanh(), mesh, whole_within)(torch.ones(6, 3)).shape
        >>> run_ranks(2, program)[0]
        torch.Size([6, 3])
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def attach(self, module: nn.Module, axis: MeshAxis) -> None:
        self.prepare_module_input.attach(module, axis)
        self.prepare_module_output.attach(module, axis)

    def __repr__(self) -> str:
        return (
            f"PrepareModuleInputOutput({self.prepare_module_input!r}, "
            f"{self.prepare_module_output!r})"
        )


def _sequence(layouts: Layouts | None) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None
    layouts = native_placement(layouts)
    given = (layouts,) if isinstance(layouts, Placement) else layouts
    sequence = tuple(map(native_placement, given))
    for layout in sequence:
        if layout is not None and not isinstance(layout, Placement):
            raise TypeError(f"layouts must be placements or None, got {layout!r}")
    return sequence


def _by_name(layouts: Mapping[str, Placement | None] | None) -> dict[str, Placement | None]:
    return {name: native_placement(layout) for name, layout in (layouts or {}).items()}


def _check_pairs(
    what: str,
    layouts: tuple[Placement | None, ...] | None,
    desired: tuple[Placement | None, ...] | None,
) -> None:
    if (layouts is None) != (desired is None) or len(layouts or ()) != len(desired or ()):
        raise ValueError(
            f"{what}_layouts and desired_{what}_layouts should have same length, got {layouts} "
            f"and {desired}"
        )


def _check_count(what: str, values: Sequence[Any], name: str, layouts: Sequence[Any]) -> None:
    if len(values) != len(layouts):
        raise ValueError(
            f"there are {len(values)} {what}, but {len(layouts)} {name}: {list(layouts)}. Give one "
            f"for each, None for what is to stay as it is"
        )
