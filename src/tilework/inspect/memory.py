"""The memory of tensors by use, counted storage by storage as operators make and free them."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from tilework.comm.per_call.internal import has_memory, lacks_memory
from tilework.comm.world import current_world
from tilework.dtensor import DTensor
from tilework.dtensor.internal import local_tensor_of, tensors_in
from tilework.inspect.writer import Writer
from tilework.show import Page, TextTable, bytes_text

Use = Literal["parameters", "gradients", "optimizer states", "activations", "buffers", "temporary"]
USES: Final[tuple[Use, ...]] = get_args(Use)
#: Calls of modules that are remembered, to find the module of a node of backward.
_MOST_CALLS: Final = 1 << 17
_TILEWORK, _TORCH = (f"{each}/" for each in (Path(__file__).parents[1], *torch.__path__))


@dataclass(frozen=True)
class Peak:
    """The memory at the moment of the most. Prints as a table, the most costly first.

    Attributes:
        bytes: All storages together.
        by: The bytes by module ("" outside of modules) and use.
    """

    bytes: int
    by: Mapping[tuple[str, Use], int] = field(default_factory=dict)

    def by_use(self) -> dict[Use, int]:
        return {use: sum(n for (_, u), n in self.by.items() if u == use) for use in USES}

    def __str__(self) -> str:
        most = sorted(self.by.items(), key=lambda each: -each[1])
        rows = [(module or "-", use, bytes_text(size)) for (module, use), size in most]
        table = TextTable(("module", "use", "bytes"), rows, {2})
        return str(Page(f"{bytes_text(self.bytes)} at the peak", table))


@dataclass(slots=True, eq=False)
class _Storage:
    """A storage that lives; the use may become known later."""

    bytes: int
    use: Use
    module: str
    #: True once the use is known from a parameter, a gradient or a state, not from the birth.
    known: bool = False
    #: Keeps the callback at the death.
    end: Any = None


class MemoryByUse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operators of this thread see, those of backward included.

    A storage counts from the first operator that makes or takes it until it is freed, once for
    all tensors that share it, with all bytes. Only the operators count, not the memory within
    them. A tensor on meta counts nothing. Local; not collective.

    - *parameters*: of modules that were called, with modules' buffers
    - *gradients*: of parameters, once their backward pass is over
    - *optimizer states*: of torch's optimizers, once a step is over
    - *buffers*: what tilework makes in order to move data: gathered parameters, DDP's buckets
    - *temporary*: what else is made in backward or in an optimizer's step
    - *activations*: the rest, the inputs of operators included

    Within :func:`trace` the bytes by use are a track of the timeline.

    A use that becomes known later counts for the past, too: ``peak`` is right once the step is
    over.

    Example:
        >>> import torch
        >>> from tilework.inspect import MemoryByUse
        >>> layer = torch.nn.Linear(64, 64, bias=False)
        >>> with MemoryByUse() as memory:
        ...     layer(torch.ones(8, 64)).sum().backward()
        >>> memory.now["parameters"], memory.now["gradients"], memory.peak.by["Linear", "gradients"]
        (16384, 16384, 16384)
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would load torch's compiler

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, _Storage] = {}
        #: Storages that were freed, by address; a callback may come in any thread.
        self._freed: deque[int] = deque()
        self._now: Counter[Use] = Counter()
        self._total, self._most = 0, 0
        self._at_peak: tuple[_Storage, ...] | None = ()
        self._modules = _Modules()
        #: By id, the tensors of parameters that autograd knows.
        self._leaves: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._in_step, self._in_backward = 0, False
        self._hooks: list[Any] = []

    @property
    def now(self) -> dict[Use, int]:
        self._find_gradients()
        self._bury()
        return {use: self._now[use] for use in USES}

    @property
    def peak(self) -> Peak:
        """The memory at the moment of the most so far, by module and use."""
        self._find_gradients()
        self._bury()
        found: Counter[tuple[str, Use]] = Counter()
        for storage in self._live.values() if self._at_peak is None else self._at_peak:
            found[storage.module, storage.use] += storage.bytes
        return Peak(self._most, dict(found))

    def begin_peak(self) -> None:
        """Forget the peak so far: the next begins with what lives now."""
        self._bury()
        self._most, self._at_peak = self._total, None

    # -- the mode ----------------------------------------------------------------------------

    def __enter__(self) -> MemoryByUse:
        enter, leave = self._if_active(self._enter_module), self._if_active(self._leave_module)
        self._hooks = [
            module_hooks.register_module_forward_pre_hook(enter),
            module_hooks.register_module_forward_hook(leave, always_call=True),
        ]
        _follow_optimizers()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._find_gradients()

    def _if_active(self, hook: Callable[..., None]) -> Callable[..., None]:
        """A hook that only threads with this mode call: ranks may share the process."""

        def call(*args: Any) -> None:
            if self in _active():
                hook(*args)

        return call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # then come the operators on local tensors
        # Below autograd, classes of tensors have no part in an operator without the mode either.
        with torch._C.DisableTorchFunctionSubclass():
            return self._counted(func, args, kwargs or {})

    def _counted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._bury()
        before = self._total
        self._note_backward()
        for tensor in tensors_in((args, kwargs)):
            self._see(tensor)
        result = func(*args, **kwargs)
        self._bury()
        node = torch._C._current_autograd_node()
        for tensor in tensors_in((result, args, kwargs)):
            self._see(tensor, node)
        leaf = getattr(node, "variable", None)  # only of a node that adds to a gradient
        if leaf is not None:
            self._leaves[id(leaf)] = leaf
        sink = current_world().sink
        if self._total != before and isinstance(sink, Writer):
            sink.note_memory({str(use): size for use, size in self._now.items()})
        return result

    # -- births, deaths, uses ----------------------------------------------------------------

    def _see(self, tensor: Tensor, node: Any = None) -> None:
        for storage in _storages(tensor):
            key, size = storage._cdata, storage.nbytes()
            known = self._live.get(key)
            if known is not None and known.end() is not storage:
                self._bury()  # freed since, and the address was given again
                known = None
            if known is not None:
                if known.bytes != size:
                    self._count(known, -1)
                    known = self._live[key] = _Storage(
                        size, known.use, known.module, known.known, known.end
                    )
                    self._count(known, 1)
                continue
            use, module = self._birth(node)
            end = weakref.ref(storage, partial(_note_end, self._freed, key))
            self._live[key] = born = _Storage(size, use, module, end=end)
            self._count(born, 1)

    def _birth(self, node: Any) -> tuple[Use, str]:
        module = self._modules.current
        if module is None:
            module = "" if node is None else self._modules.of_node(node)
        if _is_tilework_calling():
            return "buffers", module
        return "temporary" if node is not None or self._in_step else "activations", module

    def _count(self, storage: _Storage, sign: int) -> None:
        if sign < 0 and self._at_peak is None:
            self._at_peak = tuple(self._live.values())
        self._now[storage.use] += sign * storage.bytes
        self._total += sign * storage.bytes
        if self._total > self._most:
            self._most, self._at_peak = self._total, None

    def _bury(self) -> None:
        while self._freed:
            key = self._freed.popleft()
            self._count(self._live[key], -1)
            del self._live[key]

    def _mark(self, tensor: Tensor, use: Use, module: str | None = None) -> None:
        """Say the use of a tensor's storages, unless it was known; that of the past, too."""
        self._see(tensor)
        for storage in _storages(tensor):
            known = self._live[storage._cdata]
            if not known.known:
                self._now[known.use] -= known.bytes
                self._now[use] += known.bytes
                known.use, known.known = use, True
                known.module = known.module if module is None else module

    # -- what modules, autograd and optimizers do --------------------------------------------

    def _enter_module(self, module: nn.Module, _: object) -> None:
        if self._modules.current is None:
            self._know(module)
        self._modules.enter(module)

    def _leave_module(self, *_: object) -> None:
        self._modules.leave()

    def _know(self, module: nn.Module) -> None:
        self._modules.know(module)
        for each in module.modules():
            name = self._modules.name(each)
            for tensor in (*each._parameters.values(), *each._buffers.values()):
                if tensor is not None:
                    self._know_parameter(tensor, name)

    def _know_parameter(self, parameter: Tensor, name: str | None = None) -> None:
        leaf = _local(parameter)
        self._mark(leaf, "parameters", name)
        self._leaves[id(leaf)] = leaf
        self._find_gradient(leaf)

    def _module_of(self, leaf: Tensor) -> str | None:
        for storage in _storages(leaf):
            known = self._live.get(storage._cdata)
            return None if known is None or known.use != "parameters" else known.module
        return None

    def _note_backward(self) -> None:
        now = torch._C._current_graph_task_id() != -1
        if self._in_backward and not now:
            self._find_gradients()
        self._in_backward = now

    def _find_gradients(self) -> None:
        for leaf in list(self._leaves.values()):
            self._find_gradient(leaf)

    def _find_gradient(self, leaf: Tensor) -> None:
        if leaf.is_leaf and leaf.grad is not None:
            self._mark(leaf.grad, "gradients", self._module_of(leaf))

    def begin_step(self, optimizer: Optimizer) -> None:
        """An optimizer begins a step: what it steps over are parameters."""
        self._in_step += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._know_parameter(parameter)

    def end_step(self, optimizer: Optimizer) -> None:
        self._in_step -= 1
        for parameter, states in list(optimizer.state.items()):
            for tensor in tensors_in(states):
                name = self._module_of(_local(parameter)) if isinstance(parameter, Tensor) else None
                self._mark(_local(tensor), "optimizer states", name)


