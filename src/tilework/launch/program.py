"""Programs of ranks: a script, a module or a function. All are values that can be pickled.

A script or module becomes the process's ``__main__`` exactly as with ``python SCRIPT`` or
``python -m MODULE``, and stays ``__main__`` until the process ends. Threads and exit handlers that
outlive the last line (for example, an asynchronous checkpoint) therefore still find its classes
there, unlike after ``runpy.run_path``.
"""

from __future__ import annotations

import importlib.util
import io
import linecache
import marshal
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any
from zipimport import ZipImportError, zipimporter


@dataclass(frozen=True)
class Packed:
    """A pickled value, which another interpreter loads later, where it can report a failure."""

    data: bytes
    """The pickled value."""
    main: dict[str, Any]
    """The data to recreate the ``__main__`` that functions were defined in; empty if not needed."""
    sources: dict[str, Any]
    """The typed lines, for tracebacks, in the form of ``linecache``."""

    def load(self) -> Any:
        linecache.cache.update(self.sources)
        if self.main:
            _recreate_main(self.main)
        return _Unpickler(io.BytesIO(self.data)).load()

    def load_result(self, rank: int) -> Any:
        """The value that a rank returned. Raises TypeError if it cannot be made in this process."""
        try:
            return self.load()
        except Exception as error:
            raise TypeError(
                f"the result of rank {rank} cannot be made in this process, which is not a rank: "
                f"{error} Return numbers, text and plain tensors; of a DTensor or ShardedTensor "
                f"the full_tensor(), the to_local() or the text"
            ) from error


def pack(value: object) -> Packed:
    """The value, with everything that another interpreter needs to load it.

    Raises TypeError if it cannot be pickled.
    """
    typed = main_is_typed()
    try:
        data = _typed_dumps(value) if typed else pickle.dumps(value)
        # Definitions in this program's main module are pickled by its name.
        main = _how_to_recreate_main() if b"__main__" in data and not typed else {}
    except (pickle.PicklingError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"functions and values for another interpreter must be picklable: {error}"
        ) from error
    return Packed(data, main, _typed_sources() if typed else {})


def main_is_typed() -> bool:
    """True if this process's main module was typed in: no other process can import it."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)  # "<stdin>" if it was a pipe
    known = file is not None and os.path.exists(file)
    return not known and getattr(main, "__spec__", None) is None


def is_recreating_main() -> bool:
    """True if this process is a rank that is just loading the main module of its program."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


class _Unpickler(pickle.Unpickler):
    """Unpickles functions that were typed in, with this process's ``__main__`` as their globals."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _in_main(found) if name == "_make_function" else found


def _in_main(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(code: CodeType, names: dict[str, Any], *rest: Any) -> Any:
        own = names.get("__name__") == "__main__"
        return make(code, sys.modules["__main__"].__dict__ if own else names, *rest)

    return made


def _typed_dumps(value: object) -> bytes:
    """The value, pickled with the code of typed functions, since no module has that code."""
    import cloudpickle  # type: ignore[import-untyped]

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Keeps the file names of code, by which tracebacks find the lines of source."""

        dispatch_table = {**cloudpickle.Pickler.dispatch_table, CodeType: _code}  # noqa: RUF012

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _code(code: CodeType) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    return marshal.loads, (marshal.dumps(code),)


def _typed_sources() -> dict[str, Any]:
    """The entries of ``linecache`` for code that was typed in, which is in no file."""
    entries = linecache.cache.items()
    return {name: entry for name, entry in entries if len(entry) == 4 and entry[1] is None}


def _how_to_recreate_main() -> dict[str, Any]:
    """The data by which multiprocessing recreates this ``__main__`` in a fresh process."""
    known = multiprocessing.spawn.get_preparation_data("rank")
    wanted = ("sys_argv", "dir", "orig_dir", "init_main_from_name", "init_main_from_path")
    return {name: value for name, value in known.items() if name in wanted}


def _recreate_main(how: dict[str, Any]) -> None:
    """Load the main module, marked as in multiprocessing, so that it starts no ranks."""
    process = multiprocessing.current_process()
    process._inheriting = True  # type: ignore[attr-defined]
    try:
        multiprocessing.spawn.prepare(how)
    finally:
        del process._inheriting  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Script:
    """A Python file, or a folder or zip archive that has a ``__main__.py``."""

    path: str
    arguments: tuple[str, ...] = ()

    def run(self, rank: int) -> None:
        sys.argv = [self.path, *self.arguments]
        if not os.path.isfile(self.path) or _is_archive(self.path):
            _set_first_path(None)  # run_path adds the folder or archive itself
            runpy.run_path(self.path, run_name="__main__")
            return
        # As in Python: the folder of the file itself, not of a symbolic link to it.
        _set_first_path(os.path.dirname(os.path.realpath(self.path)))
        path = os.path.abspath(self.path)
        main = _new_main(path, SourceFileLoader("__main__", path), None)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)


@dataclass(frozen=True)
class Module:
    """An importable module, or a package with a ``__main__`` module."""

    name: str
    arguments: tuple[str, ...] = ()

    def run(self, rank: int) -> None:
        sys.argv = ["-m", *self.arguments]
        _set_first_path(os.getcwd())
        spec, code = _find_module(self.name)
        sys.argv[0] = spec.origin or self.name
        main = _new_main(spec.origin, spec.loader, spec)
        main.__package__ = spec.parent
        exec(code, main.__dict__)


@dataclass(frozen=True)
class Function:
    """A function, called with the rank and then ``arguments``."""

    function: Callable[..., object]
    """The function."""
    arguments: tuple[Any, ...]
    """The arguments after the rank."""
    folder: str
    """The place of results, a file for each rank; no file for a rank that returns None."""

    def run(self, rank: int) -> None:
        """Call the function. Raises its errors, or TypeError if the result cannot be pickled."""
        result = self.function(rank, *self.arguments)
        if result is not None:
            data = pickle.dumps(pack(result))
            with open(os.path.join(self.folder, str(rank)), "wb") as file:
                file.write(data)


Program = Script | Module | Function


def _new_main(path: str | None, loader: object, spec: ModuleSpec | None) -> ModuleType:
    """A fresh ``__main__`` in ``sys.modules``, with the attributes that Python sets."""
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader, __spec__=spec)
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    return main


def _set_first_path(folder: str | None) -> None:
    """Replace the launcher's own first entry of ``sys.path`` by ``folder``; None: remove it."""
    if getattr(sys.flags, "safe_path", False):  # python -P: nothing was put there
        return
    sys.path[:1] = [] if folder is None else [folder]


def _find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """The spec and the code of a module; for a package, of the module ``name.__main__``."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                raise ImportError(
                    f"{name!r} is a package without a __main__ module: name a module in it",
                    name=name,
                )
    except ModuleNotFoundError as error:
        # a or a.b of a.b.c is missing; any other name comes from an import in the program.
        if error.name is None or not name.startswith(error.name):
            raise
        spec = None
    if spec is None:
        raise ImportError(f"no module named {name!r}", name=name)
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if code is None:
        raise ImportError(
            f"module {name!r} has no Python code to run: name a module with Python source",
            name=name,
        )
    return spec, code


def _is_archive(path: str) -> bool:
    try:
        zipimporter(path)  # as Python does: an archive may begin with a line such as #!/bin/python3
    except ZipImportError:
        return False
    return True
