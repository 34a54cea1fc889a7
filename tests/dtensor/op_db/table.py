"""``docs/operators.md``: which operators run on sharded tensors, and which gather them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[3] / "docs" / "operators.md"
NEVER, PARTLY, ALWAYS = "never gathered", "some calls are gathered", "gathered"
NOT_CALLED = "no sample that torch itself runs"

_HEAD = """\
# Operators

DTensor takes all operators. Most run on each rank's part of the tensors, or are composed of
operators that do. For the others the tensors are gathered: the result is right, but every rank
gets all of the bytes, and a `GatherWarning` says so once. Which is which was found by calling
each of the {count} operators of the database that torch has for its own tests with its sample
arguments, in each of its forms (function, method, in place, `out=`), on meshes of 2 and of 2 x 2
ranks, sharded along the first dim, the last, and at random. Only `as_strided` and its like,
`resize_` and `resize_as_` are refused, since they ask for the memory of the whole tensor.

{never} operators were never gathered, {partly} for some calls, {always} always; {none} have no
samples that can be called here. {whole} operators move a sharded dim whole in calls with the first
tensor alone sharded, along each dim in turn, on 2 ranks: a rank gets all of the dim that the call
looks along. Some samples are so small that nothing less would do. Sorts and quantiles do it since
an element may belong on any rank, so that nearly all would move anyway; `cummax` and `cummin`,
since ranks exchange no pairs of a value and an index; adaptive pools, where windows differ in size.

Results have the strides of plain results and share memory where these do, whether the first tensor
is contiguous, transposed, in `channels_last`, or a slice with steps (39,180 calls in float64).
Exceptions: `max_unpool2d`; images of one channel or row, whose strides fit both memory formats
(`conv_transpose2d`, `pixel_unshuffle`, `max_pool1d`, reductions that keep dims); circular padding
of images; and `unsafe_split` and its like, whose results are copies.

`python -m tests.dtensor.op_db --table` writes this file.

| operator | calls | | moves a sharded dim whole |
|---|---|---|---|
"""


def read(document: Path = DOCUMENT) -> dict[str, str]:
    """What the document says of each operator."""
    return {name: what for name, _, what, _ in _rows(document)}


def write(
    names: Sequence[str],
    found: Sequence[Mapping[str, Any]],
    whole: Mapping[str, Sequence[bool]],
    document: Path = DOCUMENT,
) -> None:
    """Write the document anew, from what calls of all operators came to."""
    calls: dict[str, list[bool]] = defaultdict(list)
    for one in found:
        calls[one["operator"]].append(bool(one.get("gathered")))
    rows = [
        (name, len(calls[name]), _describe(calls[name]), _some(whole.get(name, [])))
        for name in names
    ]
    document.write_text(_text(rows))


def written_again(document: Path = DOCUMENT) -> str:
    """The text that would be written if calls came to what the document's table says."""
    return _text(_rows(document))


def _rows(document: Path) -> list[tuple[str, int, str, str]]:
    rows = [line.split("|") for line in document.read_text().splitlines() if line.startswith("| `")]
    return [
        (row[1].strip().strip("`"), int(row[2]), row[3].strip(), row[4].strip()) for row in rows
    ]


def _text(rows: Sequence[tuple[str, int, str, str]]) -> str:
    counts = Counter(what for _, _, what, _ in rows)
    head = _HEAD.format(
        count=len(rows),
        never=counts[NEVER],
        partly=counts[PARTLY],
        always=counts[ALWAYS],
        none=counts[NOT_CALLED],
        whole=sum(bool(whole) for *_, whole in rows),
    )
    return head + "".join(
        f"| `{name}` | {count} | {what} | {whole} |\n" for name, count, what, whole in rows
    )


def _some(whole: Sequence[bool]) -> str:
    return "yes" if any(whole) and all(whole) else f"{sum(whole)} of {len(whole)}" * any(whole)


def _describe(gathered: Sequence[bool]) -> str:
    if not gathered:
        return NOT_CALLED
    return PARTLY if any(gathered) and not all(gathered) else ALWAYS if any(gathered) else NEVER
