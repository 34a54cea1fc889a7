"""Random programs: made, run on plain tensors and on DTensors, and compared."""

from __future__ import annotations

import math
import os
import random
import re
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tests.dtensor.op_checks import noting_gatherings
from tests.fuzz.fairness import Fairness
from tests.fuzz.language import Run
from tests.fuzz.statements import Chooser, first_statement, refused_statement, statement
from tilework.comm.world import current_world
from tilework.dtensor import DTensor
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.testing import run_ranks

MESHES: tuple[tuple[int, ...], ...] = ((1,), (2,), (3,), (2, 2), (2, 3))
#: How long a rank waits for another that went astray.
_TIMEOUT = timedelta(seconds=45)
#: Numbers above this are not compared with: rounding would decide.
_MOST = 1e6

#: What makes numbers of half as many digits, which may go into others.
_SINGLE = re.compile(r"float32|float\(\)")

#: torch asks the place in the graph of x, a view, which writing to x[…] has given another.
_WRITTEN_TWICE = re.compile(r"\] [-+*]= ")
#: Writes to local tensors, of which a user's own Function that took the tensor does not know.
_WRITES_LOCAL = re.compile(r"(own\(|recomputed)[\s\S]*write_local")
#: Writes that torch does not count.
_COUNTED_BY_NONE = re.compile(r"\.data|inference_mode|set_")


@dataclass
class Program:
    """A program and what it gives on plain tensors.

    Args:
        statements: Its statements.
        mesh: The shape of the mesh that it is to run on.
        seed: The number that it was made from; for messages.
        refused: A last statement that torch refuses; empty: none.
    """

    statements: Sequence[str]
    mesh: tuple[int, ...]
    seed: int = -1
    refused: str = ""
    #: What is compared, by a name for it.
    expected: dict[str, Any] = field(default_factory=dict)
    #: True if there is a backward pass.
    graded: bool = False
    #: Gradients of one that torch refuses, since what it keeps was written to: had it kept copies.
    kept: dict[str, Any] | None = None

    def __str__(self) -> str:
        refused = [f"refused: {self.refused}"] if self.refused else []
        return "\n".join([*self.statements, *refused])


def made(seed: int, mesh: tuple[int, ...] | None = None) -> Program:
    """The program of a number."""
    rng = random.Random(seed)
    mesh = mesh or MESHES[seed % len(MESHES)]
    run, statements = Run(), []
    for number in range(rng.randint(1, 3)):
        chooser = Chooser(rng, run.tensors(), mesh, "")
        statements.append(first_statement(chooser, f"v{number}"))
        run.execute(statements[-1])
    wanted, tries = rng.randint(3, 13), 0
    while len(statements) < wanted and tries < 60:
        tries += 1
        name = f"v{len(run.tensors())}"
        chooser = Chooser(rng, run.tensors(), mesh, name)
        try:
            text = statement(chooser)
        except (LookupError, ValueError, RuntimeError):  # the last: torch shows a tensor no more
            continue
        with Fairness() as operators:
            runs = _runs(run, text)
        if runs and operators.is_fair and _is_fair(run):
            statements.append(text)
        else:  # what it left half done is undone by running the rest again
            run = _rerun(statements)
    refused = _refused(rng, run, mesh) if rng.random() < 0.5 else ""
    return Program(statements, mesh, seed, refused)


def _rerun(statements: list[str]) -> Run:
    """A run of statements anew, without those from the first on that torch refuses now.

    What a statement that was undone had looked at may have let it pass before.
    """
    run = Run()
    for number, text in enumerate(statements):
        if not _runs(run, text, "ignore"):
            del statements[number:]
            return _rerun(statements)
    return run


def _refused(rng: random.Random, run: Run, mesh: tuple[int, ...]) -> str:
    """A statement that torch refuses after those that were run; empty if none is found."""
    for _ in range(5):
        try:
            text = refused_statement(Chooser(rng, run.tensors(), mesh, "v99"))
        except (LookupError, ValueError, RuntimeError):
            continue
        if _WRITTEN_TWICE.search(text) or "write_local" in text:
            continue  # a rank without elements refuses no write to its local tensor
        if not _runs(run, text, "ignore"):
            return text
    return ""


def _runs(run: Run, text: str, warned: Any = "error") -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter(warned)  # such as an out= that is resized
        torch.set_warn_always(True)
        try:
            run.execute(text)
        except Exception:
            return False
        finally:
            torch.set_warn_always(False)
    return True


def _is_fair(run: Run) -> bool:
    """True if rounding decides nothing, and memory stays small."""
    return all(
        tensor.numel() < 500 and (not tensor.numel() or bool((tensor.detach().abs() < _MOST).all()))
        for tensor in run.tensors().values()
        if tensor.is_floating_point()
    )


