"""The command line of ``tilework run``, ``doctor`` and ``explain``: options and their errors."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeAlias, get_args

from tilework.cores import read_topology, usable_cores
from tilework.errors import DistNetworkError, DistStoreError
from tilework.launch.binding import BindMode, sets_for
from tilework.launch.flight_records import print_diagnosis
from tilework.launch.nodes import NodesError
from tilework.launch.program import Module, Program, Script
from tilework.launch.run import run
from tilework.launch.settings import LaunchSettings, check_backend
from tilework.launch.store_service import serve_store

_COMMANDS = ("run", "store", "plan", "doctor", "explain", "trace", "checkpoint")

_NOTES = """\
  tilework train.py                       run a script, one rank per core: short for tilework run
  tilework COMMAND --help                 the options of a command, with examples
"""

_RUN_NOTES = """\
Options of tilework come before SCRIPT; arguments after it go to the script.

The exit status is 0, or that of the rank that failed first (128 + number for a signal),
or 130 after Ctrl-C.

  tilework run train.py --lr 0.1          one rank per core
  tilework run -n 4 -m package.train      a module
  tilework run -n 2 --tcp train.py        for scripts that use torch.distributed
  tilework run -n 8 --nnodes 2 --node-rank 0 --rdzv host-a:29500 train.py    on host-a; and on
                                          the other host the same with --node-rank 1
