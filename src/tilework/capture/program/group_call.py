"""A collective as an instruction of a program."""

from __future__ import annotations

from typing import Any

from tilework.comm.contract import FORMS, Options, ProcessGroup, Work

#: The forms that may take the fast path, by the group's method.
_FAST = {
    form.method: form
    for form in FORMS.values()
    if form.sides and not (form.inputs.at_root or form.outputs.at_root)
}


def wait_for(work: Work, *tensors: Any) -> None:
    """Wait for a collective on tensors that a pass has started."""
    work.wait()


class GroupCall:
    """A call of a group's method, such as an all-reduce, as an instruction of a program.

    ``opts`` are None if the method takes none: it returns a Work. ``others`` are the arguments
    between the tensors and the options.
    """

    def __init__(
        self, group: ProcessGroup, method: str, opts: Options | None, others: tuple[Any, ...]
    ) -> None:
        self.group, self.method, self.opts, self.others = group, method, opts or Options(), others
        self._given = () if opts is None else (opts,)
        self.is_async = opts is None or opts.asyncOp
        has_form = opts is not None and opts.timeout is None
        self._form = _FAST.get(method) if has_form else None

    def __call__(self, *tensors: Any) -> Work | None:
        """Run the operation, and wait for it; if it is asynchronous, return the Work instead."""
        form = self._form
        if form is not None:
            target, source = tensors[0], tensors[-1]
            if form.is_nested:
                target, source = target[0], source[0]
            op = self.opts.reduceOp if form.reduces else None
            source = source if form.inputs.name else None
            rows = [each or None for each in self.others[::-1]]
            path = self.group.fast_path
            start: Any = path.post if self.is_async else path.run
            done = start(form.name, source, target, op, self.opts.rootRank, *rows)
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
