"""The dims of a model's tensors that have to be cut together, found in one forward.

Each operator's factor map (:mod:`~tilework.tiled.factors`) says which dims of the tensors run over
the same loop, and are therefore cut together. Joined over all operators of a forward this gives
sets of dims: the features between two layers of an MLP, the heads of an attention. If a set is cut,
each rank computes a share, and data moves only where the set ends: in a sum over it, or in an
operator that needs the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from tilework.comm.per_call.internal import lacks_memory
from tilework.dtensor.internal import (
    AskedCall,
    DTensorArg,
    PlacedCall,
    ask,
    carried_dims,
    replicated_spec,
    tensors_in,
    without_override_checks,
)
from tilework.mesh import DeviceMesh
from tilework.parallel.tensor_parallel.styles import linear_dims
from tilework.tiled import Decomposition, DimFactors, Factor, LocalCall, RuleResult, find

#: A dim of a tensor: the numbers of the tensor and of the dim.
Node = tuple[int, int]


@dataclass(eq=False)
class DimSet:
    """Dims that are cut together.

    Attributes:
        nodes: The dims.
        sizes: The counts of equal parts that operators need, such as features and heads.
        sums: The products with parameters that sum over the dims: by the number of the result, the
            name of the module that computes it.
        whole_for: An operator that needs all of the dims; empty: none does.
    """

    nodes: set[Node] = field(default_factory=set)
    sizes: set[int] = field(default_factory=set)
    sums: dict[int, str] = field(default_factory=dict)
    whole_for: str = ""

    def take(self, other: DimSet) -> None:
        self.nodes |= other.nodes
        self.sizes |= other.sizes
        self.sums |= other.sums
        self.whole_for = self.whole_for or other.whole_for


@dataclass(frozen=True)
class Layer:
    """A call of a Linear, an Embedding or a Conv1D. The weight, which modules may share, and the
    output are numbers in the :class:`Trace`.
    """

    name: str
    module: nn.Module
    weight: int
    output: int


class Trace:
    """The tensors, by number, and the layers of a forward, and the dims that are cut together."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.parameters: dict[int, str] = {}
        self.made_of_parameters: set[int] = set()
        self.layers: list[Layer] = []
        self._numbers: dict[int, int] = {}
        self._sets: dict[Node, DimSet] = {}

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor, which is kept alive so that no other gets its id."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]

    def set_of(self, number: int, dim: int) -> DimSet:
        """The set of dims that are cut together with a dim of the tensor of this number."""
        node = (number, dim)
        if node not in self._sets:
            self._sets[node] = DimSet({node})
        return self._sets[node]

    def join(self, nodes: list[Node]) -> DimSet:
        sets = [self.set_of(*node) for node in nodes]
        first = max(sets, key=lambda each: len(each.nodes))
        for other in sets:
            if other is not first and self._sets[next(iter(other.nodes))] is other:
                first.take(other)
                self._sets.update(dict.fromkeys(other.nodes, first))
        return first

    def need_whole(self, node: Node, who: str) -> None:
        found = self.set_of(*node)
        found.whole_for = found.whole_for or who

    def is_of_parameters(self, number: int) -> bool:
        """True for a parameter, and for results computed from parameters only."""
        return number in self.parameters or number in self.made_of_parameters

    def nbytes(self, number: int) -> int:
        return self.tensors[number].numel() * self.tensors[number].element_size()


def trace(
    model: nn.Module, example: Mapping[str, Any] | tuple[Any, ...], mesh: DeviceMesh
) -> Trace:
    """Run a forward of a model, and record which dims of tensors have to be cut together. Local.

    The forward runs without memory, on ``meta``, if the model can; else with the model's values.
    The model has no DTensors; the mesh has one axis.
    """
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (example, {})
    contents = [*model.parameters(), *model.buffers()]
    try:
        moved = _on_meta(args), _on_meta(kwargs)
        return _traced(_with_tensors(model, map(_on_meta, contents)), mesh, *moved)
    except Exception:  # the model reads values
        if any(map(lacks_memory, contents)):
            raise
        return _traced(_with_tensors(model, contents), mesh, args, kwargs)


def _with_tensors(model: nn.Module, tensors: Iterable[Tensor]) -> nn.Module:
    """A copy of a model, which ranks may share, with ``tensors`` as parameters and buffers."""
    theirs = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, dict(zip(map(id, theirs), tensors, strict=True)))


def _on_meta(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().to("meta"), requires_grad=False)
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: _on_meta(each) for name, each in value.items()}
    return tuple(map(_on_meta, value)) if isinstance(value, tuple | list) else value


def _traced(
    model: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Trace:
    recorder = _Recorder(mesh)
    hooks = recorder.follow(model)
    try:
        with torch.no_grad(), recorder:
            output = model.eval()(*args, **kwargs)  # without dropout
    finally:
        for hook in hooks:  # else tensors of the forward stay until garbage is collected
            hook.remove()
    made = recorder.trace
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor):
            for dim in range(tensor.dim()):
                made.need_whole((made.number(tensor), dim), "who calls the model")
    return made