"""


def run_command(arguments: Sequence[str], version: str) -> int:
    """Run one command and return the exit status; wrong use raises SystemExit(2)."""
    parser = parser_of_commands(version)
    if not arguments:
        parser.print_help()
        return 0
    options, unknown = parser.parse_known_args(_with_command(parser, arguments))
    if unknown:
        options.parser.error(_unknown_text(options.parser, unknown))
    status: int = options.command(options)
    return status


def _with_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> Sequence[str]:
    """The arguments, with ``run`` in front if they begin with options of ``run`` or a script."""
    first = arguments[0]
    if first in _COMMANDS or first in ("-h", "--help", "--version"):
        return arguments
    if first.startswith("-") or first.endswith(".py") or os.path.exists(first):
        return ["run", *arguments]
    near = difflib.get_close_matches(first, _COMMANDS, n=1)
    guess = f"did you mean {near[0]}?" if near else f"they are {', '.join(_COMMANDS)}"
    parser.error(f"there is no command {first!r}, nor a script of that name: {guess}")


def _unknown_text(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    known = re.findall(r"--[\w-]+", parser.format_help())
    near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
    guess = f": did you mean {near[0]}?" if near else ""
    return f"unrecognized arguments: {' '.join(unknown)}{guess}"


def parser_of_commands(version: str) -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tilework",
        description="Sharded tensors and process groups for PyTorch.",
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tilework {version}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_store(commands)
    _add_plan(commands)
    _add_doctor(commands)
    _add_explain(commands)
    _add_trace(commands)
    # Only listed: cli.py runs that command.
    commands.add_parser("checkpoint", help="show, verify, compare and convert checkpoints")
    return parser


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _parser(
    commands: _Commands, name: str, about: str, notes: str, usage: str | None = None
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=about,
        usage=usage,
        epilog=notes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


# tilework run


def _add_run(commands: _Commands) -> None:
    about = "run a script on several ranks of this machine"
    usage = "tilework run [options] SCRIPT | -m MODULE [arguments]"
    parser = _parser(commands, "run", about, _RUN_NOTES, usage)
    add = parser.add_argument
    add("-n", "--ranks", *_TORCHRUN_NAMES, type=_ranks, metavar="N", help=_RANKS_HELP)
    add("--backend", type=_backend, metavar="B", help='such as "shm", "gloo", "cpu:shm,cuda:nccl"')
    add("--timeout", type=_timeout, metavar="S", help="seconds that collectives wait at most")
    add("--log-dir", type=Path, metavar="D", help="also write D/rank-K.stdout and .stderr")
    add("--start", choices=("fork", "spawn"), default="fork", help=_START_HELP)
    add("--tcp", action="store_true", help="let ranks meet at a TCP port of 127.0.0.1 (env://)")
    add("--master-port", type=_port, metavar="P", help="that port (default: any); implies --tcp")
    add("--prefix", choices=("auto", "all", "others", "none"), default="auto", help=_PREFIX_HELP)
    add("--restarts", type=_count, default=0, metavar="R", help=_RESTARTS_HELP)
    add(*_TORCHRUN_RESTARTS, type=_count, default=0, metavar="R", help=_MAX_RESTARTS_HELP)
    add("--elastic", type=_elastic, metavar="MIN:MAX", help=_ELASTIC_HELP)
    add("--grace", type=_timeout, default=timedelta(seconds=2), metavar="S", help=_GRACE_HELP)
    add("--bind", choices=get_args(BindMode), default="none", help=_BIND_HELP)
    add("--huge-pages", action=argparse.BooleanOptionalAction, help=_HUGE_PAGES_HELP)
    add(
        *_TORCHRUN_BINDING, dest="bind", type=_torchrun_binding, metavar="B", help=argparse.SUPPRESS
    )
    add("--nnodes", type=_nodes_or_range, default=(1, None), metavar="N", help=_NNODES_HELP)
    add("--node-rank", "--node_rank", type=int, default=0, metavar="K", help=_NODE_RANK_HELP)
    add("--rdzv", *_TORCHRUN_RDZV, type=_host_port, metavar="HOST:PORT", help=_RDZV_HELP)
    add("--trace", type=Path, metavar="D", help="write what ranks do to D, for tilework trace D")
    add("--watch", type=_timeout, metavar="S", help=_WATCH_HELP)
    add("--pretend", type=_ranks, metavar="N", help="start nothing: plan N ranks (tilework plan)")
    _add_program(parser)
    parser.set_defaults(parser=parser, command=lambda options: _run(parser, options))


def _add_program(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    add("script", metavar="SCRIPT", help="a Python file, folder or zip archive")
    rest = add("arguments", nargs=argparse.REMAINDER, help="passed on to it")
    rest.required = False  # argparse would name it, too, where there is no script


_WATCH_HELP = "every S seconds a line: steps, who is behind, share of waiting, memory"
_RANKS_HELP = "number of ranks (default: auto, as many as usable cores)"
#: torchrun's name of -n, in both spellings.
_TORCHRUN_NAMES = ("--nproc-per-node", "--nproc_per_node")
_RESTARTS_HELP = "start ranks that die again, alone, R times in all (see docs/how-to/elastic.md)"
_TORCHRUN_RESTARTS = ("--max-restarts", "--max_restarts")
_MAX_RESTARTS_HELP = "start all ranks again when the job has failed, R times in all"
_ELASTIC_HELP = "continue with at least MIN ranks when some die; MAX is the number at the start"
_GRACE_HELP = "seconds from Ctrl-C or SIGTERM to SIGKILL (default: 2)"
_NNODES_HELP = (
    "number of hosts on each of which this command is run (default: 1); MIN:MAX: hosts that come "
    "and go, with a tilework store at --rdzv"
)
_NODE_RANK_HELP = "this host's number, from 0"
_RDZV_HELP = "an address of node 0 that the others reach, and a free port there"
_TORCHRUN_RDZV = ("--rdzv-endpoint", "--rdzv_endpoint")
#: torchrun's options for CPUs, and what is nearest to each of their values.
_TORCHRUN_BINDING = ("--numa-binding", "--numa_binding")
_BINDINGS = {"node": "numa", "socket": "numa", "exclusive": "cores", "core-complex": "cores"}
_BIND_HELP = (
    "CPUs of each rank: cores that no other rank has, all of a memory node (numa), or as cores if "
    "there are enough that no other job has (auto); default: none, any"
)
_HUGE_PAGES_HELP = "large tensors ask for huge pages, or not (default: as the environment has it)"
_START_HELP = "fork: from a process that has imported torch; spawn: fresh interpreters"
_PREFIX_HELP = "whose lines begin with [rank]; others: but rank 0 (auto: all, if N > 1)"


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if sys.platform == "win32":
        parser.error(
            "this system lacks what starting ranks takes (POSIX): use torchrun, or ranks that are "
            "threads, by tilework.testing.run_ranks"
        )
    program = _program(parser, options)
    if options.pretend is not None:
        options.ranks, options.hosts, options.memory = options.pretend, options.nnodes[0], None
        options.cluster, options.everyone = None, False
        return _plan(parser, options)
    most = None if options.elastic is None else options.elastic[1]
    ranks = options.ranks or most or usable_cores()
    settings = _settings(parser, options, ranks)
    try:
        return run(settings, program)
    except OSError as error:
        where = f" {error.filename!r}" if error.filename is not None else ""
        print(f"tilework run: cannot start:{where} {error.strerror or error}", file=sys.stderr)
        return 1
    except (NodesError, DistNetworkError, DistStoreError) as error:  # before any rank was started
        print(f"tilework run: {error}", file=sys.stderr)
        return error.status if isinstance(error, NodesError) else 1


#: Options that settings have under the same name.
_SETTINGS = (
    *("start", "backend", "timeout", "log_dir", "prefix", "restarts", "elastic", "grace", "bind"),
    *("max_restarts", "huge_pages", "node_rank", "rdzv", "trace", "watch"),
)


def _settings(
    parser: argparse.ArgumentParser, options: argparse.Namespace, ranks: int
) -> LaunchSettings:
    try:
        sets_for(options.bind, ranks, read_topology())
        return LaunchSettings(
            nprocs=ranks,
            master_port=0 if options.tcp and options.master_port is None else options.master_port,
            nnodes=options.nnodes[0],
            elastic_nodes=options.nnodes[1],
            **{name: getattr(options, name) for name in _SETTINGS},
        )
    except ValueError as error:  # options that contradict each other
        parser.error(str(error))


def _program(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Program:
    """The program that the options name, which must exist: else this process ends."""
    name, arguments = options.script, tuple(options.arguments)
    if _PYTHON.fullmatch(os.path.basename(name)) and arguments and not os.path.isdir(name):
        name, *rest = arguments  # the launcher starts the interpreter itself
        if name == "-m" and rest:
            options.module = True
            name, *rest = rest
        arguments = tuple(rest)
    if options.module:
        _check_module(parser, name)
        return Module(name, arguments)
    if not os.path.exists(name):
        parser.error(f"there is no file {name!r}{_script_guess(name)}")
    if os.path.isdir(name) and not os.path.exists(os.path.join(name, "__main__.py")):
        parser.error(f"{name!r} is a folder without a __main__.py: name a script in it")
    if not os.access(name, os.R_OK):
        parser.error(f"the file {name!r} cannot be read: check the permissions")
    return Script(name, arguments)


_PYTHON = re.compile(r"python(3(\.\d+)?)?")


def _check_module(parser: argparse.ArgumentParser, name: str) -> None:
    if name.endswith(".py"):
        parser.error(f"-m takes a module's name ({name[:-3].replace('/', '.')!r}), got {name!r}")
    sys.path.insert(0, os.getcwd())  # where python -m looks first
    try:
        exists = importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        exists = False
    finally:
        del sys.path[0]
    if not exists:
        hint = f": it is a file, leave out -m ({name})" if os.path.exists(name) else ""
        parser.error(f"there is no module {name!r} here or on Python's path{hint}")


def _script_guess(name: str) -> str:
    """The end of the error that there is no file ``name``: a suggestion, or the folder searched."""
    folder, base = os.path.split(name)
    with suppress(OSError):
        known = [entry for entry in os.listdir(folder or ".") if entry.endswith(".py")]
        near = difflib.get_close_matches(base, known, n=1, cutoff=0.8) or (
            [f"{base}.py"] if f"{base}.py" in known else []
        )
        if near:
            return f": did you mean {os.path.join(folder, near[0])!r}?"
    if name.startswith("-"):
        return ": it looks like an option; see tilework run --help"
    module = name.replace("/", ".")
    with suppress(ImportError, ValueError):
        if "." not in module and importlib.util.find_spec(module) is not None:
            return f": for the module of that name use -m {module}"
    return f" (looked in {os.path.abspath(folder or '.')!r})"


def _number(text: str, what: str, least: int) -> int:
    if not text.removeprefix("-").isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{what} must be at least {least}, got {text!r}")
    return int(text)


def _ranks(text: str) -> int:
    if text == "auto":
        return usable_cores()
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(
            f"the number of ranks must be auto or a whole number, such as 4, got {text!r}"
        )
    return _number(text, "the number of ranks", 1)


_count = partial(_number, what="the number of restarts", least=0)
_nodes = partial(_number, what="the number of nodes", least=1)


def _nodes_or_range(text: str) -> tuple[int, tuple[int, int] | None]:
    """The most hosts, and, for MIN:MAX, both."""
    if ":" not in text:
        return _nodes(text), None
    least, most = _range(text, "hosts", "1:4")
    return most, (least, most)


def _host_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(
            f"give an address of node 0 and a port, such as host-a:29500, got {text!r}"
        )
    return host, int(port)


def _range(text: str, what: str, example: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not (least.isdecimal() and colon and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise argparse.ArgumentTypeError(
            f"give the fewest and the most {what}, such as {example} (1 <= MIN <= MAX), got "
            f"{text!r}"
        )
    return int(least), int(most)


_elastic = partial(_range, what="ranks", example="2:4")


def _torchrun_binding(text: str) -> str:
    if text not in _BINDINGS:
        raise argparse.ArgumentTypeError(f"{text!r} must be one of {', '.join(_BINDINGS)}")
    return _BINDINGS[text]


def _timeout(text: str) -> timedelta:
    try:
        timeout = timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"the timeout must be a number of seconds, such as 30 or 0.5, got {text!r}"
        ) from None
    if timeout <= timedelta(0):
        raise argparse.ArgumentTypeError(f"the timeout must be longer than 0 s, got {text!r}")
    return timeout


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"a port must be a number from 1 to 65535, got {text!r}")
    return int(text)


def _backend(text: str) -> str:
    try:
        check_backend(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


# tilework store

_STORE_NOTES = """\
Runs until Ctrl-C or SIGTERM. Set TILEWORK_SECRET here and on all hosts of the job, or
whoever reaches the port can read and write the store.

  tilework store 10.0.0.1:29500
  tilework run -n 8 --nnodes 1:4 --rdzv 10.0.0.1:29500 train.py      on each host