class _Modules:
    """The names of modules, and which of them made a node of autograd's graph."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[str] = []
        #: Autograd's numbers from which on another module made the nodes, in order.
        self._from: list[int] = []
        self._whose: list[str] = []

    @property
    def current(self) -> str | None:
        return self._stack[-1] if self._stack else None

    def know(self, root: nn.Module) -> None:
        """Name a module, and all within: by the class of the outermost that was called."""
        if root not in self._names:
            for name, each in root.named_modules():
                title = f"{type(root).__name__}.{name}" if name else type(root).__name__
                self._names.setdefault(each, title)

    def name(self, module: nn.Module) -> str:
        return self._names.get(module) or type(module).__name__

    def enter(self, module: nn.Module) -> None:
        self._stack.append(self.name(module))
        self._note()

    def leave(self) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        number = torch._C._autograd._get_sequence_nr()
        if len(self._from) >= _MOST_CALLS:
            del self._from[: _MOST_CALLS // 2], self._whose[: _MOST_CALLS // 2]
        self._from.append(number)
        self._whose.append(self.current or "")

    def of_node(self, node: Any) -> str:
        at = bisect_right(self._from, node._sequence_nr()) - 1
        return self._whose[at] if at >= 0 else ""


@cache
def _follow_optimizers() -> None:
    """Tell modes of steps of optimizers; for good: other ranks may go through torch's hooks now."""

    def begin(optimizer: Optimizer, *_: object) -> None:
        for mode in _active():
            mode.begin_step(optimizer)

    def end(optimizer: Optimizer, *_: object) -> None:
        for mode in _active():
            mode.end_step(optimizer)

    optimizer_hooks.register_optimizer_step_pre_hook(begin)
    optimizer_hooks.register_optimizer_step_post_hook(end)


