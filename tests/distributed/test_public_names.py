"""The façade's names are public, and documented."""

from __future__ import annotations

import inspect

import tilework.distributed as dist


def test_what_seeds_use_with_an_underscore_is_public() -> None:
    for name in (
        "store_based_barrier",
        "get_default_store",
        "get_default_group",
        "rank_not_in_group",
        "make_premul_sum",
        "coalescing_manager",
    ):
        assert callable(getattr(dist, name))


def test_everything_public_is_documented() -> None:
    for name in dist.__all__:
        thing = getattr(dist, name)
        if callable(thing):
            assert inspect.getdoc(thing), name
