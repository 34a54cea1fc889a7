"""The page of what torch has and tilework has not, made of the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tilework.from_torch import DIFFERENCES, LEFT_OUT, MODULES

PATH = Path(__file__).parents[2] / "docs" / "how-to" / "left-out.md"

_HEAD = """# What torch has and tilework has not, and why

This page is written by `python -m tests.torch_names` from the table in
[`from_torch.py`](../../src/tilework/from_torch.py). The tests compare every public name, member
and keyword of the installed torch (2.6 to 2.13) with it: tilework has every name that is not listed
here, under the same name.

## Modules

A program changes its imports as this table says. The underscored names of
`torch.distributed.distributed_c10d` that programs import are in the module of that name here.

| torch | tilework |
|---|---|
"""

_LEFT_OUT = """
## Left out on purpose

Each name raises where one looks for it, an ImportError or an AttributeError, and says what to use:

```python
import tilework.parallel

try:
    from tilework.parallel import FullyShardedDataParallel
except ImportError as error:
    assert "Use fully_shard(module)" in str(error)
```

"""

_SMALLER = """
## Smaller differences

Names, members and keywords that there are not, by package. `*` stands for anything.
"""


def text() -> str:
    """The page."""
    return _HEAD + "".join([*_modules(), _LEFT_OUT, *_left_out(), _SMALLER, *_differences()])


def _modules() -> Iterator[str]:
    for theirs, ours in MODULES.items():
        yield f"| `{theirs}` | `{ours}` |\n"


def _left_out() -> Iterator[str]:
    yield "| torch | why | use |\n|---|---|---|\n"
    for row in LEFT_OUT:
        names = ", ".join(f"`{name}`" for name in row.names)
        yield f"| {names} of `{row.module}` | {row.why} | {_cell(row.instead)} |\n"


def _differences() -> Iterator[str]:
    for package in dict.fromkeys(row.package for row in DIFFERENCES):
        yield f"\n### {package}\n\n| not there | why |\n|---|---|\n"
        for row in DIFFERENCES:
            if row.package == package:
                yield f"| {', '.join(f'`{name}`' for name in row.names)} | {_cell(row.why)} |\n"


def _cell(content: str) -> str:
    return content.replace("|", "\\|").replace("*", "\\*") if "`" not in content else content
