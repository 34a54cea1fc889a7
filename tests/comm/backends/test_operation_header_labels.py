from __future__ import annotations

import torch

from tilework.comm.backends.operation_header import ANY, call_label, labels_agree, message_label


def test_labels_tell_dtypes_that_look_alike_apart() -> None:
    tensors = [
        torch.zeros(4, dtype=torch.float8_e5m2),
        torch.zeros(4, dtype=torch.float8_e4m3fn),
        torch.zeros(4, dtype=torch.complex64),
        torch.zeros(4),
    ]
    assert len({message_label(tensor) for tensor in tensors}) == 4
    assert len({call_label("all_gather", tensor) for tensor in tensors}) == 4


def test_parts_of_uneven_sizes_may_differ_in_any_dim() -> None:
    labels = [call_label("all_gather", torch.zeros(37, n)) for n in (14, 13)]
    assert labels_agree(labels, even=False)
    assert not labels_agree(labels, even=True)
    flat = call_label("all_gather", torch.zeros(37 * 13))
    assert not labels_agree([labels[0], flat], even=False)


def test_what_has_no_elements_goes_with_anything() -> None:
    assert call_label("all_gather", torch.zeros(0)) == ANY
    assert labels_agree([ANY, call_label("all_gather", torch.zeros(2, 3))], even=False)


def test_parts_of_a_shape_each_are_compared_by_their_number_of_dims() -> None:
    labels = [call_label("all_gather", torch.zeros(s), alike=False) for s in ((4, 2), (2, 4))]
    assert labels_agree(labels, even=True)