"""


def _add_store(commands: _Commands) -> None:
    about = "serve the store of a job whose hosts come and go"
    parser = _parser(commands, "store", about, _STORE_NOTES)
    help_ = "an address of this host, which the others reach, and a free port"
    parser.add_argument("address", metavar="HOST:PORT", type=_host_port, help=help_)
    parser.set_defaults(parser=parser, command=_store)


def _store(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    host, port = options.address
    try:
        return serve_store(host, port, os.environ.get("TILEWORK_SECRET", ""))
    except (NodesError, DistNetworkError) as error:
        print(f"tilework store: {error}", file=sys.stderr)
        return 1


# tilework plan

_PLAN_NOTES = """\
Nothing is started. The script runs in this process, once for each kind of rank, on
tensors without memory. Options of tilework come before SCRIPT.

The exit status is 0, or 1 if ranks would part, or memory does not suffice.

  tilework plan --ranks 4096 --hosts 512 --memory 80GB train.py --steps 2
  tilework doctor --describe here.json    measure this machine, for --cluster here.json
"""


def _add_plan(commands: _Commands) -> None:
    about = "say what a job of N ranks needs and sends, without running it"
    usage = "tilework plan --ranks N [options] SCRIPT | -m MODULE [arguments]"
    parser = _parser(commands, "plan", about, _PLAN_NOTES, usage)
    add = parser.add_argument
    add("-n", "--ranks", type=_ranks, metavar="N", required=True, help="number of ranks")
    add("--hosts", type=_nodes, default=1, metavar="H", help="number of hosts (default: 1)")
    add("--memory", metavar="M", help='memory of a rank, such as "80GB"')
    add("--cluster", type=Path, metavar="FILE", help="a description of the machines")
    add("--all", dest="everyone", action="store_true", help="run each rank, not each kind")
    _add_program(parser)
    parser.set_defaults(parser=parser, command=lambda options: _plan(parser, options))


def _plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    program = _program(parser, options)
    # Imported late, as it loads torch.
    module = importlib.import_module("tilework.launch.planning")
    names = ("ranks", "hosts", "memory", "cluster", "everyone")
    try:
        status: int = module.plan_program(program, *(getattr(options, name) for name in names))
    except ValueError as error:
        parser.error(str(error))
    return status


# tilework doctor


def _add_doctor(commands: _Commands) -> None:
    about = "print what this machine has, and test a group of two ranks"
    parser = _parser(commands, "doctor", about, _DOCTOR_NOTES)
    parser.add_argument("--calibrate", action="store_true", help=_CALIBRATE_HELP)
    parser.add_argument("--describe", metavar="FILE", type=Path, help=_DESCRIBE_HELP)
    parser.add_argument("--rdzv", metavar="HOST:PORT", type=_host_port, help=_DOCTOR_RDZV_HELP)
    parser.add_argument("--nnodes", metavar="N", type=_nodes, default=2, help=_DOCTOR_NODES_HELP)
    parser.set_defaults(parser=parser, command=_doctor)


_DOCTOR_NOTES = """\
  tilework doctor                         does everything work here, and how fast
  tilework doctor --calibrate             measure again, after a change of the machine
  tilework doctor --rdzv host-a:29500 --nnodes 4       on each of 4 hosts, before a job
