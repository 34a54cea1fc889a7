"""What the package is without Linux: no core, no fork, no Unix sockets, no file locks."""

from __future__ import annotations

import textwrap

from tests.fresh_torch import run_on_torch

WINDOWS = """
    import functools, os, socket, sys
    import torch, torch.distributed, rich.console
    sys.platform = "win32"
    for name in ("fcntl", "resource", "termios", "pty", "tty", "pwd", "grp", "tilework._core"):
        sys.modules[name] = None
    socket.socketpair = functools.partial(socket.socketpair, socket.AF_UNIX)  # asyncio's
    for name in ("AF_UNIX", "SO_PEERCRED", "SCM_RIGHTS"):
        delattr(socket, name)
    for name in ("fork", "register_at_fork", "geteuid", "getuid", "waitpid", "setsid"):
        delattr(os, name)

    import tilework.distributed as dist
    from tilework.testing import run_ranks
"""


def run_there(program: str) -> str:
    """Run ``program`` where Python has what it has on Windows."""
    return run_on_torch(textwrap.dedent(WINDOWS) + textwrap.dedent(program))


def test_threads_serve() -> None:
    out = run_there(
        """
        def program(rank):
            x = torch.ones(2) * rank
            dist.all_reduce(x)
            return x.tolist()
        print(run_ranks(3, program))
        """
    )
    assert out.strip() == "[[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]"


def test_the_missing_core_is_named_and_another_backend_used() -> None:
    out = run_there(
        """
        import warnings
        print(dist.is_shm_available(), dist.BackendConfig())
        with dist.TCPStore("127.0.0.1", 0, 1, is_master=True) as store:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                dist.init_process_group(store=store, rank=0, world_size=1)
            dist.all_reduce(torch.ones(1))
            print(dist.get_backend(), [str(w.message) for w in told])
            dist.destroy_process_group()
        """
    )
    first, second = out.strip().splitlines()
    assert first == "False cpu:gloo"
    assert second.startswith("gloo")
    assert "needs Linux, this is win32" in second


def test_a_file_store_says_what_to_use_instead() -> None:
    out = run_there(
        """
        try:
            dist.FileStore("store")
        except dist.DistStoreError as error:
            print(error)
        """
    )
    assert "use TCPStore" in out


def test_the_launcher_says_what_to_do() -> None:
    out = run_there(
        """
        import io, contextlib
        from tilework.cli import dispatch
        told = io.StringIO()
        with contextlib.redirect_stderr(told), contextlib.suppress(SystemExit):
            print("status", dispatch(["run", "-n", "2", "train.py"]))
        print(told.getvalue())
        """
    )
    assert "status 0" not in out
    assert "use torchrun, or ranks that are threads" in out


def test_remote_calls_serve() -> None:
    out = run_there(
        """
        from tilework import rpc
        def program(rank):
            rpc.init_rpc(f"w{rank}")
            result = rpc.rpc_sync("w1", pow, args=(2, rank + 3))
            rpc.shutdown()
            return result
        print(run_ranks(2, program))
        """
    )
    assert out.strip() == "[8, 16]"
