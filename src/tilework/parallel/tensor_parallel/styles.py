"""Styles: the layouts of one module's parameters, inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tilework.dtensor import DTensor
from tilework.layout import Placement, Replicate, Shard
from tilework.layout.internal import native_placement
from tilework.parallel.data_parallel.outputs import replace_tensors
from tilework.parallel.tensor_parallel.axis import MeshAxis


class ParallelStyle:
    """The layouts of a module along one mesh axis. Subclass it for your own style.

    :func:`parallelize_module` first asks all styles of its plan for :meth:`parameter_layouts`, then
    distributes parameters, then calls :meth:`attach`. A style written for torch has a method
    ``_apply(module, device_mesh)`` instead, which does all of this and returns the module, or the
    module to replace it. It is called after the other styles, with the whole mesh.
    """

    #: The ``src_data_rank`` given to parallelize_module, for styles with ``_apply``.
    src_data_rank: int | None = 0

    @property
    def applies_itself(self) -> bool:
        """True if the style was written for torch, with a method ``_apply``."""
        return hasattr(self, "_apply")

    def parameter_layouts(self, module: nn.Module) -> Mapping[str, Placement]:
        """The layouts of parameters of ``module`` along the axis, by name. Local.

        Raises:
            NotImplementedError: The style does not know such modules.
        """
        raise self._without_methods()

    def attach(self, module: nn.Module, axis: MeshAxis) -> None:
        """Register hooks before and after the module's forward. Local."""
        raise self._without_methods()

    def _without_methods(self) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} lacks methods: a style must define parameter_layouts(module) "
            f"and attach(module, axis), or _apply(module, device_mesh) as torch's styles do"
        )


def linear_dims(module: nn.Module) -> tuple[int, int] | None:
    """The dims of a linear layer's weight for outputs and inputs; None for other layers."""
    if isinstance(module, nn.Linear):
        return 0, 1
    is_conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf")  # of transformers
    return (1, 0) if is_conv1d else None


