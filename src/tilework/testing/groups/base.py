"""The base of all parts of the suite: a way to run ranks."""

from __future__ import annotations

import functools
import inspect
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.contract import Capability, ProcessGroup
from tilework.comm.world import AnyGroup
from tilework.errors import DistBackendError
from tilework.testing.groups.values import DTYPES, REDUCE_OPS, Case, cases, defined, reduce_op

T = TypeVar("T")
#: A test function, or a class of tests.
Tests = TypeVar("Tests", bound=Callable[..., Any])

#: Short enough for a test, long enough for a busy machine to get ranks as far as they should.
SHORT = timedelta(milliseconds=250)
#: Beyond this a wait counts as hanging.
LONG = timedelta(seconds=120)


def needs(*promises: Capability) -> Callable[[Tests], Tests]:
    """Mark a test, or a class of tests: skipped for backends that lack any of ``promises``."""

    def mark(tests: Tests) -> Tests:
        if isinstance(tests, type):
            for name, test in vars(tests).items():
                if name.startswith("test_"):
                    mark(test)
        else:
            already: tuple[Capability, ...] = getattr(tests, "needs", ())
            tests.needs = (*already, *promises)  # type: ignore[attr-defined]
        return tests

    return mark


def on_ranks(count: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that ``count`` ranks (None: the test's ``n``) run by rank."""

    def test_of(body: Callable[..., None]) -> Callable[..., None]:
        def test(self: GroupSuite, **given: Any) -> None:
            ranks = given["n"] if count is None else count
            self.run(ranks, functools.partial(body, self, **given))

        of_body = inspect.signature(body)
        taken = [each for each in of_body.parameters.values() if each.name != "rank"]
        functools.update_wrapper(test, body)
        test.__signature__ = of_body.replace(parameters=taken)  # type: ignore[attr-defined]
        return test

    return test_of


class GroupSuite(ABC):
    """Tests of one topic. A subclass defines how to run ranks; see ProcessGroupContract."""

    #: The backend's class, which lists the missing features: their tests are skipped, by name.
    group_type: ClassVar[type[ProcessGroup]] = ProcessGroup
    #: World sizes of the tests that take ``n``.
    world_sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5)
    #: Whether tests of a single world size take both forms, ``async_op`` or not. If False, each
    #: test takes one form, which the name of the test decides.
    both_forms: ClassVar[bool] = True
    #: The dtypes that the backend moves and reduces.
    dtypes: ClassVar[Sequence[torch.dtype]] = DTYPES
    #: Elements of the tests of large messages: several chunks of any backend.
    large: ClassVar[int] = 1_500_001

    @abstractmethod
    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        """Run ``fn(rank)`` on ``n`` ranks, each with an initialised default group.

        Returns the ranks' results in rank order; raises the first rank's exception. Must not
        take longer than about two minutes, even if the backend is wrong.
        """

    @pytest.fixture(autouse=True)
    def _skip_what_is_lacking(self, request: pytest.FixtureRequest) -> None:
        for lack in getattr(request.function, "needs", ()):
            if lack in self.group_type.lacks:
                pytest.skip(f"{self.group_type.__name__} lacks {lack.value}")

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Pytest's hook: ``n`` runs over the world sizes, ``async_op`` over both forms.

        A test that takes both meets each size and each form, but not each size in each form: sizes
        alternate between the forms, starting by the name of the test. See also ``both_forms``.
        """
        taken = {"n", "async_op"} & {*metafunc.fixturenames}
        sizes_turn = len(self.world_sizes) > 1 or not self.both_forms
        if taken == {"n", "async_op"} and sizes_turn:
            first = zlib.crc32(metafunc.function.__name__.encode())
            turns = [(n, bool((first + turn) % 2)) for turn, n in enumerate(self.world_sizes)]
            ids = [f"{n}ranks-{'async' if form else 'sync'}" for n, form in turns]
            metafunc.parametrize(("n", "async_op"), turns, ids=ids)
            return
        if "n" in taken:
            metafunc.parametrize("n", self.world_sizes, ids=lambda n: f"{n}ranks")
        if "async_op" in taken:
            metafunc.parametrize("async_op", [False, True], ids=["sync", "async"])

    def cases(self) -> Iterator[Case]:
        """The shapes, dtypes and layouts that every operation is tried with."""
        return cases(self.dtypes)

    def sums(self) -> Iterator[Case]:
        """The cases that the backend can sum."""
        return (case for case in self.cases() if self.reduces("SUM", case.dtype))

    def reductions(self) -> Iterator[tuple[str, torch.dtype]]:
        """The reductions that the backend has, each with each dtype for which it has it."""
        return ((op, kind) for op in REDUCE_OPS for kind in self.dtypes if self.reduces(op, kind))

    def reduces(self, op: str, dtype: torch.dtype) -> bool:
        """True if the contract defines the reduction for the dtype, and the backend has it."""
        return defined(op, dtype) and self.group_type.reduces(reduce_op(op), dtype)


def finish(work: dist.Work | None, async_op: bool) -> None:
    """Wait for ``work`` if ``async_op`` is true; else check that the operation returned None."""
    if not async_op:
        assert work is None, f"a synchronous operation returned {work!r}"
        return
    assert isinstance(work, dist.Work), f"async_op=True returned {work!r}"
    assert work.wait() is True
    assert work.is_completed()


@dataclass(frozen=True)
class OperationFailure:
    """The failure of an operation on a rank, as the parent process receives it."""

    kind: type[BaseException]
    text: str
    ranks: tuple[int, ...]
    seconds: float


def failure_of(fn: Callable[[], object]) -> OperationFailure:
    """Call ``fn``, which must raise a DistBackendError; return the error and the time."""
    start = time.monotonic()
    try:
        result = fn()
    except DistBackendError as error:
        return OperationFailure(type(error), str(error), error.ranks, time.monotonic() - start)
    raise AssertionError(f"expected a DistBackendError, got the result {result!r}")


def started(work: dist.Work | None) -> dist.Work:
    """``work``, which an asynchronous operation returned, after a check that it is a Work."""
    assert isinstance(work, dist.Work), f"an asynchronous operation returned {work!r}"
    return work


def inside(group: AnyGroup) -> dist.ProcessGroup:
    """``group``, after a check that this rank is in it."""
    assert isinstance(group, dist.ProcessGroup), f"a member was given {group!r}"
    return group


def brief_group(limit: timedelta) -> dist.ProcessGroup:
    """A new group of all ranks with a short timeout for operations, but not for its creation."""
    group = inside(dist.new_group())
    group.set_timeout(limit)
    return group


def still_works(n: int, group: AnyGroup = None) -> None:
    """Check by an all_reduce that the group of ``n`` ranks still works."""
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [n] * 3