"""
_DOCTOR_RDZV_HELP = "try what hosts need of each other; an address of any of them, and a free port"
_DOCTOR_NODES_HELP = "how many hosts, on each of which this command is run (default: 2)"
_CALIBRATE_HELP = "measure again which ways of moving data are fast here, keep and print that"


_DESCRIBE_HELP = "measure a rank's arithmetic, and write FILE for tilework plan --cluster FILE"


def _doctor(options: argparse.Namespace) -> int:
    # Imported late, as they load torch: help and wrong use should not wait for that.
    status: int
    module = importlib.import_module("tilework.launch.doctor")
    if options.rdzv is not None:
        hosts = importlib.import_module("tilework.launch.doctor_hosts")
        try:
            status = hosts.doctor_of_hosts(*options.rdzv, options.nnodes)
        except NodesError as error:
            options.parser.error(str(error))
    elif options.describe is not None:
        status = module.describe(options.describe)
    else:
        status = module.calibrate() if options.calibrate else module.doctor()
    return status


# tilework explain

_EXPLAIN_NOTES = """\
DIR holds what ranks write on a fault or on SIGUSR1: TILEWORK_FLIGHT_DIR, or the
folder that tilework run names when a job has failed.

The exit status is 0 if no rank waits for another and nothing failed, 1 if something
is explained, 2 if there is no record that can be read.

  tilework explain /tmp/tilework-flight-cf49770325b428ad
  tilework explain logs/flight --json     the same, for a program
