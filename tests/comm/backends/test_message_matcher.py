"""Messages and receives, paired in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tilework.comm.backends.completion import PythonCompletion
from tilework.comm.backends.message_matcher import ANY_SOURCE, MessageMatcher, Receive


class CountedTag(int):
    """A tag that counts comparisons."""

    comparisons: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        CountedTag.comparisons += 1
        return super().__eq__(other)

    __hash__ = int.__hash__


@dataclass(eq=False)
class Message:
    source: int
    tag: int


def test_a_message_is_compared_with_each_receive_at_most_once() -> None:
    count = 50
    matcher: MessageMatcher[Message] = MessageMatcher()
    for number in range(count):
        receive = Receive(0, number, torch.zeros(1), 1.0, 1.0, PythonCompletion())
        assert matcher.add_receive(receive) is None
    before = CountedTag.comparisons
    for number in reversed(range(count)):
        matched = matcher.add_message(Message(0, CountedTag(number)))
        assert matched is not None
        assert matched.tag == number
    assert not matcher.has_receives()
    assert 0 < CountedTag.comparisons - before <= count * count


def test_the_first_message_and_the_first_receive_that_fit_are_paired() -> None:
    matcher: MessageMatcher[Message] = MessageMatcher()
    first, second, other = Message(1, 0), Message(2, 0), Message(1, 5)
    for message in (other, first, second):
        assert matcher.add_message(message) is None
    from_2, from_any, also, tagged = (
        Receive(source, tag, torch.zeros(1), 1.0, 1.0, PythonCompletion())
        for source, tag in ((2, 0), (ANY_SOURCE, 0), (ANY_SOURCE, 0), (ANY_SOURCE, 5))
    )
    assert matcher.add_receive(from_2) is second
    assert matcher.add_receive(from_any) is first
    assert matcher.add_receive(also) is None
    assert matcher.add_receive(tagged) is other
    assert matcher.add_receive(from_2) is None
    assert matcher.add_message(second) is also
    assert matcher.add_message(second) is from_2
