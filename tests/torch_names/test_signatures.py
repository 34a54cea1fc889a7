"""Each public name, member and keyword of the installed torch is taken here, or listed with why."""

from __future__ import annotations

import inspect

import pytest
import torch

import tilework.distributed as dist
from tests.tables import each
from tests.torch_names import page
from tests.torch_names.compare import differences, row_of
from tilework.from_torch import DIFFERENCES, LEFT_OUT, MODULES, LeftOut


@pytest.fixture(scope="module")
def found() -> list[tuple[str, str]]:
    return list(differences())


def test_what_is_not_taken_is_listed_with_a_reason(found: list[tuple[str, str]]) -> None:
    unexplained = [(package, name) for package, name in found if row_of(package, name) is None]
    assert not unexplained


@pytest.mark.skipif(torch.__version__ < "2.13", reason="an older torch has less to be listed")
def test_every_row_of_the_list_is_needed(found: list[tuple[str, str]]) -> None:
    used = {id(row_of(package, name)) for package, name in found}
    assert not [row.names for row in DIFFERENCES if id(row) not in used]


@each("row", LEFT_OUT)
def test_what_is_left_out_raises_by_name(row: LeftOut) -> None:
    for name in row.names:
        assert not hasattr(__import__(row.package, fromlist=["_"]), name)
        with pytest.raises(ImportError, match=f"has no {name}, which .* Use "):
            exec(f"from {row.package} import {name}")


def test_the_modules_of_the_table_are_there() -> None:
    for ours in set(MODULES.values()):
        assert __import__(ours, fromlist=["_"])


def test_the_page_is_made_of_the_table() -> None:
    """``python -m tests.torch_names`` writes it."""
    assert page.PATH.read_text() == page.text()


def test_arguments_of_functions_have_the_same_order() -> None:
    for name in dist.__all__:
        theirs, ours = getattr(torch.distributed, name, None), getattr(dist, name)
        if inspect.isfunction(theirs) and callable(ours):
            asked = list(inspect.signature(theirs).parameters)
            taken = list(inspect.signature(ours).parameters)
            known = [each for each in asked if each in taken and each != "kwargs"]
            if name == "barrier" and "timeout" in known:  # it is a keyword only
                known.remove("timeout")
            assert taken[: len(known)] == known, name
