"""The local tensors that an operator runs on: the inputs', redistributed where necessary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilework.dtensor.autograd import expanded_grads, local_graph, partial_grads
from tilework.dtensor.debug import causes
from tilework.dtensor.dispatch.results import replicated
from tilework.dtensor.local_function import as_inference
from tilework.dtensor.propagation.op_sharding import OpSharding
from tilework.dtensor.provenance.digests import digest_of
from tilework.dtensor.provenance.meaning import Moved
from tilework.dtensor.redistribution.redistribute import redistribute_local
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.dtensor.tensor import DTensor
from tilework.mesh import DeviceMesh


def local_inputs(
    sharding: OpSharding, tensors: Sequence[Tensor], mesh: DeviceMesh, operator: str
) -> list[Tensor]:
    """The inputs' local tensors in the sharding's layouts. Collective if some have to move."""
    graded = torch.is_grad_enabled()
    locals_ = []
    for tensor, layout in zip(tensors, sharding.inputs, strict=True):
        if tensor.__class__ is not DTensor:
            if layout is None:
                locals_.append(tensor)
                continue
            tensor = replicated(tensor, mesh)
        assert isinstance(tensor, DTensor)
        if layout is not None:
            locals_.append(_moved(tensor, *layout, operator))
        elif graded and tensor._made_without_grad:
            locals_.append(local_graph.local_of(tensor))
        else:
            locals_.append(tensor._local_tensor)
    return locals_


def _expanded_dims(tensor: DTensor, target: DTensorSpec) -> Ints:
    local = local_graph.local_of(tensor)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return ()
    return expanded_grads.expanded_dims(local, tensor._spec, target)


def _moved(tensor: DTensor, target: DTensorSpec, axes: Ints, operator: str) -> Tensor:
    """The local tensor in another layout, or with a gradient that is partial along ``axes``."""
    source = tensor._spec
    if target is source or target == source:
        local = partial_grads.alias(tensor, axes)
    elif dims := _expanded_dims(tensor, target):
        local = expanded_grads.shard_expanded(tensor, target, axes, dims, operator)
    elif axes:
        local = partial_grads.redistribute_with_partial_grad(tensor, target, axes, operator)
    else:
        local = local_graph.local_of(tensor)
        local = redistribute_local(local, source, target, of=Moved(digest_of(tensor), operator))
    if torch.is_grad_enabled() and tensor._local_tensor.is_inference():
        local = as_inference(local)
    if causes.watchers:
        causes.tag_gradient(local)
    return local
