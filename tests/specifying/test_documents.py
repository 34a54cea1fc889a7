"""The specifying documents' own tests, with their imports changed.

``TILEWORK_SEEDS=FOLDER make test ARGS=tests/specifying`` runs them: the folder has the documents.
"""

from __future__ import annotations

import os

import pytest

from tests.specifying.documents import Document, documents

#: Tests that do not run here, by what their document's name has, and why.
LEFT_OUT = {
    "TestCreateTensorFromParams.test_empty": "of a private helper, which there is not",
    "TestShardedTensorChunked.test_cleanup": "looks into a private table of torch's",
    "TestShardedTensorEnumerable.test_sharded_tensor_to_cuda": "needs two kinds of devices",
    "TestShardedTensorEnumerable.test_sharded_tensor_to_test": "needs two kinds of devices",
    "test_init_from_local_shards_invalid_local_shards": "needs two kinds of devices",
    "test_init_from_local_shards_invalid_pin_memory": "needs an accelerator, for pinned memory",
    "004.TestShardedTensorEnumerable.test_sharded_tensor_metadata": "the document is cut in it",
    "PythonProcessGroupExtensionTest.test_is_backend_available": (
        "asserts that nobody has registered a backend yet, and ranks here are threads"
    ),
}
#: The number of tests that each document's code has: of one that lost its fence nothing runs.
FEWEST = {"document_000": 60, "document_002": 7, "document_003": 20, "document_004": 25}


def _cases() -> list[tuple[Document, str, str]]:
    return [(document, *test) for document in documents() for test in document.tests()]


def _name(document: Document, kind: str, method: str) -> str:
    return f"{document.name.removeprefix('document_')}.{kind}.{method}"


def _why_not(name: str) -> str:
    return next((why for key, why in LEFT_OUT.items() if name.endswith(key)), "")


def test_the_documents_are_there() -> None:
    if not os.environ.get("TILEWORK_SEEDS"):
        pytest.skip("TILEWORK_SEEDS names no folder of specifying documents")
    found = {document.name: len(list(document.tests())) for document in documents()}
    assert all(found.get(name, 0) >= count for name, count in FEWEST.items()), found


@pytest.mark.parametrize(
    ("document", "kind", "method"),
    [
        pytest.param(*case, id=_name(*case), marks=[pytest.mark.skip(why)] if why else [])
        for case in _cases()
        for why in [_why_not(_name(*case))]
    ],
)
def test_of_a_document(document: Document, kind: str, method: str) -> None:
    document.namespace[kind].run_test(method)
