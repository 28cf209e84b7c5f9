"""Of one learner's time, how much it spent in inner steps, how much it stood still, how much it was absent.

A step's own figure, `step_s`, is what it took on the wall (waiting for the protocol left out), so a process
that was stopped in the middle of a step, as by SIGSTOP, reports a long one. Nothing on a tape tells it from a
slow one but its neighbours: a step more than three times as long as the one before it and the one after it
counts as long as the longer of these, and the rest of it *stood still*.

Invariants: memory does not grow with the run; the same records, the same figures.
"""

import bisect
from dataclasses import dataclass, field

STALLED = 3.0  # as `protocol.quorum.STILL_STEPPING`: no step for three step times is not stepping
SAMPLE = 4096  # values a sample keeps
COVER = 4096  # separate stretches of time that are kept before the oldest are taken as settled


def useful_s(before_s: float | None, step_s: float, after_s: float | None) -> float:
    """Return how much of a step counts beside its neighbours in the same process, None where it has none.

    >>> useful_s(1.0, 16.0, 1.2)
    1.2
    """
    longest = max((each for each in (before_s, after_s) if each is not None), default=step_s)
    return longest if step_s > STALLED * longest else step_s


class Sample:
    """Values evenly from all that came: every k-th of them, k doubling as they grow in number."""

    def __init__(self, most: int = SAMPLE) -> None:
        self.count = 0
        self.total = 0.0
        self.greatest = 0.0
        self._values: list[float] = []
        self._every = 1
        self._most = most

    def add(self, value: float) -> None:
        """Take one value in."""
        if self.count % self._every == 0:
            if len(self._values) >= self._most:
                del self._values[1::2]
                self._every *= 2
            if self.count % self._every == 0:
                self._values.append(value)
        self.greatest = value if self.count == 0 else max(self.greatest, value)
        self.count += 1
        self.total += value

    @property
    def mean(self) -> float | None:
        """Mean of all values."""
        return self.total / self.count if self.count else None

    @property
    def median(self) -> float | None:
        """Lower median of those kept."""
        return sorted(self._values)[(len(self._values) - 1) // 2] if self._values else None

    def table(self) -> dict[str, float | int] | None:
        """Return count, mean, median and greatest; None without a value."""
        if self.mean is None or self.median is None:
            return None
        spread = {"mean": self.mean, "median": self.median, "greatest": self.greatest}
        return {"count": self.count, **{name: round(value, 6) for name, value in spread.items()}}


class Cover:
    """How much time is covered by stretches that may overlap and come in almost any order."""

    def __init__(self, most: int = COVER) -> None:
        self._stretches: list[tuple[float, float]] = []  # disjoint, sorted
        self._settled_s = 0.0
        self._settled_to = float("-inf")
        self._most = most

    def add(self, start: float, end: float) -> None:
        """Cover start … end; what lies before the settled past is taken as known."""
        start = max(start, self._settled_to)
        if end <= start:
            return
        kept = self._stretches
        first = bisect.bisect_left(kept, start, key=lambda stretch: stretch[1])
        last = bisect.bisect_right(kept, end, key=lambda stretch: stretch[0])
        if first < last:
            start, end = min(start, kept[first][0]), max(end, kept[last - 1][1])
        kept[first:last] = [(start, end)]
        if len(kept) > self._most:
            self._settle(len(kept) // 2)

    def _settle(self, count: int) -> None:
        done, self._stretches = self._stretches[:count], self._stretches[count:]
        self._settled_s += sum(end - start for start, end in done)
        self._settled_to = done[-1][1]

    @property
    def total_s(self) -> float:
        """Time covered by at least one stretch."""
        return self._settled_s + sum(end - start for start, end in self._stretches)


@dataclass
class Pace:
    """One learner's time, over all its processes. Feed it in order; `cover` is shared by all learners."""

    cover: Cover
    since_s: float  # its first record
    until_s: float  # its newest
    steps: int = 0
    tokens: int = 0
    stepping_s: float = 0.0  # in steps that were completed
    stood_still_s: float = 0.0
    absent_s: float = 0.0  # between one process and the next
    step_times: Sample = field(default_factory=Sample)
    parted_s: float | None = None  # it said goodbye while the run went on, and has not come back
    _before_s: float | None = None  # the step before the one that is open
    _open: tuple[float, float] | None = None  # the newest step, (ended, took): its successor decides on it

    def step(self, now: float, step_s: float, tokens: int, steps: int = 1) -> None:
        """A step ended; or several, of which only this one was heard: the others are taken to be as long."""
        missed_s = min((steps - 1) * step_s, max(0.0, now - step_s - self.until_s))
        if missed_s > 0:
            self.stepping_s += missed_s
            self.cover.add(now - step_s - missed_s, now - step_s)
        self._settle(step_s)
        self._open = now, step_s
        self.steps += steps
        self.tokens += tokens
        self.heard(now)

    def heard(self, now: float) -> None:
        """It was there at this time."""
        self.until_s = max(self.until_s, now)
        self.parted_s = None

    def begins(self, now: float) -> None:
        """Another process of it starts."""
        self.ends()
        self.absent_s += max(0.0, now - self.until_s)
        self.heard(now)

    def ends(self) -> None:
        """No step follows the newest in its process."""
        self._settle(None)
        self._before_s = None

    def _settle(self, next_s: float | None) -> None:
        """Decide how much of the open step counts, now that the one after it is known."""
        if self._open is None:
            return
        (ended, took), self._open = self._open, None
        useful = useful_s(self._before_s, took, next_s)
        self.stepping_s += useful
        self.stood_still_s += took - useful
        self.step_times.add(useful)
        self.cover.add(ended - useful, ended)  # what it stood still is taken to come first
        self._before_s = useful

    def time_s(self, end: float) -> float:
        """Return how long the run had it: from its first record to the run's end, or to its goodbye."""
        return max(0.0, (end if self.parted_s is None else self.parted_s) - self.since_s)

    def lost_s(self, end: float, *, dead: bool) -> float:
        """Return how long it was not there: between processes, and since it died for good."""
        return self.absent_s + (max(0.0, end - self.until_s) if dead else 0.0)
