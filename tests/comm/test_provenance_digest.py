"""The next step that an error names, by what failed."""

from __future__ import annotations

from tilework.comm.provenance_digest import ADVICE_ON_PASSES, OF_A_PASS, advice


def test_ranks_that_part_in_their_passes_are_told_what_to_look_for() -> None:
    text = f"all_reduce for backward pass 3 of DDP, {OF_A_PASS} 2"
    assert advice(text) == f" {ADVICE_ON_PASSES}"
    assert advice("all_reduce") == ""


def test_a_rank_that_died_has_not_parted_from_the_others() -> None:
    assert advice(f"all_reduce for backward pass 3 of DDP, {OF_A_PASS} 2", has_died=True) == ""
    assert "see that rank's traceback" in advice("all_reduce of a DTensor", has_died=True)