def expect(program: Program) -> bool:
    """Run a program on plain tensors, and keep what it gives; False if torch refuses it."""
    try:
        run, program.expected = _on_plain(program)
    except Exception:
        return False
    grads = _plain_gradients(run)
    uncounted = any(_COUNTED_BY_NONE.search(text) for text in program.statements)
    if grads is None and not (uncounted or _WRITES_LOCAL.search(f"{program}")):
        with _saving_copies():
            program.kept = _plain_gradients(_on_plain(program)[0])
    again = any("create_graph" in text for text in program.statements)
    ways = (_saving_copies, _replaying_views) if uncounted else (_replaying_views,) * again
    for otherwise in ways:
        with otherwise():
            other = _seen_on_plain(program)
        if other is None:
            continue
        state, other_grads = other
        if _difference(state, program.expected):
            return False
        if grads and _difference(other_grads or {}, grads):
            grads = None
    program.graded = grads is not None
    program.expected |= grads or {}
    if program.refused:
        last, _ = _on_plain(program)
        if program.graded:
            last.backward()
        if _runs(last, program.refused, "ignore"):
            program.refused = ""
    return True


def _saving_copies() -> AbstractContextManager[Any]:
    """Autograd keeps copies: gradients depend on no write to what it keeps.

    Gradients of memory that was written to behind autograd's back, as through ``.data``, are
    those of whatever an operator happens to keep: torch leaves them undefined.
    """
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)


def _replaying_views() -> AbstractContextManager[Any]:
    """Autograd finds a view's elements by its operators instead of its strides.

    By strides, the gradient of a view without elements is cut off the graph.
    After ``view.data = other``, strides are those of other memory than the base's: torch's
    gradients are then of elements that the view never showed.
    """
    return torch.autograd.grad_mode._force_original_view_tracking(True)


def _seen_on_plain(program: Program) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
    """What can be seen of a run on plain tensors, and its gradients; None if torch refuses it."""
    try:
        run, state = _on_plain(program)
    except Exception:
        return None
    return state, _plain_gradients(run)


def _on_plain(program: Program) -> tuple[Run, dict[str, Any]]:
    """A run on plain tensors, and what can be seen of it."""
    run = Run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for text in program.statements:
            run.execute(text)
        return run, _state(run)


def _plain_gradients(run: Run) -> dict[str, Any] | None:
    """The gradients of a run on plain tensors; None if torch refuses the backward pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run.backward()
        except Exception:
            return None
        return _gradients(run)


def _state(run: Run) -> dict[str, Any]:
    """All that can be seen of a run's tensors before the backward pass."""
    state: dict[str, Any] = {}
    for name, tensor in run.tensors().items():
        state[name] = _full(tensor)
        if tensor.numel():
            # That of a dim of size 1 leads nowhere, and depends on how torch sorts equal strides.
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            state[f"{name}.stride()"] = tuple(stride if size > 1 else 0 for size, stride in sizes)
        # Of integers that graded values were written to, torch says so, and raises when it is used.
        if tensor.is_floating_point() or tensor.is_complex():
            state[f"{name}.requires_grad"] = tensor.requires_grad
            state[f"{name}.is_leaf"] = tensor.is_leaf
    for name, leaf in run.leaves.items():
        state[f"{name}.grad before"] = None if leaf.grad is None else _full(leaf.grad)
    return state


def _gradients(run: Run) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, leaf in run.leaves.items():
        # Given data of another dtype, it gets gradients of both: the first to come decides.
        state[f"{name}.grad"] = None if leaf.grad is None else _full(leaf.grad).to(leaf.dtype)
    for name, grad in sorted(run.seen.items()):
        state[f"gradient of {name}"] = _full(grad)
    return state