class Style(ParallelStyle):
    """A style whose attributes have the names of the arguments."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


class _ShardedLayer(Style):
    """A layer with a sharded weight, which moves inputs and outputs to given layouts."""

    #: The layouts that None stands for.
    _default_input: Placement = Replicate()
    _default_output: Placement = Replicate()

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = _layout(input_layouts, self._default_input)
        self.output_layouts = _layout(output_layouts, self._default_output)
        self.use_local_output = use_local_output

    def _desired_input(self, module: nn.Module) -> Placement:
        """The layout of the input that the sharded weight needs."""
        return Replicate()

    def attach(self, module: nn.Module, axis: MeshAxis) -> None:
        desired, name = self._desired_input(module), type(module).__name__
        # If the input is sharded like the weight, the weight has the size.
        dims = linear_dims(module)
        extent: int | None = None
        weight = module._parameters.get("weight")  # else a parametrization computes it
        if dims is not None and weight is not None and desired == self.input_layouts:
            extent = weight.shape[dims[1]]

        def before(_: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            key = None if inputs else "input"
            if key is not None and key not in kwargs:
                return None  # the layer itself says what is missing
            value = kwargs["input"] if key else inputs[0]
            tensor = axis.annotate(value, self.input_layouts, f"the input of {name}", extent)
            if extent is not None and tensor.ndim and tensor.shape[-1] != extent:
                raise ValueError(_other_features(name, extent, tensor, value, self.input_layouts))
            tensor = axis.move_input(tensor, desired)
            if key:
                return inputs, {**kwargs, key: tensor}
            return (tensor, *inputs[1:]), kwargs

        def after(_: nn.Module, inputs: tuple[Any, ...], output: DTensor) -> Tensor:
            moved = axis.move(output, self.output_layouts)
            return axis.to_local(moved) if self.use_local_output else moved

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)


def _other_features(name: str, extent: int, tensor: DTensor, given: Any, layout: Placement) -> str:
    if given is tensor:
        return f"the input of {name} has {tensor.shape[-1]} features, and the layer takes {extent}"
    return (
        f"{name} takes {extent} features, and the ranks together gave {tensor.shape[-1]}: a plain "
        f"input, here {list(given.shape)}, is taken as this rank's part by {layout}. Where each "
        f"rank has all features, say input_layouts=Replicate(); else let the layer before it be "
        f"ColwiseParallel"
    )


class ColwiseParallel(_ShardedLayer):
    """Each rank computes some output features of an ``nn.Linear`` or an ``nn.Embedding``.

    A Linear's weight and bias are sharded along the rows, an Embedding's weight along the columns.
    The ``Conv1D`` of transformers counts as a Linear with a transposed weight. Forward does not
    communicate; the backward of a Linear reduces the gradient of the input once.

    Args:
        input_layouts: The input's layout along the axis, if it is a plain tensor; None: replicated.
        output_layouts: The output's layout; None: sharded in the last dim, as computed. With sizes,
            as in ``Shard(-1, sizes=(2, 1))``, they also give each rank's number of features.
        use_local_output: Whether the output is the local tensor; else a DTensor.
    """

    _default_output = Shard(-1)

    def parameter_layouts(self, module: nn.Module) -> Mapping[str, Placement]:
        dims = (1, 0) if isinstance(module, nn.Embedding) else linear_dims(module)
        if dims is None:
            raise _unknown(self, module)
        sizes = _sizes_of_last(self.output_layouts)
        return {
            name: Shard(dims[0] if parameter.dim() > 1 else 0, sizes)
            for name, parameter in module.named_parameters(recurse=False)
        }


class RowwiseParallel(_ShardedLayer):
    """Each rank takes some input features of an ``nn.Linear``, or words of an ``nn.Embedding``.

    A Linear's weight is sharded along the columns, an Embedding's along the rows (the vocabulary).
    The output is partial, and is reduced once, unless ``output_layouts`` is ``Partial()``. A
    Linear's bias is replicated, and is added once.

    Args:
        input_layouts: The input's layout along the axis, if it is a plain tensor; None: sharded in
            the last dim, as :class:`ColwiseParallel` gives it. For an Embedding pass
            ``Replicate()`` mostly. With sizes, as in ``Shard(-1, sizes=(2, 1))``, they also give
            each rank's number of a Linear's columns.
        output_layouts: The output's layout; None: replicated.
        use_local_output: Whether the output is the local tensor; else a DTensor.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tilework.mesh import init_device_mesh
        >>> from tilework.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     mlp = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
        ...     plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        ...     return parallelize_module(mlp, mesh, plan)(torch.ones(5, 3)).shape
        >>> run_ranks(2, program)[0]
        torch.Size([5, 3])
    """

    _default_input = Shard(-1)

    def parameter_layouts(self, module: nn.Module) -> Mapping[str, Placement]:
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(0)}
        dims = linear_dims(module)
        if dims is None:
            raise _unknown(self, module)
        weight = Shard(dims[1], _sizes_of_last(self.input_layouts))
        return {"weight": weight} | ({} if module.bias is None else {"bias": Replicate()})

    def _desired_input(self, module: nn.Module) -> Placement:
        if isinstance(module, nn.Embedding):
            return Replicate()
        return Shard(-1, _sizes_of_last(self.input_layouts))


class SequenceParallel(Style):
    """Each rank runs the module on a slice of the sequence: for norms, dropout, and other modules
    that treat each position of the sequence alone.

    Parameters are replicated, and their gradients are reduced together at the end of backward. A
    DTensor input is redistributed to this layout; a plain input counts as the local tensor.

    Args:
        sequence_dim: The dim of the input that is the sequence.
        use_local_output: Whether the output is the local tensor; else a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim, self.use_local_output = sequence_dim, use_local_output

    def parameter_layouts(self, module: nn.Module) -> Mapping[str, Placement]:
        return {name: Replicate() for name, _ in module.named_parameters()}

    def attach(self, module: nn.Module, axis: MeshAxis) -> None:
        name, layout = type(module).__name__, Shard(self.sequence_dim)

        def before(_: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not inputs:
                raise TypeError(
                    f"SequenceParallel takes the first input of {name} as a slice of the sequence, "
                    f"and there are only inputs by name, {list(kwargs)}: pass the first without "
                    f"the name"
                )
            tensor = axis.annotate(inputs[0], layout, f"the input of {name}")
            return (axis.move(tensor, layout), *inputs[1:]), kwargs

        def local(value: Tensor) -> Tensor:
            return axis.to_local(value) if isinstance(value, DTensor) else value

        def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            return replace_tensors(output, local) if self.use_local_output else output

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)


