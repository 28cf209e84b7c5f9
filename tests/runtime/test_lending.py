"""Stretches of shared memory that go from one process to another and back; here both ends are one process."""

import gc

import numpy as np
import pytest

from archipel.runtime import frames
from archipel.runtime.lending import Lender, borrow
from archipel.runtime.shared import Channel


@pytest.fixture
def ends():
    ours, fd = Channel.pair()
    theirs = Channel.from_fd(fd)
    yield ours, theirs
    ours.close()
    theirs.close()


def hand_over(lender: Lender, filled, ends) -> frames.Stretch:
    """Send what was filled; return the stretch as the borrower reads it."""
    ours, theirs = ends
    stretch, fd = lender.lend(filled)
    ours.send(frames.encode(frames.Asked(frames.Save(3), stretch)), [fd])
    [frame] = theirs.receive(1.0)
    asked = frames.decode(frame)
    assert isinstance(asked, frames.Asked) and asked.stretch is not None and asked.action == frames.Save(3)
    return asked.stretch


def where(view: np.ndarray) -> int:
    return view.__array_interface__["data"][0]


def test_what_was_filled_is_read_at_the_other_end(ends) -> None:
    lender = Lender(kept=2)
    filled = lender.take(10_000)
    filled[:] = 7
    got = borrow(ends[1], hand_over(lender, memoryview(filled), ends))
    assert got.nbytes == 10_000 and (got == 7).all() and not ends[1].descriptors


def test_a_stretch_is_used_again_once_it_is_back_and_not_before(ends) -> None:
    lender = Lender(kept=2)
    first = lender.take(10_000)
    begin = where(first)
    stretch = hand_over(lender, first, ends)
    del first
    gc.collect()
    second = lender.take(10_000)
    assert where(second) != begin and lender.away == 1
    lender.free(stretch.number)
    assert where(lender.take(10_000)) == begin and lender.away == 0


def test_the_borrower_is_told_when_nobody_refers_to_it_any_more(ends) -> None:
    lender, back = Lender(kept=2), []
    stretch = hand_over(lender, lender.take(100), ends)
    got = memoryview(borrow(ends[1], stretch, back.append))
    gc.collect()
    assert back == []
    del got
    gc.collect()
    assert back == [stretch.number]


def test_memory_lent_once_outlives_its_lender_as_long_as_it_is_read(ends) -> None:
    lender = Lender(kept=2)
    filled = lender.take(5000, once=True)
    filled[:] = 9
    got = borrow(ends[1], hand_over(lender, filled, ends))
    lender.free(0)
    del filled
    lender.close()
    gc.collect()
    assert (got == 9).all()
