"""Tensor parallel plans derived from a model's forward, with the price of each decision in bytes.

Some layers give features or heads that all operators carry along to layers which sum over them. The
former are cut by columns, the latter by rows, and only one all_reduce of each output of the latter
moves data. Any other layer is cut alone, with a gathered output, if that saves a rank more bytes
than it receives. The same holds for stacks of matrices, such as experts, if products in their
module sum over a dim. Everything else is whole on each rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tilework.comm.world import get_rank, get_world_size
from tilework.dtensor import DTensor, init_device_mesh
from tilework.layout import Replicate, Shard
from tilework.mesh import DeviceMesh
from tilework.mesh.internal import mesh_or_current
from tilework.models import check_is_module
from tilework.parallel.tensor_parallel.dim_sets import DimSet, Layer, Trace, trace
from tilework.parallel.tensor_parallel.plans import parallelize_module
from tilework.parallel.tensor_parallel.styles import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    linear_dims,
)
from tilework.parallel.tensor_parallel.words import WholeOutput
from tilework.show import bytes_text


@dataclass(frozen=True)
class LayerDecision:
    """The decision to cut some layers, or to leave them whole, with the reason.

    Attributes:
        styles: The styles of modules, by name; empty if they stay whole.
        saved_bytes: The bytes of parameters and activations that a rank need not hold.
        moved_bytes: The bytes that a rank receives in a forward.
        text: The decision in words.
    """

    styles: Mapping[str, ParallelStyle]
    saved_bytes: int
    moved_bytes: int
    text: str


class DerivedPlan(dict[str, ParallelStyle]):
    """A plan for :func:`parallelize_module`, which prints the reasons.

    ``decisions`` are in the order of the model; ``ranks`` is the number that the plan is for.
    """

    def __init__(self, decisions: list[LayerDecision], ranks: int) -> None:
        super().__init__({n: style for each in decisions for n, style in each.styles.items()})
        self.decisions, self.ranks = decisions, ranks

    @property
    def moved_bytes(self) -> int:
        """The bytes that a rank receives in a forward."""
        return sum(each.moved_bytes for each in self.decisions)

    def __str__(self) -> str:
        merged: dict[str, int] = {}
        for each in self.decisions:
            text = _pattern(each.text)
            merged[text] = merged.get(text, 0) + 1
        lines = [f"{text}{f' ({n} times)' if n > 1 else ''}" for text, n in merged.items()]
        total = f"in all a rank receives {bytes_text(self.moved_bytes)} in a forward"
        return "\n".join([f"tensor parallel over {self.ranks} ranks:", *lines, total])


def derive_plan(
    model: nn.Module,
    device_mesh: DeviceMesh | None = None,
    example: Mapping[str, Any] | tuple[Any, ...] | None = None,
) -> DerivedPlan:
    """The tensor parallel plan that the operators of a model allow. Local.

    One forward is followed, without memory (on ``meta``) unless the model reads values; the model's
    parameters may be on ``meta``. Layers with features that all operators carry along to layers
    which sum over them become ColwiseParallel, the latter RowwiseParallel. Between them tensors are
    DTensors: the model's results do not depend on the plan. Any other layer is cut alone, with a
    gathered output, if that saves more bytes than it moves; so are stacks of matrices, such as
    experts, where products sum over a dim.

    Args:
        model: The model, whole and the same on all ranks.
        device_mesh: A mesh of one axis; None: the innermost of ``with mesh:``, or all ranks.
        example: The arguments of a forward, by name or in order: their sizes decide what pays.
            None: the model's ``dummy_inputs``, as Hugging Face's models have them.

    Raises:
        TypeError: The model has DTensors, or no example is known.
        ValueError: The mesh has several axes.

    Example::

        print(derive_plan(model, mesh, (tokens,)))
    """
    check_is_module(model, "derive_plan")
    if any(isinstance(each, DTensor) for each in (*model.parameters(), *model.buffers())):
        raise TypeError(
            f"{type(model).__name__} has DTensors already: derive_plan takes a model of plain "
            f"tensors: call it before parallelize_module and fully_shard"
        )
    mesh = _mesh(device_mesh)
    traced = trace(model, _example(model, example), mesh)
    return DerivedPlan(list(_Deciding(model, traced, mesh.size()).decisions()), mesh.size())


def parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh | None = None,
    example: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Make a model tensor parallel, in place, without a plan: with the plan of :func:`derive_plan`.

    Collective over the mesh; blocks. The mesh's first rank prints what was decided and why. The
    arguments and errors are those of :func:`derive_plan`; ``src_data_rank`` is as for
    :func:`~tilework.dtensor.distribute_tensor`.

    Example::

        parallelize(model, mesh, {"input_ids": tokens})
    """
    mesh = _mesh(device_mesh)
    plan = derive_plan(model, mesh, example)
    if get_rank() == mesh.spec.ranks[0]:
        print(plan, flush=True)
    return parallelize_module(model, mesh, plan, src_data_rank=src_data_rank)


