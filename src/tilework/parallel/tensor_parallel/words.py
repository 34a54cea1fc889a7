"""Plans in the words of Hugging Face's configurations: ``{"layers.*.mlp.up_proj": "colwise"}``.

There a word stands for layouts and for the communication around a module whose tensors are plain.
Here sharded parameters are DTensors, which communicate as a module needs, and gradients of plain
tensors that meet ranks' parts are summed. Words that only repair gradients therefore do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from tilework.dtensor import DTensor
from tilework.layout import Placement, Replicate, Shard
from tilework.models import close_names, matching_names
from tilework.parallel.data_parallel.outputs import replace_tensors
from tilework.parallel.tensor_parallel.axis import MeshAxis
from tilework.parallel.tensor_parallel.experts import ExpertParallel
from tilework.parallel.tensor_parallel.styles import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    Style,
)


class _OfParameters(Style):
    """A style that lays out a module's direct parameters, by name, and no inputs or outputs.

    Without layouts it does nothing: for words that only replicate parameters or repair gradients.
    """

    def __init__(self, layouts: Mapping[str, Placement] | None = None) -> None:
        self.layouts = dict(layouts or {})

    def parameter_layouts(self, module: nn.Module) -> Mapping[str, Placement]:
        return self.layouts

    def attach(self, module: nn.Module, axis: MeshAxis) -> None:
        """Do nothing: the module computes with DTensors."""


class WholeOutput(_OfParameters):
    """A style of modules that compute with DTensor parameters and return full plain tensors."""

    def attach(self, module: nn.Module, axis: MeshAxis) -> None:
        def whole(value: Tensor) -> Tensor:
            if isinstance(value, DTensor):
                return axis.to_local(axis.move(value, Replicate()))
            return value

        def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            return replace_tensors(output, whole)

        module.register_forward_hook(after)


class _LocalParameters(_OfParameters):
    """A style of modules that compute with the local tensors of their direct parameters."""

    def attach(self, module: nn.Module, axis: MeshAxis) -> None:
        # A deep copy of the module has the same hooks: they act on the module that calls them.
        def before(caller: nn.Module, inputs: tuple[Any, ...]) -> None:
            for name, parameter in caller.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):  # attribute access looks in __dict__ first
                    caller.__dict__[name] = axis.to_local(parameter)

        def after(caller: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
            for name in caller._parameters:
                caller.__dict__.pop(name, None)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)


#: The words, and the styles of modules that they stand for.
WORDS: Mapping[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": ColwiseParallel(output_layouts=Replicate()),
    # A fused layer's output is a DTensor, which is gathered where the model splits it.
    "packed_colwise": ColwiseParallel(use_local_output=False),
    "packed_rowwise": RowwiseParallel(),
    "sequence_parallel": SequenceParallel(use_local_output=True),
    "moe_tp_experts": WholeOutput(),
    "all_reduce": WholeOutput(),
    "local_params": _LocalParameters(),
    "replicate": _OfParameters(),
    "replicated_with_grad_allreduce": _OfParameters(),
    "ep_dispatch_experts": ExpertParallel("replicate"),
    "grouped_gemm": _OfParameters(),  # the style of the module lays out these parameters
    "mla_kv_a_proj": _OfParameters(),
    "moe_identity_expert": _OfParameters(),
}
_BY_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
_BY_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")


def style_of(word: str, name: str = "") -> ParallelStyle:
    """The style of modules for a word; ValueError for unknown words, with the name in the plan."""
    if word not in WORDS:
        near = "".join(f": did you mean {each!r}?" for each in close_names(word, WORDS)[:1])
        raise ValueError(
            f"{word!r}, which the plan says of {name!r}, is not a word of such plans{near}\n"
            f"The words are: {', '.join(WORDS)}. tilework does not take plans of expert "
            f"parallelism: give the model's tp_plan"
        )
    return WORDS[word]


def named_parameters(
    root: nn.Module, pattern: str, word: str
) -> Iterator[tuple[str, nn.Module, ParallelStyle]]:
    """The parameters that ``pattern`` names with a word: the owning module's name, the module, and
    a style.

    A parameter named directly is a matrix, or a stack of matrices, in the form of a Linear's weight
    (outputs, inputs). Parameters of one dim are sharded like the outputs.
    """
    owners, _, wanted = pattern.rpartition(".")
    modules = dict(root.named_modules())
    for owner in matching_names(owners, modules):
        module = modules[owner]
        for name in matching_names(wanted, module._parameters):
            parameter = module._parameters[name]
            if parameter is not None and word in (*_BY_COLUMNS, *_BY_ROWS):
                layout = _layout(word, name, parameter.dim())
                yield owner, module, _OfParameters({name: layout})
            elif parameter is not None:
                yield owner, module, _OfParameters()


def _layout(word: str, name: str, dims: int) -> Placement:
    if word in _BY_COLUMNS:
        return Shard(max(dims - 2, 0))
    whole = name == "bias" or (dims == 1 and word == "packed_rowwise")
    return Replicate() if whole else Shard(dims - 1)
