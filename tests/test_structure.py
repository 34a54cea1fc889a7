"""Names of files: tests are named after their sources, and a name in a package means one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.architecture.complexity import complexity, functions_above
from tests.architecture.imports import tree
from tests.check import SHARED, modules_in, own_tests
from tests.tested_by import ROWS, guards, row_of

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGE = ROOT / "src" / "tilework"
#: The sources of a folder of tests, if they are more than the package of that name.
SOURCES = {
    **{f"csrc/{folder.name}": [folder] for folder in (ROOT / "csrc").iterdir() if folder.is_dir()},
    "examples": [ROOT / "examples"],
    "benchmarks": [ROOT / "benchmarks"],
    **{
        folder: [PACKAGE / folder, PACKAGE / shared]
        for shared, folders in SHARED.items()
        for folder in folders
    },
}

#: The most functions of the sources with a complexity above 15: lower it with the number.
MOST_COMPLEX = 15

#: Folders and files about no source alone, and why.
ABOUT_MORE = {
    "chaos": "random faults in random programs, on every backend",
    "capture/ordinary": "ordinary programs of all kinds, captured",
    "capture/test_size_programs.py": "random programs that look at sizes, captured",
    "csrc/simulation": "interleavings of the whole core, and what they are drawn with",
    "mutants": "small faults anywhere, and whether anything notices them",
    "models": "models that nobody here wrote: Hugging Face's, parallel in each way",
    "faults": "ranks that die, stop, or never come: whatever notices it",
    "gpu": "programs on CUDA tensors, of every package",
    "fuzz": "whole programs at random, on DTensors and on plain tensors",
    "checkpoint/test_any_state.py": "random states: saving, reading, loading, other libraries",
    "specifying": "the test suites in the specifying documents",
    "torch_names": "names, members and keywords of the installed torch",
    "dtensor/module_db": "torch's databases of modules and optimizers",
    "dtensor/op_db": "torch's database of operators: all rules at once",
    "dtensor/test_api.py": "distribute_tensor and distribute_module, as in torch's test_api.py",
    "dtensor/test_models.py": "whole models, of many operators",
    "dtensor/test_training.py": "what a training loop calls: optimizers, clipping, casts, hooks",
    "sharded/test_training.py": "sharding, training, resharding and saving together",
    "parallel/lives": "whole lives of models at random, in each way of wrapping",
    "parallel/programs": "training programs of many kinds, in each way of wrapping",
    "parallel/test_held_memory.py": "what ways of data parallelism hold, by the page's formula",
    "parallel/test_composition.py": "ways of data parallelism beside each other and the rest",
    "distributed/test_public_names.py": "all names of the façade",
    "distributed/test_like_torch.py": "keywords and names that programs of torch.distributed use",
    "torch_backend/test_accelerate.py": "a program of accelerate's users",
    "clients": "programs of libraries above torch.distributed, each beside Gloo",
    "torch_backend/test_clients.py": "some of these programs, with what the suite installs",
    "torch_backend/test_checkpoint.py": "torch.distributed.checkpoint on tilework's groups",
    "torch_backend/test_dtensors.py": "DTensors and meshes of both libraries in one program",
    "torch_backend/test_pipelining.py": "torch's own pipelines and FSDP1 on tilework's groups",
    "torch_backend/test_ddp.py": "torch's DistributedDataParallel on tilework's groups",
    "torch_backend/test_training.py": "torch's own parallelisms on tilework's groups",
    "test_docs.py": "the pages of docs/",
    "test_docs_architecture.py": "the pages on packages",
    "test_docs_site.py": "the site made of docs/",
    "test_docstrings.py": "the examples in all docstrings",
    "test_layers.py": "the imports of all modules",
    "test_package.py": "the package as it is installed",
    "test_structure.py": "the tests themselves",
    "test_style.py": "the style of all sources",
    "test_without_linux.py": "all that a system without Linux's calls can have",
}

#: Modules of so many lines or more have tests of their own name, or listed guards.
LONG = 100

SUFFIXES = {".py", ".cpp", ".h"}

#: Names of modules that a package has twice, and why.
SAME_MODULES = {
    "comm/internal": "each lists what other packages use of a folder",
    "distributed/functional": "distributed.nn.functional mirrors torch's module of that path",
}

#: Classes that have one name in two modules, and why.
SAME_CLASSES = {
    "Shard": "torch's names: a placement of DTensors, and a shard of ShardedTensors",
}


def names_in(folder: Path) -> set[str]:
    """The modules, packages and public names that a file of tests may be named after."""
    names = {path.stem for path in folder.glob("[!_]*") if path.is_dir() or path.suffix in SUFFIXES}
    init = folder / "__init__.py"
    if init.exists():
        for node in ast.walk(ast.parse(init.read_text())):
            if isinstance(node, ast.alias):
                names.add(node.asname or node.name)
    return names


def is_about_more(path: Path) -> bool:
    here = path.relative_to(TESTS)
    return any(str(each) in ABOUT_MORE for each in (here, *here.parents))


def test_files_of_tests_are_named_after_sources() -> None:
    lost = []
    for path in sorted(TESTS.rglob("test_*.py")):
        folder = path.parent.relative_to(TESTS)
        names = {n for each in SOURCES.get(str(folder), [PACKAGE / folder]) for n in names_in(each)}
        subject = path.stem.removeprefix("test_")
        named = any(f"{subject}_".startswith(f"{name}_") for name in names)
        if not named and not is_about_more(path):
            lost.append(str(path.relative_to(TESTS)))
    assert not lost


def test_exceptions_are_needed() -> None:
    assert not [name for name in ABOUT_MORE if not (TESTS / name).exists()]


def test_paths_of_tests_that_are_written_anywhere_exist() -> None:
    pages = [
        *ROOT.glob("*.md"),
        ROOT / "Makefile",
        *ROOT.glob("docs/**/*.md"),
        *TESTS.rglob("*.py"),
    ]
    named = [
        (page.name, path)
        for page in pages
        if page.name != "CHANGELOG.md"
        for path in re.findall(r"(?<![\w./])tests/[\w/]+\.py", page.read_text())
    ]
    assert not [(page, path) for page, path in named if not (ROOT / path).exists()]


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_long_modules_have_tests_of_their_own_name_or_fit_a_row() -> None:
    alone = [
        str(here)
        for path in sources()
        if path.name != "__init__.py"
        and len(path.read_text().splitlines()) >= LONG
        and not own_tests(path.relative_to(ROOT))
        and row_of(here := path.relative_to(PACKAGE)) is None
    ]
    assert not alone, f"add rows to tests/tested_by.py for {alone}"


def test_each_row_is_the_first_of_a_module_and_has_tests() -> None:
    used = {row_of(path.relative_to(PACKAGE)) for path in sources()}
    assert not {*ROWS} - used, "rows of tests/tested_by.py that fit no module, or none first"
    lost = [name for number in ROWS for name in guards(number) if not modules_in(TESTS / name)]
    assert not lost


def test_no_base_name_of_a_module_stands_twice_below_a_package() -> None:
    homes = defaultdict(list)
    for path in sources():
        module = path.parent if path.name == "__init__.py" else path.with_suffix("")
        here = module.relative_to(PACKAGE)
        if len(here.parts) > 1:
            homes[f"{here.parts[0]}/{here.name}"].append(str(here))
    twice = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert {name: paths for name, paths in twice.items() if name not in SAME_MODULES} == {}
    assert SAME_MODULES.keys() <= twice.keys()


def test_a_class_name_means_one_thing() -> None:
    homes = defaultdict(list)
    for path in sources():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    twice = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert {name: paths for name, paths in twice.items() if name not in SAME_CLASSES} == {}
    assert SAME_CLASSES.keys() <= twice.keys()


def test_complexity_counts_branches_loops_handlers_and_operators() -> None:
    code = """
def f(a, b):
    if a and b or a:
        return [x for x in a if x]
    try:
        g = lambda: 1 if a else 2
    except ValueError:
        pass
    while b:
        pass
"""
    assert complexity(ast.parse(code)) == 8


def test_functions_that_are_hard_to_read_become_fewer() -> None:
    found = sorted(functions_above(), reverse=True)
    assert len(found) <= MOST_COMPLEX, "\n".join(f"{n} {name}" for n, name in found)
