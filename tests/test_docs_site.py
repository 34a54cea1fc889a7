"""The documentation's site has a page for each public package (``make docs`` checks its links)."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.docs_search import INDEX, Search, sections_of_site, sections_of_sources
from tests.test_package import PUBLIC

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def api() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/site/api_pages.py"))


def test_each_public_package_has_a_page(api: dict[str, Any]) -> None:
    assert set(PUBLIC) <= api["PACKAGES"]


def test_each_page_of_a_package_names_what_exists(api: dict[str, Any]) -> None:
    sources = ROOT / "src"
    for package in api["PACKAGES"]:
        path = sources / package.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), package


def test_each_public_name_is_on_one_page(api: dict[str, Any]) -> None:
    pages = [page for page in api["PAGES"] if page.modules]
    for package in {page.package for page in pages}:
        shown = [n for page in pages if page.package == package for n in api["names_of"](page)]
        assert sorted(shown) == sorted(api["public_names"](package))


def test_built_pages_of_the_api_have_whole_sentences_and_no_constructors() -> None:
    pages = sorted((INDEX.parents[1] / "api").glob("*.html"))
    if not pages:
        pytest.skip("the site is not built: make docs")
    for page in pages:
        text = page.read_text().partition("<article")[2].partition("</article>")[0]
        assert ".__new__" not in text, page.name
        for item in re.findall(r'(?s)<li class="doc-section-item field-body">(.*?)</li>', text):
            words = " ".join(re.sub("<[^>]+>", "", item).split())
            assert words.endswith((".", ")")), f"{page.name}: {words}"


def test_each_warning_begins_with_a_headline() -> None:
    """``> [!NOTE]`` and the like, which docs/site/hooks.py makes admonitions of."""
    begin = re.compile(r"(?m)^> \[!(\w+)\]\n(.*)")
    found = [
        (path.name, kind, line)
        for path in (ROOT / "docs").rglob("*.md")
        for kind, line in begin.findall(path.read_text())
    ]
    assert len(found) > 15
    assert not [
        each
        for each in found
        if each[1] not in ("NOTE", "TIP", "WARNING") or not each[2].startswith("> **")
    ]


#: Words that readers look for, and the page that has to come first.
FOUND = {
    "quickstart": "how-to/first-steps.md",
    "getting started": "how-to/first-steps.md",
    "tutorial": "tutorial.md",
    "install": "how-to/first-steps.md",
    "save_pretrained": "how-to/hugging-face.md",
    "Trainer": "how-to/hugging-face.md",
    "gradient accumulation": "how-to/data-parallel.md",
    "no_sync": "how-to/data-parallel.md",
    "deadlock": "how-to/debug-a-hang.md",
    "explain hang": "how-to/debug-a-hang.md",
    "torchrun": "how-to/launch.md",
    "notebook": "how-to/notebooks.md",
    "Jupyter": "how-to/notebooks.md",
    "slurm": "how-to/clusters.md",
    "resume checkpoint": "how-to/checkpoints.md",
    "safetensors": "how-to/checkpoints.md",
    "ColwiseParallel": "how-to/tensor-parallel.md",
    "restarts": "how-to/elastic.md",
    "straggler": "how-to/elastic.md",
    "killed ranks": "how-to/elastic.md",
    "LoRA": "how-to/lora.md",
    "accelerate": "how-to/torch-programs.md",
    "CollectiveMismatchError": "errors/index.md",
    "TILEWORK_TRACEBACK": "environment.md",
    "DistributedSampler": "how-to/load-data.md",
    "fullgraph": "how-to/make-a-step-fast.md",
    "capture step": "how-to/make-a-step-fast.md",
    "mixed precision": "how-to/data-parallel.md",
    "gradient clipping": "how-to/data-parallel.md",
    "save checkpoint": "how-to/checkpoints.md",
    "huggingface": "how-to/hugging-face.md",
    "export weights": "how-to/hugging-face.md",
    "job hangs": "how-to/debug-a-hang.md",
    "hang": "how-to/debug-a-hang.md",
    "OOM": "how-to/memory.md",
    "out of memory": "how-to/memory.md",
    "freeze parameters": "how-to/data-parallel.md",
    "freeze": "how-to/data-parallel.md",
    "export hugging face": "how-to/hugging-face.md",
    "GPU": "how-to/gpus.md",
    "cuda": "how-to/gpus.md",
    "resume training": "how-to/checkpoints.md",
    "memory": "how-to/memory.md",
    "multi node": "how-to/many-hosts.md",
    "speed up": "how-to/make-a-step-fast.md",
    "activation checkpointing": "how-to/memory.md",
    "fsdp": "how-to/data-parallel.md",
}


@pytest.fixture(scope="module")
def search() -> Search:
    return Search(sections_of_sources())


@pytest.mark.parametrize("query", FOUND)
def test_search_finds_the_right_page_first(search: Search, query: str) -> None:
    assert search.pages(query)[0] == FOUND[query], search.pages(query)[:4]


def test_search_of_a_built_site_finds_them_too() -> None:
    if not INDEX.exists():
        pytest.skip("the site is not built: make docs")
    built = Search([s for s in sections_of_site(INDEX) if not s.page.startswith("api/")])
    wrong = {
        query: found
        for query, page in FOUND.items()
        if page not in (found := built.pages(query))[:3]
    }
    assert not wrong


def test_the_charts_show_the_tables() -> None:
    drawing = runpy.run_path(str(ROOT / "docs/site/chart.py"))
    readme, steps = drawing["README"].read_text(), drawing["STEPS"].read_text()
    assert drawing["CHART"].read_text() == drawing["chart"](readme)
    assert drawing["RESULTS"].read_text() == drawing["results"](readme, steps)