"""


def _add_explain(commands: _Commands) -> None:
    about = "diagnose flight records: who waited for whom, and why"
    parser = _parser(commands, "explain", about, _EXPLAIN_NOTES)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the records are")
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    parser.set_defaults(
        parser=parser, command=lambda options: print_diagnosis(options.folder, options.json)
    )


# tilework trace

_TRACE_NOTES = """\
DIR holds what ranks wrote with tilework run --trace DIR, or in a program with
tilework.inspect.trace(DIR).

The exit status is 0, or 2 if there is no trace that can be read.

  tilework trace trace                    who was waited for, where, how much
  tilework trace trace -o step.json       also a file for ui.perfetto.dev, and step.html
  tilework trace trace --json             the summary, for a program
"""


def _add_trace(commands: _Commands) -> None:
    about = "show what ranks did, on one timeline: who was waited for, and where"
    parser = _parser(commands, "trace", about, _TRACE_NOTES)
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the traces are")
    parser.add_argument("-o", dest="output", metavar="FILE", type=Path, help=_TRACE_OUTPUT_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    parser.set_defaults(parser=parser, command=_trace)


_TRACE_OUTPUT_HELP = "write FILE.json for Perfetto, and FILE.html, a page; FILE.html: only the page"


def _trace(options: argparse.Namespace) -> int:
    # Imported late, as it loads torch.
    module = importlib.import_module("tilework.inspect.command")
    status: int = module.show_trace(options.folder, options.output, options.json)
    return status
