"""Random programs: made, run on plain tensors and on DTensors, and compared."""

from __future__ import annotations

import math
import os
import random
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tests.dtensor.op_checks import noting_gatherings
from tests.fuzz.language import Run
from tests.fuzz.limits import Speaker
from tests.fuzz.statements import Chooser, first_statement, refused_statement, statement
from tilework.comm.world import current_world
from tilework.dtensor import DTensor
from tilework.dtensor.views.moved_views import fault_of
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.testing import run_ranks

MESHES: tuple[tuple[int, ...], ...] = ((1,), (2,), (3,), (2, 2), (2, 3))
#: How long a rank waits for another that went astray.
_TIMEOUT = timedelta(seconds=180)
#: Numbers above this are not compared with: rounding would decide.
_MOST = 1e6

#: What makes numbers of half as many digits, which may go into others.
_SINGLE = re.compile(r"float32|float\(\)")

#: Refusals that depend on the layout: see docs/concepts/limits.md.
REFUSED = re.compile(
    r"make the view again|(have|had) to move elements|refers to a single place in memory"
    r"|shows elements of the memory that|copied deeply together|given data of another layout"
)

#: torch asks the place in the graph of x, a view, which writing to x[…] has given another.
_WRITTEN_TWICE = re.compile(r"\] [-+*]= ")


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

    def __str__(self) -> str:
        refused = [f"refused: {self.refused}"] if self.refused else []
        return "\n".join([*self.statements, *refused])


def made(seed: int, mesh: tuple[int, ...] | None = None) -> Program:
    """The program of a number."""
    rng = random.Random(seed)
    mesh = mesh or MESHES[seed % len(MESHES)]
    run, statements = Run(), []
    speaker = Speaker(run)
    for number in range(rng.randint(1, 3)):
        chooser = Chooser(rng, run.tensors(), mesh, "")
        statements.append(first_statement(chooser, f"v{number}"))
        speaker.says(statements[-1])
    wanted, tries = rng.randint(3, 13), 0
    while len(statements) < wanted and tries < 60:
        tries += 1
        name = f"v{len(run.tensors())}"
        chooser = Chooser(rng, run.tensors(), mesh, name)
        try:
            text = statement(chooser)
        except (LookupError, ValueError, RuntimeError):  # the last: torch shows a tensor no more
            continue
        if _says(speaker, text) and _is_fair(run):
            statements.append(text)
        else:  # what it left half done is undone by running the rest again
            speaker = _spoken(statements)
            run = speaker.run
    refused = _refused(rng, speaker, mesh) if rng.random() < 0.5 else ""
    return Program(statements, mesh, seed, refused)


def _spoken(statements: list[str]) -> Speaker:
    """A speaker who has said these, but those from the first on that torch refuses now.

    What a statement that was undone had looked at may have let it pass before.
    """
    speaker = Speaker(Run())
    for number, text in enumerate(statements):
        if not _says(speaker, text, "ignore"):
            del statements[number:]
            return _spoken(statements)
    return speaker


def is_said(program: Program) -> bool:
    """True if all statements of a program are of the language."""
    statements = list(program.statements)
    _spoken(statements)
    return len(statements) == len(program.statements)


def _refused(rng: random.Random, speaker: Speaker, mesh: tuple[int, ...]) -> str:
    """A statement that torch refuses after those that were run; empty if none is found."""
    for _ in range(5):
        try:
            text = refused_statement(Chooser(rng, speaker.run.tensors(), mesh, "v99"))
        except (LookupError, ValueError, RuntimeError):
            continue
        if _WRITTEN_TWICE.search(text) or "write_local" in text:
            continue  # a rank without elements refuses no write to its local tensor
        if not (speaker.leaves_out(text) or _runs(speaker.run.execute, text, "ignore")):
            return text
    return ""


def _says(speaker: Speaker, text: str, warned: Any = "error") -> bool:
    said = []
    return _runs(lambda text: said.append(speaker.says(text)), text, warned) and said[0]


def _runs(execute: Callable[[str], Any], text: str, warned: Any = "error") -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter(warned)  # such as an out= that is resized
        torch.set_warn_always(True)
        try:
            execute(text)
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
    program.graded = grads is not None
    program.expected |= grads or {}
    if program.refused:
        last, _ = _on_plain(program)
        if program.graded:
            last.backward()
        if _runs(last.execute, program.refused, "ignore"):
            program.refused = ""
    return True


