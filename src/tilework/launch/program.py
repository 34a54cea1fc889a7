"""Programs of ranks: a script, a module or a function. All are values that can be pickled.

A script or module becomes the process's ``__main__`` exactly as ``python SCRIPT`` or
``python -m MODULE`` make it, and stays so until the process ends: threads and exit handlers
that outlive its last line (an asynchronous checkpoint, say) still find its classes there,
which they would not after ``runpy.run_path``.
"""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from tilework.launch.packing import pack


@dataclass(frozen=True)
class Script:
    """A Python file, a folder with a ``__main__.py``, or a zip archive with one."""

    path: str
    arguments: tuple[str, ...] = ()

    def run(self, rank: int) -> None:
        """Run it as ``__main__``. Raises whatever it raises."""
        sys.argv = [self.path, *self.arguments]
        if not os.path.isfile(self.path) or _is_archive(self.path):
            _set_first_path(None)  # run_path adds the folder or archive itself
            runpy.run_path(self.path, run_name="__main__")
            return
        # As Python does: beside the file itself, wherever a symbolic link to it may lie.
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
        """Run it as ``__main__``. Raises ImportError where there is none, or what it raises."""
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
    arguments: tuple[Any, ...]
    folder: str
    """The place of what it returns, a file for each rank; none of a rank that returns None."""

    def run(self, rank: int) -> None:
        """Call it. Raises whatever it raises; TypeError if the result cannot be pickled."""
        result = self.function(rank, *self.arguments)
        if result is not None:
            data = pickle.dumps(pack(result))
            with open(os.path.join(self.folder, str(rank)), "wb") as file:
                file.write(data)


Program = Script | Module | Function


def _new_main(path: str | None, loader: object, spec: ModuleSpec | None) -> ModuleType:
    """A fresh ``__main__`` in ``sys.modules``, with what the interpreter itself puts there."""
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader, __spec__=spec)
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    return main


def _set_first_path(folder: str | None) -> None:
    """Replace what the launcher's own start put first on ``sys.path``; None: remove it."""
    if getattr(sys.flags, "safe_path", False):  # python -P: nothing was put there
        return
    sys.path[:1] = [] if folder is None else [folder]


def _find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """A module's file and code, of ``name.__main__`` if it is a package."""
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
        # Of a.b.c, a or a.b is missing; anything else is the program's own import.
        if error.name is None or not name.startswith(error.name):
            raise
        spec = None
    if spec is None:
        raise ImportError(f"no module named {name!r}", name=name)
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if code is None:
        raise ImportError(f"module {name!r} has no Python code to run", name=name)
    return spec, code


def _is_archive(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"
