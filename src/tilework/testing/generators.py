"""A random generator for each rank, where ranks are threads of one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, Token
from functools import wraps
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from tilework.comm.world import World, current_world

#: torch's functions that read or write the state of the default generator.
_STATE_NAMES: Final = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")
_PLACES: tuple[Any, ...] = (torch, torch.random)

#: torch's functions that draw from the default generator, by name.
_DRAWING: Final = frozenset(
    # A list with a name per line would be half the file.
    """
    rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial
    poisson binomial uniform_ normal_ random_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_
    dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout
    feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ native_dropout rrelu rrelu_
    gumbel_softmax fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d
    fractional_max_pool3d_with_indices scaled_dot_product_attention multi_head_attention_forward
    rnn_tanh rnn_relu gru lstm pca_lowrank svd_lowrank
    trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ orthogonal_
    sparse_
    """.split()  # noqa: SIM905
)

#: Held while torch's default generator has the state of a rank's generator.
_borrowed = threading.RLock()


if hasattr(os, "register_at_fork"):
    # A child lacks the thread that would release it, and must not get another rank's state.
    os.register_at_fork(
        before=_borrowed.acquire,
        after_in_parent=_borrowed.release,
        after_in_child=_borrowed.release,
    )


def give_generator(world: World) -> None:
    """Give a rank a separate generator, in the state of torch's default generator."""
    world.generator = torch.Generator()
    world.generator.set_state(torch.default_generator.get_state())


@contextmanager
def own_generators() -> Iterator[None]:
    """Make ``torch.manual_seed`` and similar functions act on the calling rank's own generator.

    Threads that are not ranks still use torch's default generator.
    """
    _patch.enter()
    try:
        yield
    finally:
        _patch.leave()


class OwnDraws(TorchFunctionMode):
    """While entered, random functions of torch draw from the rank's own generator in this thread.

    A random function runs while torch's default generator has the state of the rank's generator, in
    a single thread at a time. A rank that seeds thus gets the numbers of a separate process,
    whatever other ranks draw meanwhile.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator
        self._tokens: list[Token[OwnDraws | None]] = []

    def __enter__(self) -> OwnDraws:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._tokens.append(_draws.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _draws.reset(self._tokens.pop())
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The result of ``func``, which draws from this rank's generator if it draws at all."""
        keywords = kwargs or {}
        drawing = getattr(func, "__name__", "") in _DRAWING
        if not drawing or keywords.get("generator") is not None:
            return func(*args, **keywords)
        if types:
            # Without the lock: a DTensor communicates. Draws of its class arrive here again.
            with self:
                return _of_class(func, types, args, keywords)
        shared = torch.default_generator
        with _borrowed:
            before = shared.get_state()
            shared.set_state(self._generator.get_state())
            try:
                return func(*args, **keywords)
            finally:
                self._generator.set_state(shared.get_state())
                shared.set_state(before)


def _of_class(
    func: Callable[..., Any],
    types: Sequence[type],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call ``func`` as the first of the tensor classes ``types`` that implements it; the result."""
    for kind in types:
        result = kind.__torch_function__(func, types, args, kwargs)  # type: ignore[attr-defined]
        if result is not NotImplemented:
            return result
    names = ", ".join(kind.__name__ for kind in types)
    raise TypeError(f"no tensor class among {names} implements {func}")


_draws: ContextVar[OwnDraws | None] = ContextVar("tilework_draws", default=None)


class _Patch:
    """Replaces torch's functions of random state from the first ``enter`` to the last ``leave``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._originals: dict[str, Callable[..., Any]] = {}

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._originals = {name: getattr(torch.random, name) for name in _STATE_NAMES}
            for name, original in self._originals.items():
                _put(name, _of_rank(name, original))
            self._originals["fork_rng"] = torch.random.fork_rng
            _put("fork_rng", _forking(torch.random.fork_rng))

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for name, original in self._originals.items():
                    _put(name, original)


def _put(name: str, function: Callable[..., Any]) -> None:
    for place in _PLACES:
        setattr(place, name, function)


def _of_rank(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    method = name.replace("_rng", "")  # get_state, set_state

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        generator = current_world().generator
        if generator is None:
            with _borrowed:
                return original(*args, **kwargs)
        return getattr(generator, method)(*args, **kwargs)

    return function


def _forking(original: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of ``fork_rng`` within which a rank still draws from the rank's own generator.

    torch recomputes checkpointed layers within ``fork_rng`` in backward, where :class:`OwnDraws`
    and all other modes are off.
    """

    @wraps(original)
    @contextmanager
    def fork_rng(*args: Any, **kwargs: Any) -> Iterator[None]:
        draws = _draws.get()
        with original(*args, **kwargs), draws or nullcontext():
            yield

    return fork_rng


_patch = _Patch()
