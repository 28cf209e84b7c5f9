"""Goodput and uptime of millions of chips, by jumping from event to event instead of from step to step.

Decoupled DiLoCo, section 3.3 and Table 1. Learners do not wait for each other (K = 1), so each is simulated
alone and only uptime, the share of time in which any of them steps, needs them side by side. A learner is in
one of two states:

    stepping --a chip failed in this step--> stopped (downscale_s) --> stepping with fewer slices
    stepping --slices came back------------> stopped (upscale_s)   --> stepping with more slices
    stepping --a chip failed, not elastic--> stopped (until all are back, then downscale_s + upscale_s)

A step in which a chip fails is lost. What comes back while a learner is stopped joins at the end of that
stop.

Invariants: the useful time of a learner is whole steps; goodput = useful slice time / slice time the learner
owns, never above 1; same options and seed, same figures.
"""

import math
import time

import numpy as np
from msgspec import Struct, to_builtins

from ..errors import ConfigError
from . import baselines
from .hardware import HardwareOptions, slices_per_learner, step_factor
from .slices import Slices


class LearnerFigures(Struct, frozen=True):
    """What one learner made of its time."""

    goodput: float  # useful slice time over the slice time it owned; 0 if it owned none
    uptime: float  # share of the horizon in which it stepped
    failures: int  # failed slices
    stops: int
    steps: int  # useful steps, whatever their size


class Goodput(Struct, frozen=True):
    """What a cluster made of its time."""

    goodput: float  # weighted by the slice time each learner owned
    uptime: float  # share of the horizon in which any learner stepped
    failures: int
    horizon_s: float
    learners: tuple[LearnerFigures, ...]


class Timeline(Struct, frozen=True):
    """When one learner made useful steps, and with how many slices: arrays in order of time."""

    start_s: np.ndarray  # (stretches,) float64
    end_s: np.ndarray  # (stretches,) float64
    slices: np.ndarray  # (stretches,) int64
    owned_slice_s: float  # slice time the learner owned up to the horizon
    failures: int
    stops: int
    step_s: float


def simulate(options: HardwareOptions, seed: int = 0, horizon_s: float | None = None) -> Goodput:
    """Return goodput and uptime of one cluster over a horizon, by default long enough for 20,000 failures.

    Jitter and transient slowdowns do not matter here: a slow step is as useful to its chips as a fast one as
    long as nobody waits, and with K = 1 nobody does.
    """
    horizon_s = default_horizon_s(options) if horizon_s is None else horizon_s
    if not 0 < horizon_s < math.inf:
        raise ConfigError(f"horizon_s={horizon_s} is not a length of time: use a positive number of seconds")
    timelines = [timeline(options, learner, horizon_s, seed) for learner in range(options.learners)]
    useful = [float(np.dot(line.end_s - line.start_s, line.slices)) for line in timelines]
    owned = sum(line.owned_slice_s for line in timelines)
    figures = tuple(
        LearnerFigures(
            goodput=slice_s / line.owned_slice_s if line.owned_slice_s else 0.0,
            uptime=stepping_share([line], horizon_s),
            failures=line.failures,
            stops=line.stops,
            steps=round(float((line.end_s - line.start_s).sum()) / line.step_s),
        )
        for line, slice_s in zip(timelines, useful, strict=True)
    )
    return Goodput(
        goodput=sum(useful) / owned if owned else 0.0,
        uptime=stepping_share(timelines, horizon_s),
        failures=sum(line.failures for line in timelines),
        horizon_s=horizon_s,
        learners=figures,
    )


def default_horizon_s(options: HardwareOptions, failures: int = 20_000) -> float:
    """Return the time in which so many chips fail if all keep running; a day where chips never fail."""
    return failures * options.mtbi_s / options.chips if options.mtbi_s < math.inf else 86400.0


def stepping_share(timelines: list[Timeline], horizon_s: float) -> float:
    """Return the share of the horizon in which at least one of the learners makes useful steps."""
    starts = np.concatenate([line.start_s for line in timelines])
    ends = np.concatenate([line.end_s for line in timelines])
    if not len(starts):
        return 0.0
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reached = np.maximum.accumulate(ends)
    # Time gained by a stretch is what lies beyond everything before it.
    before = np.concatenate(([0.0], reached[:-1]))
    return float(np.maximum(0.0, ends - np.maximum(starts, before)).sum() / horizon_s)


def timeline(options: HardwareOptions, learner: int, horizon_s: float, seed: int = 0) -> Timeline:
    """Return one learner's useful stretches up to the horizon; the cost grows with its failures only."""
    walk = _Walk(options, learner, horizon_s, seed)
    while walk.now_s < horizon_s:
        walk.advance()
    return Timeline(
        start_s=np.array(walk.starts),
        end_s=np.array(walk.ends),
        slices=np.array(walk.sizes, dtype=np.int64),
        owned_slice_s=walk.slices.owned_slice_s,
        failures=walk.slices.failures,
        stops=walk.stops,
        step_s=walk.step_s,
    )