def _layout(layout: Placement | None, default: Placement) -> Placement:
    if layout is None:
        return default
    layout = native_placement(layout)
    if not isinstance(layout, Placement):
        raise TypeError(
            f"a layout is a single placement for the axis, Shard(dim), Replicate() or Partial(). "
            f"Got {layout!r}"
        )
    if isinstance(layout, Shard) and layout.turns > 1:
        raise ValueError(
            f"features of linear layers are not dealt in turns, got {layout!r}: give "
            f"Shard({layout.dim}), or deal a sequence's dim with PrepareModuleInput"
        )
    return layout


def _sizes_of_last(layout: Placement) -> tuple[int, ...] | None:
    """The sizes of the last dim on each rank; None: as ``torch.chunk`` splits the dim."""
    return layout.sizes if isinstance(layout, Shard) and layout.dim == -1 else None


def _unknown(style: ParallelStyle, module: nn.Module) -> NotImplementedError:
    return NotImplementedError(
        f"{type(style).__name__} is for nn.Linear and nn.Embedding (and transformers' Conv1D), not "
        f"{type(module).__name__}: name the layers within it in the plan, or write a ParallelStyle "
        f"of your own"
    )


#: One layout for each value; None for a value that stays as it is.
Layouts = Placement | Sequence[Placement | None]


class _WithoutParameters(Style):
    use_local_output: bool

    def parameter_layouts(self, module: nn.Module) -> Mapping[str, Placement]:
        return {}

    def _prepared(
        self,
        value: Any,
        layouts: tuple[Placement | None, Placement | None],
        axis: MeshAxis,
        what: str,
        move: Callable[[DTensor, Placement], DTensor],
    ) -> Any:
        """A value of a layout as the tensor of the desired layout; as it is without a layout."""
        layout, desired = layouts
        if layout is None:
            return value
        tensor = move(axis.annotate(value, layout, what), desired or layout)
        return axis.to_local(tensor) if self.use_local_output else tensor


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

    Example::

        # Each rank gives rows of the sequence, and the module gets all of them.
        PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
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

        def prepare(value: Any, layouts: tuple[Any, Any], key: int | str) -> Any:
            what = f"input {key!r} of {name}"
            return self._prepared(value, layouts, axis, what, axis.move_input)

        def before(_: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.input_layouts is not None:
                assert self.desired_input_layouts is not None
                _check_count(f"inputs of {name}", inputs, "input_layouts", self.input_layouts)
                layouts = zip(self.input_layouts, self.desired_input_layouts, strict=True)
                inputs = tuple(
                    prepare(value, pair, number)
                    for number, (value, pair) in enumerate(zip(inputs, layouts, strict=True))
                )
            layouts_by_name, desired = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
            named = {
                key: prepare(value, (layouts_by_name.get(key), desired.get(key)), key)
                for key, value in kwargs.items()
            }
            return inputs, named

        module.register_forward_pre_hook(before, with_kwargs=True)


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

        def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            several = isinstance(output, (tuple, list))
            outputs = output if several else (output,)
            _check_count(f"outputs of {name}", outputs, "output_layouts", self.output_layouts)
            pairs = zip(self.output_layouts, self.desired_output_layouts, strict=True)
            prepared = [
                self._prepared(value, pair, axis, f"output {number} of {name}", axis.move)
                for number, (value, pair) in enumerate(zip(outputs, pairs, strict=True))
            ]
            return tuple(prepared) if several else prepared[0]

        module.register_forward_hook(after)


class PrepareModuleInputOutput(_WithoutParameters):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one, with their arguments.

    ``use_local_input`` is the ``use_local_output`` of the former.
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
