"""Stretches of shared memory that one process lends to another, whole payloads at a time.

Between a gossip peer's trainer and its courier (DESIGN.md, section 1) pass whole models: an offer, one that
came in, a state. Whoever fills a stretch owns it, hands its descriptor over with the frame that names it, and
has it back with `Free`; stretches of offers are used again, round after round, for fresh memory costs its
page faults.

Invariants: a stretch is not used again before its borrower has given it back and nobody here refers to it;
what was lent to a process that died is gone with it.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from . import frames
from .buffers import Buffers
from .shared import Channel, Region

Bytes = npt.NDArray[np.uint8]


class Lender:
    """The side that fills stretches and has them back."""

    def __init__(self, kept: int) -> None:
        """`kept`: unused stretches held."""
        self._buffers = Buffers(kept, self._shared)
        self._once = Buffers(0, self._shared)
        self._regions: dict[int, Region] = {}  # by where they begin in our memory
        self._away: dict[int, Any] = {}
        self._numbers = itertools.count()

    def take(self, length: int, *, once: bool = False) -> Bytes:
        """Return `length` writable bytes of any content, to be used again unless `once`. From any thread."""
        return (self._once if once else self._buffers).take(length)

    def lend(self, filled: Any) -> tuple[frames.Stretch, int]:
        """Return what names a stretch that `take` gave, and its descriptor, both for one frame.

        It is held until it is given back.
        """
        view = np.frombuffer(filled, np.uint8)
        number = next(self._numbers)
        self._away[number] = filled
        return frames.Stretch(number, view.size), self._regions[_begin(view)].fd

    def free(self, number: int) -> None:
        """The borrower needs it no more."""
        self._away.pop(number)

    @property
    def away(self) -> int:
        """How many stretches are lent."""
        return len(self._away)

    def close(self) -> None:
        """Forget what is lent and let go of all memory that nobody refers to."""
        self._away.clear()
        for region in self._regions.values():
            region.close()
        self._regions.clear()

    def _shared(self, size: int) -> Bytes:
        region = Region.create(size)
        block = region.array(0, size, np.uint8)
        self._regions[_begin(block)] = region
        weakref.finalize(block, self._gone, _begin(block)).atexit = False
        return block

    def _gone(self, begin: int) -> None:
        region = self._regions.pop(begin, None)
        if region is not None:
            region.close()


def borrow(channel: Channel, stretch: frames.Stretch, gone: Callable[[int], None] | None = None) -> Bytes:
    """Return the bytes of a stretch whose frame has just come. `gone`: called with its number when nobody
    refers to them any more, on whatever thread that happens."""
    region = Region.attach(channel.descriptors.popleft(), stretch.nbytes)
    view: Bytes = region.array(0, stretch.nbytes, np.uint8)
    region.close()  # the view keeps the memory
    if gone is not None:
        weakref.finalize(view, gone, stretch.number).atexit = False
    return view


def _begin(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
