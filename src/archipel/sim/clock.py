"""Virtual time: one heap of what is to be done, and what was planned to break.

Invariants: `now` never decreases; what is due at one instant is done in the order it was asked for.
"""

import heapq
from collections.abc import Callable
from typing import Any

NEVER = float("inf")


class Clock:
    """`faults`: planned from outside and not over; a run does not end before."""

    def __init__(self) -> None:
        self.now = 0.0
        self.faults = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, at: float, work: Callable[..., None], *arguments: Any) -> None:
        """Do this then; at once if that is past."""
        self._count += 1
        heapq.heappush(self._heap, (max(at, self.now), self._count, work, arguments))

    def plan(self, at: float, work: Callable[..., None], *arguments: Any) -> None:
        """Do this then, and count it as a fault until it is done."""
        self.faults += 1
        self.at(at, self._planned, work, arguments)

    def _planned(self, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.faults -= 1
        work(*arguments)

    def run(self, until: float, over: Callable[[], bool]) -> None:
        """Let time pass up to a moment, or until it is over."""
        while self._heap and self._heap[0][0] <= until and not over():
            self.now, _, work, arguments = heapq.heappop(self._heap)
            work(*arguments)
        if until < NEVER and not over():
            self.now = max(self.now, until)
