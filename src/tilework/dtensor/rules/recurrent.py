"""Recurrent layers: sharded along the batch; time, features and weights are unshardable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilework.dtensor.autograd import local_graph
from tilework.dtensor.debug import causes
from tilework.dtensor.spec import spec_of
from tilework.dtensor.tensor import DTensor, wrap
from tilework.tiled import Arg, Decomposition, Dim, Factor, RuleResult, dtensor_rule, local_call

_vf: Any = torch._VF
_SEQUENCES = (list, tuple)

Dims = Sequence[Factor | Dim | None]


def _as_list(states: Any) -> list[Any]:
    return list(states) if isinstance(states, _SEQUENCES) else [states]


# -- layers ----------------------------------------------------------------------------------


def _layers_rule(kind: str, *args: Any) -> RuleResult:
    """The rule for ``(input, states, weights, …)``, or packed ``(data, sizes, states, …)``."""
    packed = isinstance(args[3], _SEQUENCES)
    data, states, weights, _, count, dropout, train, *_ = args[:1] + args[1 + packed :]
    if dropout > 0 and train and count > 1:
        return Decomposition(partial(_layer_by_layer, getattr(_vf, kind), packed))
    if packed:  # packing makes them replicated
        return None
    batch = Factor(_as_list(states)[0].shape[1], "batch")
    state: Dims = [None, batch, None]
    data_dims = [batch, None, None] if args[-1] else state
    inputs: dict[Arg, Dims] = {data: data_dims, **dict.fromkeys(_as_list(states), state)}
    inputs |= {weight: [None] * weight.ndim for weight in weights}
    return local_call(inputs, [data_dims, *[state] * len(_as_list(states))])


def _layer_by_layer(function: Callable[..., Any], packed: bool, *args: Any) -> tuple[Tensor, ...]:
    """Run a recurrent network by layers, with dropout that is equal in every layout."""
    (x, *sizes), (states, weights, biases, count, dropout, train, both, *first) = (
        args[: 1 + packed],
        args[1 + packed :],
    )
    directions, width = 1 + both, len(weights) // count
    finals = []
    for layer in range(count):
        own = [state[layer * directions : (layer + 1) * directions] for state in _as_list(states)]
        layer_weights = weights[layer * width : (layer + 1) * width]
        state = own if isinstance(states, _SEQUENCES) else own[0]
        if layer > 0:
            x = F.dropout(x, dropout)
        x, *final = function(x, *sizes, state, layer_weights, biases, 1, 0.0, train, both, *first)
        finals.append(final)
    return (x, *[torch.cat(parts) for parts in zip(*finals, strict=True)])


for _kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    dtensor_rule(_kind)(partial(_layers_rule, _kind))


# -- cells -----------------------------------------------------------------------------------


@dtensor_rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _cell(input: Any, hx: Any, *weights: Any) -> RuleResult:
    batch = Factor(input.shape[0], "batch")
    states = _as_list(hx)
    inputs: dict[Arg, Dims] = {arg: [batch, None] for arg in (input, *states)}
    inputs |= {weight: [None] * weight.ndim for weight in weights if weight is not None}
    return local_call(inputs, [[batch, None]] * len(states))


# -- packed sequences ------------------------------------------------------------------------


@dtensor_rule("_pack_padded_sequence")
def _pack(input: Any, lengths: Any, batch_first: bool) -> RuleResult:
    return Decomposition(partial(_on_full_tensors, _vf._pack_padded_sequence), is_checked=True)


@dtensor_rule("_pad_packed_sequence")
def _pad(data: Any, batch_sizes: Any, *args: Any) -> RuleResult:
    return Decomposition(partial(_on_full_tensors, _vf._pad_packed_sequence), is_checked=True)


def _on_full_tensors(function: Callable[..., Any], first: Tensor, sizes: Tensor, *args: Any) -> Any:
    """Gather the sequences, and run ``function`` on full tensors: torch must read the lengths."""
    if not isinstance(first, DTensor):
        assert isinstance(sizes, DTensor)
        return function(first, sizes.full_tensor(), *args)
    if not first._spec.is_replicated:
        causes.warn_gather(function.__name__, [first._spec], [first.dtype])
    full = first.redistribute(placements=first._spec.replicated.placements)
    if isinstance(sizes, DTensor):
        sizes = sizes.full_tensor()
    data, sizes = function(local_graph.local_of(full), sizes, *args)
    return wrap(data, spec_of(full.device_mesh, full.placements, data.shape)), sizes
