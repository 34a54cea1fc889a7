"""The pages on the packages, and the index of behaviours, name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.faces import FACES

_ROOT = Path(__file__).parents[1]
PAGES = _ROOT / "docs/architecture"


@pytest.mark.parametrize("package", FACES)
def test_the_page_of_a_package_names_the_faces(package: str) -> None:
    text = " ".join((PAGES / f"{package}.md").read_text().split())
    known = {f"{package}.{inner}" if inner else f"tilework.{package}" for inner in FACES[package]}
    assert not [name for name in known if name not in text and name.split(".", 1)[1] not in text]


def test_the_files_of_the_index_exist() -> None:
    files = re.findall(r"`((?:src|csrc)/\S+\.\w+)`", (PAGES / "README.md").read_text())
    assert len(files) > 40
    assert not [name for name in files if not (_ROOT / name).is_file()]


@pytest.mark.parametrize("package", FACES)
def test_the_files_that_a_page_names_exist(package: str) -> None:
    text = (PAGES / f"{package}.md").read_text()
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", text)
    places = [_ROOT / "src/tilework" / package, _ROOT / "src/tilework", _ROOT]
    assert not [n for n in named if not any((place / n).exists() for place in places)]
