"""``tilework checkpoint``: show, verify, diff and convert, as commands with an exit status."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from tilework import checkpoint
from tilework.checkpoint.format import FORMATS
from tilework.checkpoint.index_text import read_index
from tilework.checkpoint.progress import Progress
from tilework.checkpoint.save_planning import FILE_BYTES
from tilework.checkpoint.showing import show
from tilework.checkpoint.url_storage import storage_at
from tilework.errors import CheckpointError
from tilework.show import printable

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


_NOTES = """\
  tilework checkpoint show run/step-00000100              tensors and layouts of one
  tilework checkpoint COMMAND --help                      the options of a command
"""
_EXAMPLES = {
    "show": ("run/step-00000100", "model.safetensors 'model.layers.0.*'"),
    "verify": ("run/step-00000100", "s3://bucket/run/step-00000100"),
    "diff": ("run/step-00000100 run/step-00000200", "mine theirs"),
    "convert": ("run/step-00000100 model.safetensors", "dcp-folder mine --strip module."),
}


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    examples = "\n".join(f"  tilework checkpoint {name} {each}" for each in _EXAMPLES[name])
    formatter = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(name, help=summary, epilog=examples, formatter_class=formatter)


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands and their options to the parser of ``tilework checkpoint``."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    shown = _add(commands, "show", "tensors, layouts, sizes and checksums")
    shown.add_argument(
        "path", metavar="PATH", help="a checkpoint, a folder of checkpoints, or safetensors"
    )
    shown.add_argument(
        "names", metavar="NAME", nargs="*", default=[], help="patterns, such as 'model.*'"
    )
    shown.set_defaults(work=_show)
    verified = _add(commands, "verify", "read all of it, and compare checksums")
    verified.add_argument("path", metavar="PATH", help="a checkpoint: a folder, or a URL")
    verified.set_defaults(work=_verify)
    compared = _add(commands, "diff", "what differs between two checkpoints")
    compared.add_argument("a", metavar="A")
    compared.add_argument("b", metavar="B")
    compared.set_defaults(work=_diff)
    converted = _add(
        commands, "convert", "from and to safetensors, DCP folders and files of torch.save"
    )
    add = converted.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="a checkpoint, safetensors, a DCP folder, a torch.save file",
    )
    add("target", metavar="TARGET", help="a path that is not there yet")
    add("--to", choices=FORMATS, help="the format (default: by TARGET's name, else tilework)")
    add("--names", nargs="+", metavar="NAME", help="only tensors that match, such as 'model.*'")
    add("--strip", default="", metavar="TEXT", help="taken from the beginning of names")
    add("--prefix", default="", metavar="TEXT", help="put before names")
    add("--file-bytes", type=_bytes, default=FILE_BYTES, metavar="N", help="such as 5G")
    converted.set_defaults(work=_convert)


def main(arguments: Sequence[str]) -> int:
    """Run ``tilework checkpoint``; return the exit status. Wrong arguments raise SystemExit(2)."""
    parser = argparse.ArgumentParser(
        "tilework checkpoint", epilog=_NOTES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_commands(parser)
    return run_command(parser.parse_args(arguments))


def run_command(options: argparse.Namespace) -> int:
    """Run a parsed command; 0: all is well, 1: damage or a difference was found, 2: it failed."""
    try:
        status: int = options.work(options)
    except (CheckpointError, OSError, ImportError, TypeError, ValueError) as error:
        print(printable(f"tilework checkpoint: {error}"), file=sys.stderr)
        return 2
    return status


def _show(options: argparse.Namespace) -> int:
    show(options.path, options.names or None)
    return 0


def _verify(options: argparse.Namespace) -> int:
    total = read_index(storage_at(options.path)).nbytes
    with Progress(f"verifying {options.path}", total) as progress:
        problems = checkpoint.verify(options.path, progress)
    for problem in problems:
        print(printable(problem))
    if not problems:
        print(f"{options.path}: {total:,} bytes are as they were written")
    return 1 if problems else 0


def _diff(options: argparse.Namespace) -> int:
    found = checkpoint.diff(options.a, options.b)
    for each in found:
        print(printable(f"{each.name}: {each.text}"))
    return 1 if found else 0


def _convert(options: argparse.Namespace) -> int:
    settings = checkpoint.ConvertOptions(
        options.names, options.strip, options.prefix, options.file_bytes
    )
    checkpoint.convert(options.source, options.target, options.to, settings)
    return 0


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)([kmgt]?)(i?b)?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"expected a number of bytes, such as 500M or 5G, got {text!r}"
        )
    return int(match[1]) * _UNITS[match[2]]