def _full(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        full = tensor.detach()
        return (full.full_tensor() if isinstance(full, DTensor) else full).clone()


# -- running ---------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How a program went.

    Args:
        program: The program.
        kind: "right", "wrong" (another result), "raised" (where plain tensors do not), "hang";
            on a rank "refused", too: a backward pass that plain tensors refuse.
        why: What differs, or the error.
    """

    program: Program
    kind: str
    why: str = ""


class _Lost(Exception):
    """Ranks are no longer at the same place."""


def run_programs(programs: Sequence[Program]) -> Iterator[Outcome]:
    """Run programs of one mesh on ranks as threads, and tell how each went."""
    at = 0
    while at < len(programs):
        outcomes = _run_some(programs[at:])
        yield from outcomes
        at += len(outcomes)


def _run_some(programs: Sequence[Program]) -> list[Outcome]:
    """Run programs until one goes wrong; at least one."""
    size = math.prod(programs[0].mesh)
    meeting = threading.Barrier(size)
    done: list[list[Outcome]] = [[] for _ in range(size)]

    def on_rank(rank: int) -> None:
        torch.set_num_threads(1)
        mesh = init_device_mesh("cpu", programs[0].mesh)
        for group in current_world().records:
            group.set_timeout(_TIMEOUT)
        for program in programs:
            done[rank].append(_run(program, mesh))
            if done[rank][-1].kind == "refused":  # others may be in the midst of it
                raise _Lost
            try:
                meeting.wait(_TIMEOUT.total_seconds() * 1.5)
            except threading.BrokenBarrierError:
                raise _Lost from None
            if any(its[len(done[rank]) - 1].kind != "right" for its in done):
                raise _Lost

    with noting_gatherings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limit = timedelta(seconds=500)
        run_ranks(size, on_rank, timeout=limit, return_exceptions=True)
    count = max(1, min(map(len, done)))
    return [
        _worst([its[n] for its in done if len(its) > n], size, programs[n]) for n in range(count)
    ]


def _worst(outcomes: Sequence[Outcome], size: int, program: Program) -> Outcome:
    for kind in ("wrong", "raised"):
        found = [each for each in outcomes if each.kind == kind]
        if found:
            # Ranks that wait for one that raised say so: the others' errors tell more.
            return min(found, key=lambda each: "Timeout" in each.why or "PeerLost" in each.why)
    if any(each.kind == "refused" for each in outcomes):
        return Outcome(program, "right")
    if len(outcomes) < size:
        return Outcome(program, "hang", "ranks are waiting for each other")
    return outcomes[0]


def _run(program: Program, mesh: DeviceMesh) -> Outcome:
    run = Run(mesh)
    try:
        for text in program.statements:
            run.execute(text)
        state = _state(run)
        _check_locals(run)
        if program.graded:
            run.backward()
            state |= _gradients(run)
        elif program.kept is not None:
            return _run_refused(program, run)
        if program.refused:
            _check_refused(run, program.refused)
    except AssertionError as error:
        return Outcome(program, "wrong", str(error))
    except Exception as error:
        return Outcome(program, "raised", f"{type(error).__name__}: {error} {_place(error)}")
    is_single = any(map(_SINGLE.search, program.statements))
    differing = _difference(state, program.expected, is_single)
    return Outcome(program, "wrong", differing) if differing else Outcome(program, "right")


def _run_refused(program: Program, run: Run) -> Outcome:
    """How a backward pass went that torch refuses."""
    assert program.kept is not None
    try:
        run.backward()
        grads = _gradients(run)
    except Exception:
        return Outcome(program, "refused")
    differing = _difference(grads, program.kept, any(map(_SINGLE.search, program.statements)))
    if differing:
        return Outcome(program, "wrong", f"not refused: {differing}")
    return Outcome(program, "right")


def _check_refused(run: Run, text: str) -> None:
    try:
        run.execute(text)
    except Exception:
        return
    raise AssertionError(f"accepted what torch refuses: {text}")


def _check_locals(run: Run) -> None:
    for name, tensor in run.tensors().items():
        if isinstance(tensor, DTensor):
            local, spec = tensor._local_tensor, tensor._spec
            assert local.shape == spec.local_shape, f"{name} has a part of shape {local.shape}"


def _difference(state: dict[str, Any], expected: dict[str, Any], is_single: bool = False) -> str:
    """The first thing that differs; empty if nothing does.

    Args:
        state: What there is.
        expected: What there should be.
        is_single: True if numbers are of single precision.
    """
    for name, want in expected.items():
        if name not in state:
            return f"{name} is missing"
        got = state[name]
        if isinstance(want, Tensor) and isinstance(got, Tensor):
            close = got.shape == want.shape and got.dtype == want.dtype
            if not (close and _is_close(got, want, is_single)):
                return f"{name} is\n{got}\n, plain gives\n{want}"
        elif isinstance(want, Tensor) or isinstance(got, Tensor) or got != want:
            return f"{name} is {got}, plain gives {want}"
    return ""


def _is_close(got: Tensor, want: Tensor, is_single: bool) -> bool:
    if want.dtype != torch.float32 and not (is_single and want.is_floating_point()):
        return torch.allclose(got, want, 1e-7, 1e-9, equal_nan=True)
    most = float(want.abs().nan_to_num(0, 0, 0).max()) if want.numel() else 0.0
    return torch.allclose(got, want, 1e-4, 1e-5 * max(most, 1.0), equal_nan=True)


def _place(error: Exception) -> str:
    if os.environ.get("TILEWORK_FUZZ_TRACE"):
        return "".join(traceback.format_exception(error))
    frames: list[Any] = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "tilework" in f.filename] or frames
    return f"[{ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno}]" if ours else ""


def compare(text: str, mesh: tuple[int, ...] = (2,)) -> None:
    """Run a program on plain tensors and on DTensors.

    Args:
        text: Its statements, one on each line.
        mesh: The shape of the mesh.

    Raises:
        AssertionError: It goes wrong on DTensors.
    """
    program = Program([line for line in text.splitlines() if line.strip()], mesh)
    assert expect(program), "torch refuses it"
    outcome = next(iter(run_programs([program])))
    assert outcome.kind == "right", outcome.why
