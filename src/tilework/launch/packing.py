"""Functions and values for another interpreter, also those typed into this one."""

from __future__ import annotations

import io
import linecache
import marshal
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any


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
        """The value. Raises whatever the loading raises."""
        linecache.cache.update(self.sources)
        if self.main:
            _recreate_main(self.main)
        return _Unpickler(io.BytesIO(self.data)).load()

    def load_result(self, rank: int) -> Any:
        """The value that a rank returned.

        Raises:
            TypeError: The value cannot be made in this process.
        """
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

    Raises:
        TypeError: The value cannot be pickled.

    Example:
        >>> pack([1, 2]).load()
        [1, 2]
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
        """Find a class as pickle does, except for cloudpickle's maker of functions."""
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
