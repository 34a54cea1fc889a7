"""The command line: ``tilework run``, ``doctor``, ``explain``, ``trace`` and ``checkpoint``."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from tilework import __version__


def main() -> None:
    """Run the ``tilework`` command in ``sys.argv``, and exit with the command's status."""
    status = dispatch(sys.argv[1:])
    # Skip taking torch apart, object by object; only the operating system would notice.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed in some way, or never open
            stream.flush()
    os._exit(status)


def dispatch(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status; wrong use raises SystemExit(2)."""
    if arguments and arguments[0] == "checkpoint":
        return _checkpoint(arguments[1:])
    # In functions, since what one command imports takes longer than the work of another.
    from tilework.launch.command import run_command

    return run_command(arguments, __version__)


def _checkpoint(arguments: Sequence[str]) -> int:
    given = [each for each in arguments if not each.startswith("-")]
    if len(given) > 1 and given[0] != "convert" and "://" not in given[1]:
        missing = [each for each in given[1 : 3 if given[0] == "diff" else 2] if _is_missing(each)]
        if missing and given[0] in ("show", "verify", "diff"):
            print(f"tilework checkpoint: there is nothing at {missing[0]!r}", file=sys.stderr)
            return 2
    from tilework.checkpoint.command import main as checkpoint_main

    return checkpoint_main(arguments)


def _is_missing(path: str) -> bool:
    return "://" not in path and not os.path.exists(path)


if __name__ == "__main__":
    main()