def _active() -> Iterator[MemoryByUse]:
    stack = _get_current_dispatch_mode_stack()
    return (mode for mode in stack if isinstance(mode, MemoryByUse))


def _note_end(freed: deque[int], key: int, _: object) -> None:
    freed.append(key)


def _local(tensor: Tensor) -> Tensor:
    return local_tensor_of(tensor) if isinstance(tensor, DTensor) else tensor


def _storages(tensor: Tensor) -> Iterator[Any]:
    """The storages of a tensor: several for sparse tensors, and for those of wrapping classes."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    elif tensor.layout is torch.strided and _is_counted(tensor):
        yield tensor.untyped_storage()
    for name in _PARTS.get(tensor.layout, ()):
        yield getattr(torch.ops.aten, name)(tensor).untyped_storage()


def _is_counted(tensor: Tensor) -> bool:
    """True on a real device, unless other tensors have the elements, and on a pretended rank."""
    return not lacks_memory(tensor) if tensor.is_meta else has_memory(tensor)


_ROWS = ("crow_indices", "col_indices", "values")
_COLUMNS = ("ccol_indices", "row_indices", "values")
#: By layout, the operators that give the parts of a sparse tensor.
_PARTS: Final = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


def _is_tilework_calling() -> bool:
    """True if code of tilework that moves data calls the operator."""
    frame = sys._getframe(3)
    while frame.f_back is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    path = frame.f_code.co_filename.removeprefix(_TILEWORK)
    # Functional collectives make tensors for the program.
    return path.startswith(("comm/", "parallel/")) and not path.startswith("comm/functional/")


@lru_cache(4096)
def _is_between(path: str) -> bool:
    """True for files between an operator and the code that calls it, such as ``torch/_ops.py``."""
    below = path.removeprefix(_TORCH)
    return path.startswith((__file__, f"{_TILEWORK}plan/")) or (
        below != path and ("/" not in below or below.startswith(("utils/", "_dynamo/")))
    )
