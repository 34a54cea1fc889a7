"""Names that the other packages of tilework use, besides the public names."""

from tilework.dtensor.autograd.local_graph import local_of
from tilework.dtensor.autograd.partial_grads import route_partial_grads
from tilework.dtensor.base import (
    defer_grad,
    deferred_grad,
    forget_grad,
    given_digest,
    layout_of,
    local_tensor_of,
    wrap_as,
    writes_beside,
)
from tilework.dtensor.from_local import sizes_along
from tilework.dtensor.local_function import torch_apply
from tilework.dtensor.part_cuts import Cut, CutLayer, cut_of
from tilework.dtensor.propagation.dtensor_call import (
    content_hash,
    replicated_spec,
    tensors_in,
    unseen,
    without_override_checks,
)
from tilework.dtensor.propagation.op_sharding import (
    AskedCall,
    DTensorArg,
    PlacedCall,
    ask,
    carried_dims,
)
from tilework.dtensor.provenance.content import hash_of, mode
from tilework.dtensor.provenance.digests import call_counts_of, carried, digest_of, stable_digest
from tilework.dtensor.provenance.replicas import compare_plain, content_of, note_input, note_output
from tilework.dtensor.rank_part import RankPart, as_rank_part, plain_of
from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.dtensor.tensor import empty_local, wrap
from tilework.dtensor.torch_tensors import is_torch_dtensor, refuse_torch_dtensor
from tilework.dtensor.tracing import NOT_TRACED
from tilework.dtensor.views.places import is_shared, is_shown_elsewhere
