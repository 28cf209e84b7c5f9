"""Large buffers that are used again: a fresh one costs its page faults, often more than filling it does.

A part of the runtime beside the transport (measured by `benchmarks/transport.py`): what comes in, what goes
out and what a merge makes are buffers of a few sizes, over and over. A buffer comes back by itself when
nobody refers to it or to a view of it any more; so whoever holds one, a transfer that failed half-way
included, has nothing to remember.

Invariants: a buffer in use is never given twice; at most `kept` unused ones are held, the rest goes back to
the system; a buffer is longer than asked for by at most an eighth.
"""

import contextlib
import mmap
import threading
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

PAGE = 4096
HUGE_PAGE = 2 << 20


def private(size: int) -> npt.NDArray[np.uint8]:
    """Return memory of this process alone."""
    return np.empty(size, np.uint8)


def mapped(size: int) -> npt.NDArray[np.uint8]:
    """Return memory of this process alone that goes back to the system when it is freed.

    Not all does: the C library keeps what one thread has freed in a heap that other threads do not use.
    """
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: only more page faults
            block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8)


class Buffers:
    """Gives out memory that was used before, where there is some that fits. From any thread."""

    def __init__(self, kept: int, make: Callable[[int], npt.NDArray[np.uint8]] = private) -> None:
        """`kept`: unused buffers held for whoever asks next. `make`: returns so many bytes of new memory."""
        self._kept = kept
        self._make = make
        self._unused: list[npt.NDArray[np.uint8]] = []  # in the order they came back
        # Reentrant: the garbage collector may bring one back on a thread that is taking another.
        self._lock = threading.RLock()

    @property
    def unused(self) -> int:
        """Buffers held that nobody uses."""
        return len(self._unused)

    def take(self, length: int) -> npt.NDArray[np.uint8]:
        """Return `length` writable bytes of any content."""
        size = size_class(length)
        with self._lock:
            found = next((at for at, block in enumerate(self._unused) if block.size == size), None)
            block = self._unused.pop(found) if found is not None else None
        if block is None:
            block = self._make(size)
        # Through a memoryview: a view of a view refers to the first array, and here that is this one.
        lent = np.frombuffer(memoryview(block), np.uint8, length)
        weakref.finalize(lent, self._give_back, block).atexit = False
        return lent

    def floats(self, numel: int) -> npt.NDArray[np.float32]:
        """Return room for `numel` float32 values, of any content."""
        return self.take(4 * numel).view(np.float32)

    def _give_back(self, block: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            self._unused.append(block)
            if len(self._unused) > self._kept:
                del self._unused[0]  # the one unused for longest


def size_class(length: int) -> int:
    """Return the bytes to reserve, so that fragments of nearly one length share buffers.

    >>> size_class(5000), size_class(1_000_000)
    (8192, 1048576)
    """
    step = max(PAGE, 1 << max(length.bit_length() - 4, 0))
    return max(-(-length // step), 1) * step