def _on_plain(program: Program) -> tuple[Run, dict[str, Any]]:
    """A run on plain tensors, and what can be seen of it."""
    run = Run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for text in program.statements:
            run.execute(text)
        return run, state_of(run)


def _plain_gradients(run: Run) -> dict[str, Any] | None:
    """The gradients of a run on plain tensors; None if torch refuses the backward pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run.backward()
        except Exception:
            return None
        return gradients(run)


def state_of(run: Run) -> dict[str, Any]:
    """All that can be seen of a run's tensors before the backward pass."""
    state: dict[str, Any] = {}
    for name, tensor in run.tensors().items():
        if isinstance(tensor, DTensor) and fault_of(tensor):
            run.stale.add(name)
            continue
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


def gradients(run: Run) -> dict[str, Any]:
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
            "refused": right until all ranks raised, as limits.md says.
        why: What differs, or the error.
        at: Of a refusal: the number of the statement.
    """

    program: Program
    kind: str
    why: str = ""
    at: int = -1


class _Lost(Exception):
    """Ranks are no longer at the same place."""


def run_programs(programs: Sequence[Program]) -> Iterator[Outcome]:
    """Run programs of one mesh on ranks as threads, and tell how each went."""
    at = 0
    while at < len(programs):
        outcomes = _run_some(programs[at:])
        yield from map(_compared_before, outcomes)
        at += len(outcomes)


def _compared_before(outcome: Outcome) -> Outcome:
    """The outcome of a program; if it was refused, what it did before is compared first."""
    before = Program(outcome.program.statements[: max(outcome.at, 0)], outcome.program.mesh)
    if outcome.kind == "refused" and before.statements and expect(before):
        if outcome.at == len(outcome.program.statements):  # in the backward pass
            before.graded, before.expected = False, _on_plain(before)[1]
        (again,) = run_programs([before])
        if again.kind not in ("right", "refused"):
            return again
    return outcome


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
    if len({(each.kind, each.at) for each in outcomes}) > 1:  # some refuse, others do not
        outcomes = [
            each if each.kind != "refused" else Outcome(program, "raised", each.why)
            for each in outcomes
        ]
    for kind in ("wrong", "raised"):
        found = [each for each in outcomes if each.kind == kind]
        if found:
            # Ranks that wait for one that raised say so: the others' errors tell more.
            return min(found, key=lambda each: "Timeout" in each.why or "PeerLost" in each.why)
    if len(outcomes) < size:
        return Outcome(program, "hang", "ranks are waiting for each other")
    return outcomes[0]


def _run(program: Program, mesh: DeviceMesh) -> Outcome:
    run, at = Run(mesh), 0
    try:
        for text in program.statements:
            run.execute(text)
            at += 1
        state = state_of(run)
        _check_locals(run)
        if program.graded:
            run.backward()
            state |= gradients(run)
        if program.refused:
            _check_refused(run, program.refused)
    except AssertionError as error:
        return Outcome(program, "wrong", str(error))
    except Exception as error:
        kind = "refused" if REFUSED.search(str(error)) else "raised"
        return Outcome(program, kind, f"{type(error).__name__}: {error} {_place(error)}", at)
    is_single = any(map(_SINGLE.search, program.statements))
    differing = difference(state, in_date(run, program.expected), is_single)
    return Outcome(program, "wrong", differing) if differing else Outcome(program, "right")


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


def in_date(run: Run, expected: dict[str, Any]) -> dict[str, Any]:
    """What is expected of tensors that may still be used."""
    return {
        name: value for name, value in expected.items() if name.partition(".")[0] not in run.stale
    }


def difference(state: dict[str, Any], expected: dict[str, Any], is_single: bool = False) -> str:
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


def compare(text: str, mesh: tuple[int, ...] = (2,), refused: bool = False) -> None:
    """Run a program on plain tensors and on DTensors.

    Args:
        text: Its statements, one on each line.
        mesh: The shape of the mesh.
        refused: True if all ranks may refuse it, as limits.md says, after what is right.

    Raises:
        AssertionError: It goes wrong on DTensors.
    """
    program = Program([line for line in text.splitlines() if line.strip()], mesh)
    assert expect(program), "torch refuses it"
    outcome = next(iter(run_programs([program])))
    right = ("right", "refused") if refused else ("right",)
    assert outcome.kind in right, f"{outcome.kind}: {outcome.why}"
