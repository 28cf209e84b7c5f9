"""Imagined hardware: chips in slices that fail and return, learners of unequal speed, capacity that comes
and goes.

Decoupled DiLoCo, section 3.3: every chip fails once per MTBI on average, independently (so the chips failing
in one step are Poisson distributed); a failed chip takes its whole slice out; the slice returns after an
exponentiated Weibull time; taking slices out and in stops the learner for fixed times. Here are the options
and every random draw. What follows from them is computed in `sim.goodput` (event by event) or by the
step-by-step host.

Invariants: a draw depends on (seed, learner, stream) and on its place in that stream, never on the order in
which learners are simulated. Times are seconds, shares are of one. No clock is read.
"""

import math
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from ..errors import ConfigError

YEAR_S = 365.25 * 86400.0

# One number per kind of draw: a stream never disturbs another.
STREAM_FAILURES, STREAM_RETURNS, STREAM_HITS, STREAM_JITTER, STREAM_SLOWDOWNS, STREAM_CAPACITY = range(6)
_STREAMS_PER_LEARNER = 16


class DayNight(Struct, frozen=True, forbid_unknown_fields=True, tag="day_night"):
    """Capacity that is scavenged at night and given back by day; a period starts with the day."""

    period_s: float = 86400.0
    day_s: float = 43200.0
    day_share: float = 0.0  # share of a learner's slices that is left by day
    night_share: float = 1.0


class Spot(Struct, frozen=True, forbid_unknown_fields=True, tag="spot"):
    """Slices that are preempted one by one, each for an exponential time."""

    preemption_interval_s: float = (
        86400.0  # mean time of one slice between its return and its next preemption
    )
    absence_s: float = 3600.0  # mean time a preempted slice stays away


class CapacityTrace(Struct, frozen=True, forbid_unknown_fields=True, tag="trace"):
    """Capacity as recorded: from `at_s` on, a learner owns this share of its slices."""

    points: tuple[tuple[float, float], ...]  # (at_s, share), by time


Capacity = DayNight | Spot | CapacityTrace


class HardwareOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `[hardware]`: one imagined cluster. What is "fitted" comes from `baselines.calibrate`."""

    chips: int = 1_200_000  # of the whole cluster
    learners: int = 8  # M; chips are shared out evenly
    slice_chips: int = 1024  # chips that fail together; a learner has at least one slice
    mtbi_s: float = YEAR_S  # mean time between interruptions of one chip
    elastic: bool = True  # False: a learner waits for the repair of every failed slice
    step_s: float = 1.0  # mean duration of one inner step
    downscale_s: float = 10.5  # fitted; the stop that goes on without a failed slice
    upscale_s: float = 16.0  # fitted; the stop that takes slices back in
    return_s: float = 46.5  # fitted; mean time from a chip's failure to its slice's return
    return_shape: float = 1.5  # k of the exponentiated Weibull; assumed, goodput hardly depends on it
    return_exponent: float = 1.5  # its exponent; 1 is a plain Weibull; assumed
    fails_while_stopped: bool = False  # elastic learners only; the paper draws per step: none while stopped
    speed_spread: float = 0.0  # the slowest learner's step takes 1 + this times the fastest's
    step_jitter: float = 0.0  # standard deviation of a step's duration, as a share of it
    slowdown_interval_s: float = math.inf  # mean time from one transient slowdown of a learner to the next
    slowdown_s: float = 60.0  # mean duration of a transient slowdown
    slowdown_factor: float = 2.0  # a step takes this times as long in one
    capacity: Capacity | None = None  # None: every learner keeps all its slices
    capacity_from_learner: int = 0  # learners below this index keep theirs whatever `capacity` says

    def __post_init__(self) -> None:
        """Check every rule an option must keep. ConfigError names the first one broken."""
        _check_sizes(self)
        _check_times(self)
        if self.capacity is not None:
            _check_capacity(self.capacity)


def _require(fact: bool, rule: str, remedy: str) -> None:
    if not fact:
        raise ConfigError(f"{rule}: {remedy}")


def _check_sizes(options: HardwareOptions) -> None:
    for name in ("chips", "learners", "slice_chips"):
        value = getattr(options, name)
        _require(value >= 1, f"hardware.{name}={value} is below 1", "use a positive number")
    _require(
        options.chips >= options.learners,
        f"hardware.chips={options.chips} is less than hardware.learners={options.learners}",
        "a learner needs at least one chip; use fewer learners",
    )
    first = options.capacity_from_learner
    _require(
        0 <= first <= options.learners,
        f"hardware.capacity_from_learner={first} is outside 0 … hardware.learners={options.learners}",
        "use the index of the first learner whose capacity changes",
    )


_POSITIVE = (
    "mtbi_s", "step_s", "return_s", "return_shape", "return_exponent", "slowdown_interval_s", "slowdown_s"
)  # fmt: skip
_NOT_NEGATIVE = ("downscale_s", "upscale_s", "speed_spread", "step_jitter")


def _check_times(options: HardwareOptions) -> None:
    may_be_infinite = ("mtbi_s", "slowdown_interval_s")  # infinite: never
    for name in (*_POSITIVE, *_NOT_NEGATIVE):
        value = getattr(options, name)
        finite = math.isfinite(value) or (name in may_be_infinite and value == math.inf)
        _require(finite, f"hardware.{name}={value} is not a number one can wait for", "use a finite value")
        if name in _POSITIVE:
            _require(value > 0, f"hardware.{name}={value} is not positive", "use a value above 0")
        _require(value >= 0, f"hardware.{name}={value} is negative", "use 0 or more")
    jitter, factor = options.step_jitter, options.slowdown_factor
    _require(
        jitter < 1 / 3, f"hardware.step_jitter={jitter} would make steps of no length", "use less than 1/3"
    )
    _require(
        math.isfinite(factor) and factor >= 1,
        f"hardware.slowdown_factor={factor} is not a slowdown",
        "use a finite value of 1 or more",
    )


def _check_capacity(capacity: Capacity) -> None:
    match capacity:
        case DayNight(period_s=period, day_s=day, day_share=low, night_share=high):
            _require(
                0 < day < period < math.inf,
                f"hardware.capacity.day_s={day} is not within period_s={period}",
                "use 0 < day_s < period_s",
            )
            _check_share("day_share", low)
            _check_share("night_share", high)
        case Spot(preemption_interval_s=interval, absence_s=absence):
            for name, value in (("preemption_interval_s", interval), ("absence_s", absence)):
                _require(
                    0 < value < math.inf,
                    f"hardware.capacity.{name}={value} is not a mean time",
                    "use a positive, finite number of seconds",
                )
        case CapacityTrace(points=points):
            times = [at_s for at_s, _ in points]
            _require(
                all(0 <= at_s < math.inf for at_s in times) and times == sorted(times),
                f"hardware.capacity.points={points} are not in order of time from 0 on",
                "sort the points by at_s",
            )
            for _, share in points:
                _check_share("points share", share)


def _check_share(name: str, share: float) -> None:
    _require(0 <= share <= 1, f"hardware.capacity.{name}={share} is not a share", "use a value from 0 to 1")


def slices_per_learner(options: HardwareOptions) -> int:
    """Return how many slices a learner has when nothing is missing; its chips are spread over them evenly."""
    return max(1, round(options.chips / options.learners / options.slice_chips))


def stream(seed: int, learner: int, kind: int) -> np.random.Generator:
    """Return the random numbers of one kind for one learner: counter-based, keyed by all three."""
    key = np.array([seed % 2**64, learner * _STREAMS_PER_LEARNER + kind], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


class ReturnTimes:
    """Draws how long a failed slice stays out: F(x) = (1 − exp(−(x / scale)^shape))^exponent, seconds.

    The scale is solved so that the mean is `return_s`, whatever the shape and the exponent.
    """

    def __init__(self, options: HardwareOptions, generator: np.random.Generator) -> None:
        self.scale_s = options.return_s / unit_mean(options.return_shape, options.return_exponent)
        self._shape, self._exponent = options.return_shape, options.return_exponent
        self._generator = generator
        self._drawn: list[float] = []

    def draw(self) -> float:
        """Return the next return time, by inversion of F."""
        if not self._drawn:
            self._drawn = self.quantile(self._generator.random(1024)).tolist()
        return self._drawn.pop()

    def quantile(self, share: np.ndarray) -> np.ndarray:
        """Return x with F(x) = share, any shape, seconds."""
        # log(1 − share^(1/exponent)) without losing the digits of a share near 0 or 1.
        tail = -np.expm1(np.log(np.maximum(share, 1e-300)) / self._exponent)
        return np.asarray(self.scale_s * (-np.log(tail)) ** (1 / self._shape))


def unit_mean(shape: float, exponent: float) -> float:
    """Return the mean of an exponentiated Weibull with scale 1.

    exponent · ∫ z^(1/shape) e^(−z) (1 − e^(−z))^(exponent − 1) dz, integrated over log z.
    """
    log_z = np.linspace(-80.0, 7.0, 40_001)
    z = np.exp(log_z)
    density = np.exp(log_z * (1 / shape + 1) - z) * (-np.expm1(-z)) ** (exponent - 1)
    return float(exponent * density.sum() * (log_z[1] - log_z[0]))


def step_factor(options: HardwareOptions, learner: int) -> float:
    """Return a learner's mean step over `step_s`: evenly spread, 1 on average, learner 0 the fastest."""
    if options.learners == 1:
        return 1.0
    slowest_over_fastest = 1 + options.speed_spread
    fastest = 2 / (1 + slowest_over_fastest)
    return fastest * (1 + options.speed_spread * learner / (options.learners - 1))