def _mesh(given: DeviceMesh | None) -> DeviceMesh:
    if given is None:
        try:
            given = mesh_or_current(None)
        except RuntimeError:
            given = init_device_mesh("cpu", (get_world_size(),))
    mesh = mesh_or_current(given)
    if mesh.ndim != 1:
        raise ValueError(f"a plan is for one axis, and {mesh} has {mesh.ndim}: pass mesh['tp']")
    return mesh


def _example(model: nn.Module, given: Any) -> Any:
    if given is None:
        given = getattr(model, "dummy_inputs", None)
    if not isinstance(given, Mapping | tuple):
        raise TypeError(
            f"example must be a dict of arguments by name, or a tuple of arguments, for a forward "
            f"of {type(model).__name__}, got {type(given).__name__}"
        )
    return given


class _Deciding:
    """Decides for each layer of a model if and how the layer is cut."""

    def __init__(self, model: nn.Module, traced: Trace, ranks: int) -> None:
        self._model, self._trace, self._ranks = model, traced, ranks
        self._layers: dict[int, list[Layer]] = {}  # by weight
        for layer in traced.layers:
            if layer not in self._layers.setdefault(layer.weight, []):
                self._layers[layer.weight].append(layer)
        self._decided: set[int] = set()  # weights
        self._stacked: set[int] = set()  # parameters of no layer that are cut
        self._of_name = {name: number for number, name in traced.parameters.items()}

    def decisions(self) -> Iterator[LayerDecision]:
        """All decisions: cuts that layers share, the cheapest first, then single layers."""
        made: dict[int, LayerDecision] = {}
        chains = [each for each in map(self._chain, self._dim_sets()) if each is not None]
        chains.sort(key=lambda each: each[1].moved_bytes / max(1, each[1].saved_bytes))
        for weights, decision in chains:
            if self._decided.isdisjoint(weights):
                self._decided |= weights
                made[min(weights)] = decision
        for weight, layers in self._layers.items():
            if weight not in self._decided:
                made[weight] = self._alone(weight, layers)
        for name, module in self._model.named_modules():
            stacks = self._stacks(name, module)
            if stacks is not None:
                made[stacks[0]] = stacks[1]
        yield from (made[at] for at in sorted(made))
        if rest := self._rest():
            yield LayerDecision({}, 0, 0, f"whole, as they are of no layer: {rest}")

    def _dim_sets(self) -> list[DimSet]:
        found: dict[int, DimSet] = {}
        for weight in self._layers:
            for dim in range(2):
                each = self._trace.set_of(weight, dim)
                found[id(each)] = each
        return list(found.values())

    # -- layers that share a cut -----------------------------------------------------------------

    def _chain(self, dims: DimSet) -> tuple[set[int], LayerDecision] | None:
        """The weights of the layers that a cut of ``dims`` runs through, and the decision."""
        if dims.whole_for or any(size % self._ranks for size in dims.sizes):
            return None
        columns, rows = self._ends(dims)
        names = {each.name or "the model" for each in rows}
        if not columns or not rows or not names.issuperset(dims.sums.values()):
            return None
        both = [*columns, *rows]
        if any(len(self._layers[each.weight]) > 1 for each in both):
            return None
        styles: dict[str, ParallelStyle] = {
            each.name: ColwiseParallel(use_local_output=False) for each in columns
        }
        styles |= {each.name: RowwiseParallel() for each in rows}
        saved = self._less(sum(map(self._trace.nbytes, self._held(dims))))
        moved = sum(2 * self._less(self._trace.nbytes(each.output)) for each in rows)
        text = (
            f"{_listed(columns)} by columns, {_listed(rows)} by rows: a rank holds "
            f"{bytes_text(saved)} less, receives {bytes_text(moved)}"
        )
        return {each.weight for each in both}, LayerDecision(styles, saved, moved, text)

    def _held(self, dims: DimSet) -> set[int]:
        numbers = {number for number, _ in dims.nodes}
        return numbers - self._trace.made_of_parameters

    def _ends(self, dims: DimSet) -> tuple[list[Layer], list[Layer]]:
        columns, rows = [], []
        for weight, layers in self._layers.items():
            for layer in layers:
                out, into = linear_dims(layer.module) or (1, None)  # for an Embedding
                if self._trace.set_of(weight, out) is dims:
                    columns.append(layer)
                elif into is not None and self._trace.set_of(weight, into) is dims:
                    rows.append(layer)
        return columns, rows

    # -- single layers --------------------------------------------------------------------

    def _alone(self, weight: int, layers: list[Layer]) -> LayerDecision:
        """The decision on a weight without a shared cut: the cheaper of two cuts, if one pays."""
        shape = self._trace.tensors[weight].shape
        saved = self._less(self._trace.nbytes(weight))
        moved, dim = min((self._moved(layers, dim), dim) for dim in range(2))
        names = _listed(layers)
        why = self._why(weight, layers)
        if moved >= saved or shape[dim] < self._ranks:
            text = f"{names} whole, as {why}, and a rank would hold {bytes_text(saved)} less, but "
            return LayerDecision(
                {}, 0, 0, f"{text}receive {bytes_text(moved)}, for a cut by itself"
            )
        styles = {layer.name: self._style(layer, dim) for layer in layers}
        ends = {"gathered" if _out_dim(layer) == dim else "summed" for layer in layers}
        text = f"{names} by itself, as {why}, the output {' or '.join(sorted(ends))}: a rank holds "
        text += f"{bytes_text(saved)} less, receives {bytes_text(moved)}"
        return LayerDecision(styles, saved, moved, text)

    def _moved(self, layers: list[Layer], dim: int) -> int:
        """The bytes that a rank receives where a dim of the layers' weight is cut."""
        gathered = [self._less(self._trace.nbytes(each.output)) for each in layers]
        return sum(
            nbytes if _out_dim(layer) == dim else 2 * nbytes
            for layer, nbytes in zip(layers, gathered, strict=True)
        )

    def _style(self, layer: Layer, dim: int) -> ParallelStyle:
        if _out_dim(layer) == dim:
            return ColwiseParallel(output_layouts=Replicate())
        return RowwiseParallel(input_layouts=Replicate())

    def _why(self, weight: int, layers: list[Layer]) -> str:
        """The reason, in words, why layers that share a cut do not include these layers."""
        dims = self._trace.set_of(weight, _out_dim(layers[0]))
        uneven = [size for size in sorted(dims.sizes) if size % self._ranks]
        if not dims.whole_for and uneven:
            return f"{uneven[0]} parts are not divisible by {self._ranks}"
        return f"{dims.whole_for} needs all of it" if dims.whole_for else "no layer sums over it"

    # -- stacks of matrices ----------------------------------------------------------------------

    def _stacks(self, name: str, module: nn.Module) -> tuple[int, LayerDecision] | None:
        """The cut of parameters of more than two dims, such as experts; None if it does not pay."""
        layouts: dict[str, Shard] = {}
        numbers, sums = [], set[int]()
        for own, parameter in module.named_parameters(recurse=False):
            number = self._of_name.get(f"{name}.{own}" if name else own)
            choices = [] if number is None else self._sums_of(number, parameter.dim(), name)
            if number is not None and choices:
                moved, dim, summed = min(choices)
                if moved < self._less(self._trace.nbytes(number)):
                    layouts[own] = Shard(dim)
                    numbers.append(number)
                    sums |= set(summed)
        if not layouts:
            return None
        self._stacked |= set(numbers)
        saved = self._less(sum(map(self._trace.nbytes, numbers)))
        moved = self._received(sums)
        dims = ", ".join(f"{own} by dim {layout.dim}" for own, layout in layouts.items())
        text = f"{name or 'the model'}: {dims}, products summed: a rank holds "
        text += f"{bytes_text(saved)} less, receives at most {bytes_text(moved)}"
        return min(numbers), LayerDecision({name: WholeOutput(layouts)}, saved, moved, text)

    def _sums_of(self, number: int, dims: int, name: str) -> list[tuple[int, int, list[int]]]:
        """For each dim of a parameter that may be cut: bytes received, the dim, and the sums."""
        found = []
        for dim in range(dims if dims > 2 else 0):
            cut = self._trace.set_of(number, dim)
            uneven = any(size % self._ranks for size in cut.sizes)
            if cut.sums and not (cut.whole_for or uneven) and {*cut.sums.values()} == {name}:
                found.append((self._received(cut.sums), dim, list(cut.sums)))
        return found

    def _received(self, sums: Iterable[int]) -> int:
        return sum(2 * self._less(self._trace.nbytes(each)) for each in sums)

    def _rest(self) -> str:
        inside = {each.name for layers in self._layers.values() for each in layers}
        stacked = {self._trace.parameters[number] for number in self._stacked}
        sizes: dict[str, int] = {}
        for name, module in self._model.named_modules():
            for own, each in module.named_parameters(recurse=False):
                full_name = f"{name}.{own}" if name else own
                if name not in inside and full_name not in stacked:
                    pattern = _pattern(full_name)
                    nbytes = each.numel() * each.element_size()
                    sizes[pattern] = sizes.get(pattern, 0) + nbytes
        largest = sorted(sizes, key=lambda name: -sizes[name])
        texts = [f"{name} ({bytes_text(sizes[name])})" for name in largest[:4]]
        left = sum(sizes[name] for name in largest[4:])
        return ", ".join([*texts, *([f"others ({bytes_text(left)})"] if left else [])])

    def _less(self, nbytes: int) -> int:
        return nbytes * (self._ranks - 1) // self._ranks


def _out_dim(layer: Layer) -> int:
    """The dim of a weight that becomes the last dim of the output."""
    return (linear_dims(layer.module) or (1, 0))[0]


def _pattern(text: str) -> str:
    """A name with ``*`` for the numbers within."""
    return re.sub(r"(\.|\b)\d+(?=\.[A-Za-z_\[])", r"\1*", text)


def _listed(layers: list[Layer]) -> str:
    """The layers' names, with common parts only once."""
    names = [layer.name or "the model" for layer in layers]
    if len(names) == 1:
        return names[0]
    owner = names[0].rpartition(".")[0]
    if owner and all(name.startswith(f"{owner}.") for name in names):
        return f"{owner}.[{', '.join(name.removeprefix(f'{owner}.') for name in names)}]"
    return ", ".join(names)