class _Recorder(TorchFunctionMode):
    """Asks the rule of each operator in a forward, and joins the dims of each factor."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.trace = Trace()
        self._mesh = mesh
        self._within: list[str] = []

    # -- modules -----------------------------------------------------------------------------

    def follow(self, model: nn.Module) -> list[RemovableHandle]:
        """Register hooks that note which module computes, and the weights and outputs of layers."""
        hooks = []
        for name, module in model.named_modules():
            hooks += [
                module.register_forward_pre_hook(lambda m, _, n=name: self._enter(n, m)),
                module.register_forward_hook(self._leave),
            ]
        return hooks

    def _enter(self, name: str, module: nn.Module) -> None:
        self._within.append(name)
        with torch._C.DisableTorchFunction():
            for own, parameter in module._parameters.items():
                if parameter is not None:
                    full_name = f"{name}.{own}" if name else own
                    self.trace.parameters.setdefault(self.trace.number(parameter), full_name)

    def _leave(self, module: nn.Module, inputs: object, output: Any) -> None:
        name = self._within.pop()
        with torch._C.DisableTorchFunction():
            is_layer = linear_dims(module) or isinstance(module, nn.Embedding)
            if is_layer and isinstance(output, Tensor):
                weight: Any = module.weight
                numbers = self.trace.number(weight), self.trace.number(output)
                self.trace.layers.append(Layer(name, module, *numbers))

    # -- operators ---------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in([*args, *kwargs.values()])
        if not tensors:
            return func(*args, **kwargs)
        entry, _ = find(func)
        call = AskedCall(args, kwargs, self._arguments(tensors))
        rule, result = ask(entry, call)
        within = without_override_checks(func) if result is None else None
        if isinstance(result, Decomposition):
            within = result.run
        if within is not None:
            try:
                with self:
                    return within(*args, **kwargs)
            except Exception:  # the rule needs sharded tensors
                result = None
        output = func(*args, **kwargs)
        outputs = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        where = f"{entry.name} in {self._within[-1] or 'the model'}" if self._within else entry.name
        if outputs:
            self._note(result, tensors, outputs, where)
            if isinstance(result, PlacedCall):
                self._probe(rule, call, tensors, outputs, where)
        return output

    def _note(
        self, result: RuleResult, tensors: list[Tensor], outputs: list[Tensor], where: str
    ) -> None:
        if isinstance(result, PlacedCall):
            return
        if (
            isinstance(result, LocalCall)
            and len(result.map.inputs) == len(tensors)
            and len(result.map.outputs) == len(outputs)
        ):
            _Factors(self.trace, where).join(result, tensors, outputs)
            return
        for tensor in tensors:
            self._whole(tensor, where)

    def _whole(self, tensor: Tensor, where: str) -> None:
        number = self.trace.number(tensor)
        for dim in range(tensor.dim()):
            self.trace.need_whole((number, dim), where)

    def _arguments(self, tensors: list[Tensor]) -> list[DTensorArg]:
        with torch._C.DisableTorchFunction():
            return [
                DTensorArg(number, replicated_spec(tensor, self._mesh), tensor.dtype)
                for number, tensor in enumerate(tensors)
            ]

    def _probe(
        self, rule: Any, call: AskedCall, tensors: list[Tensor], outputs: list[Tensor], where: str
    ) -> None:
        """Join the dims of a call whose rule gives no factor map."""
        for at, tensor in enumerate(tensors):
            for dim in range(tensor.dim()):
                node = self.trace.number(tensor), dim
                to = carried_dims(rule, call, at, dim)
                if to is None or len(to) != len(outputs) or tensor.shape[dim] % self._mesh.size():
                    self.trace.need_whole(node, where)
                else:
                    ends = [
                        (self.trace.number(out), end)
                        for out, (end, _) in zip(outputs, to, strict=True)
                    ]
                    self.trace.join([node, *ends]).sizes.add(tensor.shape[dim])


class _Factors:
    """Joins the dims of one operator call, by the factor map of the operator."""

    def __init__(self, trace: Trace, where: str) -> None:
        self._trace, self._where = trace, where
        self._inputs: dict[Factor, list[Node]] = {}
        self._outputs: dict[Factor, list[Node]] = {}
        self._inner: set[Factor] = set()

    def join(self, call: LocalCall, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        for tensor, dims in zip(tensors, call.map.inputs, strict=True):
            self._add(tensor, dims, self._inputs, is_input=True)
        for tensor, dims in zip(outputs, call.map.outputs, strict=True):
            self._add(tensor, dims, self._outputs, is_input=False)
        numbers = [self._trace.number(each) for each in outputs]
        if all(self._trace.is_of_parameters(self._trace.number(each)) for each in tensors):
            self._trace.made_of_parameters.update(numbers)
        for factor, nodes in self._inputs.items():
            ends = self._outputs.get(factor, [])
            in_each = len({number for number, _ in ends}) == len(call.map.outputs)
            is_sum = not ends and factor.reduce_op == "sum" and self._has_parameter(nodes)
            if self._is_needed_whole(factor, nodes) or not (in_each or is_sum):
                for node in nodes:
                    self._trace.need_whole(node, self._where)
                continue
            found = self._trace.join([*nodes, *ends])
            found.sizes.add(factor.size)
            if is_sum:
                module = self._where.partition(" in ")[2]
                found.sums.update(dict.fromkeys(numbers, module))

    def _add(
        self, tensor: Tensor, dims: DimFactors, uses: dict[Factor, list[Node]], is_input: bool
    ) -> None:
        number = self._trace.number(tensor)
        for dim, factors in enumerate(dims):
            sized = [factor for factor in factors if factor.size != 1]
            if sized:
                uses.setdefault(sized[0], []).append((number, dim))
                self._inner.update(sized[1:])
            elif is_input and tensor.shape[dim] != 1:
                self._trace.need_whole((number, dim), self._where)

    def _is_needed_whole(self, factor: Factor, nodes: list[Node]) -> bool:
        twice = len({number for number, _ in nodes}) < len(nodes)
        return factor.unshardable or factor in self._inner or twice

    def _has_parameter(self, nodes: list[Node]) -> bool:
        return any(self._trace.is_of_parameters(number) for number, _ in nodes)