class StepTimes:
    """Durations of one learner's steps: its speed, jitter from step to step, transient slowdowns. Seconds."""

    def __init__(self, options: HardwareOptions, seed: int, learner: int) -> None:
        self._mean_s = options.step_s * step_factor(options, learner)
        self._jitter = options.step_jitter
        self._noise = stream(seed, learner, STREAM_JITTER)
        self._slow = _slowdowns(options, seed, learner)
        self._slow_from_s, self._slow_to_s = next(self._slow)
        self._factor = options.slowdown_factor

    def draw(self, now_s: float) -> float:
        """Return the duration of the step that starts now; times must not decrease from call to call."""
        while now_s >= self._slow_to_s:
            self._slow_from_s, self._slow_to_s = next(self._slow)
        # Cut at three deviations: a step of negative length must not exist.
        noise = min(3.0, max(-3.0, self._noise.standard_normal())) if self._jitter else 0.0
        slowed = self._factor if now_s >= self._slow_from_s else 1.0
        return self._mean_s * (1 + self._jitter * noise) * slowed


def _slowdowns(options: HardwareOptions, seed: int, learner: int) -> Iterator[tuple[float, float]]:
    """Yield (from_s, to_s) of transient slowdowns for ever; they start apart by exponential times."""
    if options.slowdown_interval_s == math.inf:
        yield math.inf, math.inf
        return
    generator = stream(seed, learner, STREAM_SLOWDOWNS)
    end_s = 0.0
    while True:
        start_s = end_s + generator.exponential(options.slowdown_interval_s)
        end_s = start_s + generator.exponential(options.slowdown_s)
        yield start_s, end_s


def capacity_changes(options: HardwareOptions, seed: int, learner: int) -> Iterator[tuple[float, int]]:
    """Yield (at_s, slices the learner owns from then on) by time, until nothing changes any more."""
    if options.capacity is None or learner < options.capacity_from_learner:
        return
    slices = slices_per_learner(options)
    match options.capacity:
        case DayNight() as cycle:
            yield from _day_night_changes(cycle, slices)
        case Spot() as spot:
            yield from _spot_changes(spot, slices, stream(seed, learner, STREAM_CAPACITY))
        case CapacityTrace(points=points):
            yield from ((at_s, round(share * slices)) for at_s, share in points)


def _day_night_changes(cycle: DayNight, slices: int) -> Iterator[tuple[float, int]]:
    start_s = 0.0
    while True:
        yield start_s, round(cycle.day_share * slices)
        yield start_s + cycle.day_s, round(cycle.night_share * slices)
        start_s += cycle.period_s


def _spot_changes(spot: Spot, slices: int, generator: np.random.Generator) -> Iterator[tuple[float, int]]:
    """Count the slices present: each leaves and comes back at its own rate (a birth and death process)."""
    now_s, present = 0.0, slices
    while True:
        leave_hz = present / spot.preemption_interval_s
        come_hz = (slices - present) / spot.absence_s
        now_s += generator.exponential(1 / (leave_hz + come_hz))
        present += -1 if generator.random() * (leave_hz + come_hz) < leave_hz else 1
        yield now_s, present
