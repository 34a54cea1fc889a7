"""The promises of the contract that a backend may lack; the backend's class lists them."""

from __future__ import annotations

import enum


class Capability(enum.Enum):
    """A promise of the contract that a backend need not keep, if the class lists it in ``lacks``.

    The contract's test suite (:mod:`tilework.testing.groups`) skips the tests of these promises.
    """

    #: Operations on tensors of different sizes raise NotImplementedError.
    UNEVEN_SIZES = "tensors of different sizes in all_gather, gather, scatter and reduce_scatter"
    #: Ranks that call different operations get wrong data, hang or die.
    COMPARISON = "comparing what ranks are about to do"
    #: Ranks do not notice that their tensors have parted, except at an optimizer's steps.
    PROVENANCE = "comparing how the tensors came about that DTensors communicate"
    #: The order differs, but all ranks get the same bits.
    RANK_ORDER = "combining the ranks in ascending order"
    #: A sum's bits depend on the operation, the place in the tensor, and the tensor's size.
    SAME_BITS = "the same bits for the same elements, whatever the operation"
    #: The result of a comparison with NaN depends on the order.
    NAN = "handing on NaN in MIN and MAX"
    #: Sums of 16-bit floats are rounded more than once.
    WIDE_SUMS = "adding 16-bit floats in float32 and rounding once"