class _Walk:
    """One learner on its way through time, from event to event."""

    def __init__(self, options: HardwareOptions, learner: int, horizon_s: float, seed: int) -> None:
        self.slices = Slices(options, learner, seed, horizon_s)
        self.horizon_s = horizon_s
        self.step_s = options.step_s * step_factor(options, learner)
        self.now_s = 0.0
        self.stops = 0
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.sizes: list[int] = []
        self.slices.admit(0.0)  # what it owns when the run starts stops nobody

    def advance(self) -> None:
        """Go on to the next event: a change of size, a failure, or the horizon."""
        next_s = self.slices.next_s
        if next_s <= self.now_s:
            stop_s = self.slices.admit(self.now_s)
            if stop_s is not None:
                self.stop(stop_s)
        elif not self.slices.live:
            self.pass_time(next_s)
        else:
            self.step_until(next_s)

    def step_until(self, event_s: float) -> None:
        """Step whole steps until a failure, the event's step boundary or the horizon, whichever is first."""
        slices, failing_hz = self.slices, self.slices.failing_hz
        to_event = math.ceil((min(event_s, self.horizon_s) - self.now_s) / self.step_s)
        to_failure = slices.exposure / failing_hz / self.step_s if failing_hz else math.inf
        if to_failure >= to_event:
            slices.exposure -= to_event * self.step_s * failing_hz
            self.useful(to_event)
            return
        whole = int(to_failure)
        self.useful(whole)
        rest = self.step_s * failing_hz * (whole + 1) - slices.exposure
        self.pass_time(self.now_s + self.step_s)
        self.stop(slices.fail(rest, self.now_s))

    def useful(self, steps: int) -> None:
        """Record a stretch of useful steps; a step that the horizon cuts off does not count."""
        end_s = self.now_s + steps * self.step_s
        if end_s > self.horizon_s:
            end_s -= self.step_s
        if end_s > self.now_s:
            self.starts.append(self.now_s)
            self.ends.append(end_s)
            self.sizes.append(self.slices.live)
        self.pass_time(self.now_s + steps * self.step_s)

    def stop(self, seconds: float) -> None:
        """Stand still; what fails or comes back meanwhile is dealt with in the same stop."""
        self.stops += 1
        self.pass_time(self.now_s + seconds)
        self.slices.stopped(seconds, self.now_s)

    def pass_time(self, to_s: float) -> None:
        """Let time pass and count the slice time owned."""
        self.slices.count_to(to_s)
        self.now_s = to_s


def closed_form(options: HardwareOptions) -> tuple[float, float]:
    """Return (goodput, uptime) to first order, without drawing anything: an oracle beside the simulation.

    Learners step independently; on average λ · u · return_s slices of a learner are out (λ, u:
    `learner_uptime`). Even speeds, no capacity trace, no failures during stops.
    """
    up = learner_uptime(options)
    any_up = 1 - (1 - up) ** options.learners
    if not options.elastic:
        return up, any_up
    out = _failing_hz(options) * up * options.return_s / slices_per_learner(options)
    return up / (1 + out), any_up


def learner_uptime(options: HardwareOptions) -> float:
    """Return the share u of time in which one learner makes useful steps, to first order.

    It meets λ failing steps per useful second. Each costs that step and a downscale; its return costs an
    upscale if it finds the learner stepping (share u): u · (1 + λ · (step + downscale + upscale · u)) = 1.
    """
    failing_hz = _failing_hz(options)
    if not options.elastic:
        lost_s = options.step_s + options.return_s + options.downscale_s + options.upscale_s
        return 1 / (1 + failing_hz * lost_s)
    linear = 1 + failing_hz * (options.step_s + options.downscale_s)
    return 2 / (linear + math.sqrt(linear**2 + 4 * failing_hz * options.upscale_s))


def _failing_hz(options: HardwareOptions) -> float:
    """Return failing steps of a learner per second of useful ones: a step fails as a whole."""
    failures_per_step = options.chips / options.learners / options.mtbi_s * options.step_s
    return math.expm1(min(failures_per_step, 700.0)) / options.step_s  # beyond 700 a float overflows


def table1(seed: int = 0, failures: int = 20_000) -> dict[str, object]:
    """Return Table 1 of the paper as simulated here: percentages by row for 150k … 2.4M chips, one set of
    constants.

    failures: how many chips fail in each cell; more make it longer and less noisy.
    """
    began_s = time.perf_counter()
    goodput: dict[str, list[float]] = {}
    uptime: dict[str, list[float]] = {}
    for row in baselines.TABLE1_ROWS:
        cells = []
        for chips in baselines.TABLE1_CHIPS:
            options = baselines.table1_options(row, chips)
            cells.append(simulate(options, seed, default_horizon_s(options, failures)))
        goodput[row] = [round(100 * cell.goodput, 2) for cell in cells]
        uptime[row] = [round(100 * cell.uptime, 2) for cell in cells]
    return {
        "goodput": goodput,
        "uptime": uptime,
        "constants": baselines.table1_constants(),
        "seconds": round(time.perf_counter() - began_s, 3),
    }


def as_dict(figures: Goodput) -> dict[str, object]:
    """Return the figures as plain values, for JSON."""
    return dict(to_builtins(figures))
