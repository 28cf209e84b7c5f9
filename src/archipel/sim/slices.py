"""One learner's slices on their way through time: how many live, which return when, what fails next.

The state behind both hosts of imagined hardware: `sim.goodput` jumps it from event to event, the step-by-step
engine asks it at every step. The same options and seed fail the same slices at the same stepping time in
both.

    live --a chip fails in a step--> out --after its return time--> live, once it is admitted
    owned: what capacity leaves the learner; slices that are given away are not owned, neither live nor out

Invariants: live + out = owned; nothing fails but while it steps (or, if the options say so, during a stop);
what returns or changes joins only when it is admitted, at the end of a step or of a stop.
"""

import heapq
import math
from collections.abc import Iterator

import numpy as np

from .hardware import (
    STREAM_FAILURES,
    STREAM_HITS,
    STREAM_RETURNS,
    HardwareOptions,
    ReturnTimes,
    capacity_changes,
    slices_per_learner,
    stream,
)

_BATCH = 1024  # random numbers drawn at once


def _exponentials(generator: np.random.Generator) -> Iterator[float]:
    while True:
        yield from generator.standard_exponential(_BATCH).tolist()


def _uniforms(generator: np.random.Generator) -> Iterator[float]:
    while True:
        yield from generator.random(_BATCH).tolist()


class Slices:
    """The slices of one learner.

    `exposure` is what is left until the next failure, in units of mean failures: stepping uses it up at
    `live · failure_hz`, so that a change of size in between needs no new draw.
    """

    def __init__(
        self, options: HardwareOptions, learner: int, seed: int, horizon_s: float = math.inf
    ) -> None:
        self.options = options
        self.horizon_s = horizon_s
        self.full = self.owned = self.live = slices_per_learner(options)
        self.failure_hz = options.chips / options.learners / self.full / options.mtbi_s  # of one slice
        self.failures = 0
        self.owned_slice_s = 0.0
        self._counted_s = 0.0  # up to here `owned_slice_s` is counted
        self._exposures = _exponentials(stream(seed, learner, STREAM_FAILURES))
        self._hits = _uniforms(stream(seed, learner, STREAM_HITS))
        self._returns = ReturnTimes(options, stream(seed, learner, STREAM_RETURNS))
        self._changes = capacity_changes(options, seed, learner)
        self._change_s, self._change_to = next(self._changes, (math.inf, 0))
        self.exposure = next(self._exposures)
        self._out: list[float] = []  # heap of the times at which failed slices return

    @property
    def next_s(self) -> float:
        """When something returns or capacity changes next."""
        return min(self._out[0] if self._out else math.inf, self._change_s)

    def admit(self, now_s: float) -> float | None:
        """Take in what is due by now; return how long that stops the learner, None if nothing stops it.

        Returned slices and changes of capacity stop it; coming into being, or going, does not.
        """
        if self.next_s > now_s:
            return None
        self.count_to(now_s)
        owned, live = self.owned, self.live
        returned = 0
        while self._out and self._out[0] <= now_s:
            heapq.heappop(self._out)
            returned += 1
        self.live += returned
        while self._change_s <= now_s:
            self._resize(self._change_to)
            self._change_s, self._change_to = next(self._changes, (math.inf, 0))
        present = owned and self.owned
        if not present or (not returned and owned == self.owned):
            return None
        return self.options.upscale_s if self.live > live else self.options.downscale_s

    def _resize(self, slices: int) -> None:
        """Own so many slices from now on; healthy ones are given away first."""
        self.live += slices - self.owned
        self.owned = slices
        while self.live < 0:
            self._out.pop()  # the last leaf of a heap: removing it keeps the order of the rest
            self.live += 1

    def count_to(self, at_s: float) -> None:
        """Count the slice time owned up to here, or to the horizon."""
        at_s = min(at_s, self.horizon_s)
        if at_s > self._counted_s:
            self.owned_slice_s += self.owned * (at_s - self._counted_s)
            self._counted_s = at_s

    # ---- failures ----

    @property
    def failing_hz(self) -> float:
        """Failures of live slices per second of stepping."""
        return self.live * self.failure_hz

    def survive(self, seconds: float) -> bool:
        """Whether no chip fails in so much more stepping; if so, it is used up."""
        used = seconds * self.failing_hz
        if used > self.exposure:
            return False
        self.exposure -= used
        return True

    def fail(self, rest: float, now_s: float) -> float:
        """Lose every slice that fails in the step that ends now; return how long that stops the learner.

        rest: exposure between the first failure and the end of the step.
        """
        failed = 1
        exposure = next(self._exposures)
        while exposure < rest and failed < self.live:
            failed += next(self._hits) * self.live >= failed  # it may hit a slice that is already down
            rest -= exposure
            exposure = next(self._exposures)
        # Where all are down already, the draw starts anew: exponential times have no memory.
        self.exposure = exposure - rest if exposure > rest else next(self._exposures)
        self.failures += failed
        away_s = [self._returns.draw() for _ in range(failed)]
        if not self.options.elastic:
            return max(away_s) + self.options.downscale_s + self.options.upscale_s
        self.live -= failed
        for seconds in away_s:
            heapq.heappush(self._out, now_s + seconds)
        return self.options.downscale_s

    def stopped(self, seconds: float, now_s: float) -> None:
        """Deal with what came back or failed during a stop of so many seconds that ends now."""
        self.admit(now_s)
        if not (self.options.fails_while_stopped and self.options.elastic):
            return
        # The reconfiguration under way leaves those slices out too.
        left_s = seconds
        while self.live and self.exposure < left_s * self.failing_hz:
            left_s -= self.exposure / self.failing_hz
            self.exposure = next(self._exposures)
            self.live -= 1
            self.failures += 1
            heapq.heappush(self._out, now_s - left_s + self._returns.draw())
        self.exposure -= left_s * self.failing_hz
