"""Post-local SGD: averages over all ranks at first, later only within a subgroup.

T. Lin, S. U. Stich, K. K. Patel, M. Jaggi, *Don't Use Large Mini-Batches, Use Local SGD*,
ICLR 2020.
"""

from __future__ import annotations

from tilework.comm.per_call.internal import refuse_count
from tilework.comm.world import AnyGroup
from tilework.parallel.comm_hooks.bucket import GradBucket
from tilework.parallel.comm_hooks.debugging_hooks import noop_hook
from tilework.parallel.comm_hooks.default_hooks import BucketFuture, allreduce_hook


class PostLocalSGDState:
    """Settings of :func:`post_localSGD_hook`.

    Args:
        process_group: All ranks; None: the default group.
        subgroup: The ranks among which gradients are averaged later, such as those of one host;
            None: this rank alone.
        start_localSGD_iter: The first step that averages within the subgroup only.
        post_local_gradient_allreduce: False: later steps do not average at all.
    """

    def __init__(
        self,
        process_group: AnyGroup,
        subgroup: AnyGroup,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group, self.subgroup = process_group, subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> BucketFuture:
    """The average of a bucket over all ranks, or, in later steps, within the subgroup. Collective.

    Average the parameters themselves now and then: see ``tilework.parallel.PeriodicModelAverager``.
    """
    refuse_count("post_localSGD_hook")
    is_global = state.iter < state.start_localSGD_iter
    state.iter += bucket.is_last()
    if is_global:
        return allreduce_hook(state.process_group, bucket)
    if state.post_local_gradient_allreduce and state.subgroup is not None:
        return allreduce_hook(state.subgroup, bucket)
    return noop_hook(None, bucket)
