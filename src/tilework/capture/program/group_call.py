"""A collective as an instruction of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilework.comm.contract import Options, ProcessGroup, Work

#: By method: the name of the operation on the fast path, and the names of the arguments for input
#: and output. Operations without a fast path run by the method.
_FAST: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "allreduce": ("all_reduce", lambda x: x[0], lambda x: x[0]),
    "broadcast": ("broadcast", lambda x: None, lambda x: x[0]),
    "allgather": ("all_gather", lambda out, x: x[0], lambda out, x: out[0]),
    "allgather_into_tensor": ("all_gather_into_tensor", lambda out, x: x, lambda out, x: out),
    "reduce_scatter": ("reduce_scatter", lambda out, x: x[0], lambda out, x: out[0]),
    "reduce_scatter_tensor": ("reduce_scatter_tensor", lambda out, x: x, lambda out, x: out),
    "alltoall": ("all_to_all", lambda out, x: x, lambda out, x: out),
}


def wait_for(work: Work, *tensors: Any) -> None:
    """Wait for a collective that :mod:`a pass <tilework.capture.program.starting>` has started.

    Args:
        work: The collective.
        tensors: The collective's tensors.
    """
    work.wait()


class GroupCall:
    """A call of a group's method, such as an all-reduce, as an instruction of a program.

    Args:
        group: The group.
        method: The name of the group's method.
        opts: The options of the call; None if the method takes no options: it returns a Work.
        others: The arguments between the tensors and the options.
    """

    def __init__(
        self, group: ProcessGroup, method: str, opts: Options | None, others: tuple[Any, ...]
    ) -> None:
        self.group, self.method, self.opts, self.others = group, method, opts or Options(), others
        self._given = () if opts is None else (opts,)
        self.is_async = opts is None or opts.asyncOp
        self._fast = None if opts is None else _FAST.get(method)

    def __call__(self, *tensors: Any) -> Work | None:
        """Run the operation, and wait for it; if it is asynchronous, return the Work instead."""
        if self._fast is not None:
            name, source, target = self._fast
            path = self.group.fast_path
            start: Any = path.post if self.is_async else path.run
            done = start(
                name, source(*tensors), target(*tensors), self.opts.reduceOp, self.opts.rootRank
            )
            if done:
                return done if self.is_async else None
        work: Work = getattr(self.group, self.method)(*tensors, *self.others, *self._given)
        if self.is_async:
            return work
        work.wait()
        return None

    @property
    def is_point_to_point(self) -> bool:
        """True for a send or a receive."""
        return self.method in ("send", "recv", "recv_anysource")

    def text(self) -> str:
        """The method and the group's ranks, for people."""
        return f"{self.method} of ranks {list(self.group.global_ranks)}"
