"""When may a tick close? Freshness, quorum and the adaptive grace window (section 3.2, eq. 3).

Pure functions over plain numbers: the syncer's machine asks, this page answers with a verdict and its reason.
Times are seconds. Invariant: a verdict to wait names the moment at which asking again could change it, or
None when only an event can.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .schedule import SyncOptions

AVERAGE_SHARE = 0.1  # coefficient of the moving averages (ours)
STILL_STEPPING = 3.0  # a learner without a step for three medians is not waited for (ours)
HUNG_STEPS = 10.0  # a learner quiet for so many of its own steps or transfers is held to hang (ours) ...
HUNG_S_MIN = 60.0  # ... but not earlier than this: a first step may take long


@dataclass
class MovingAverage:
    """Exponential, coefficient 0.1, started by its first sample."""

    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + AVERAGE_SHARE * (sample - self.value)

    def get(self) -> float:
        """Return the average, 0 before the first sample."""
        return 0.0 if self.value is None else self.value


class Reporter(Protocol):
    """What the verdict needs to know of one live learner that holds a full model."""

    @property
    def fresh(self) -> bool:
        """At least one inner step since it was last counted."""
        ...

    @property
    def reports(self) -> int:
        """Steps heard of since it holds a full model."""
        ...

    @property
    def quiet_since(self) -> float:
        """Its last step, or the moment it became ready."""
        ...

    @property
    def pace_s(self) -> float | None:
        """Moving average of its step time."""
        ...

    @property
    def patience_s(self) -> float:
        """Quiet for longer, it is held to hang."""
        ...


@dataclass
class Tick:
    """One global step that collects reports."""

    number: int
    opened_at: float
    first_fresh_at: float | None = None
    reached_at: float | None = None  # the K-th fresh report
    step_s: float | None = None  # ξ_step when the quorum was reached
    window_s: float = 0.0


class Verdict(NamedTuple):
    """Close the tick now, or wait until `again_at` (None: until something happens)."""

    close: bool
    reason: str
    again_at: float | None = None


TOO_FEW_FRESH = Verdict(False, "waiting for reports")


@dataclass
class Tempo:
    """The fleet's moving averages: ξ_quorum and ξ_sync; ξ_step is a median and lives with the learners."""

    quorum_s: MovingAverage = field(default_factory=MovingAverage)
    sync_s: MovingAverage = field(default_factory=MovingAverage)
    warm: bool = False  # every learner then live has reported two steps


def lower_median(values: list[float]) -> float | None:
    """Return the lower median: one slow learner among two must not set the pace of both."""
    return sorted(values)[(len(values) - 1) // 2] if values else None


def grace_window(step_s: float, quorum_s: float, sync_s: float, overlap: int, margin: float) -> float:
    """Return ξ_grace of eq. 3: the margin's share of the slack, within [0, one step].

    >>> grace_window(step_s=1.0, quorum_s=0.2, sync_s=0.8, overlap=2, margin=0.9)
    0.9
    """
    slack_s = overlap * step_s - (quorum_s + sync_s)
    return min(max(margin * slack_s, 0.0), step_s)


def weight(steps: int, tokens: int) -> float:
    """Return a push's weight: quantity × quality, tokens · (tokens / steps); 0 without a step."""
    return tokens * (tokens / steps) if steps else 0.0


def needed(options: SyncOptions, live: int) -> int:
    """Return how many fresh learners close a tick: K, or min(K, live) with `quorum_live`."""
    return max(1, min(options.quorum, live)) if options.quorum_live else options.quorum


def patience_s(step_s: float, transfer_s: float) -> float:
    """Return how long a learner with these averages may be quiet; transfers, for it may wait for an update.

    >>> patience_s(step_s=12.0, transfer_s=3.0)
    120.0
    """
    return max(HUNG_STEPS * max(step_s, transfer_s), HUNG_S_MIN)


def hangs_at(report: Reporter) -> float:
    """Return when a learner whose courier lives is held to hang unless a step of it is heard of."""
    return report.quiet_since + report.patience_s


def median_step_s(reports: Sequence[Reporter], now: float) -> float | None:
    """Return ξ_step, the lower median of live, stepping learners; of all live ones when none is stepping."""
    paces = [(report.pace_s, report.quiet_since) for report in reports]
    overall_s = lower_median([pace_s for pace_s, _ in paces if pace_s is not None])
    if overall_s is None:
        return None
    stepping = [
        pace_s
        for pace_s, quiet_since in paces
        if pace_s is not None and now < quiet_since + STILL_STEPPING * overall_s
    ]
    return lower_median(stepping) if stepping else overall_s


def stops_stepping_at(report: Reporter, step_s: float | None, options: SyncOptions) -> float:
    """Return when a learner that stays silent stops being waited for."""
    # Only a learner that came back at τ = 0 with steps in hand can be fresh before any pace is known.
    patience_s = options.silence_s if step_s is None else STILL_STEPPING * step_s
    return report.quiet_since + patience_s


def judge(now: float, tick: Tick, reports: Sequence[Reporter], tempo: Tempo, options: SyncOptions) -> Verdict:
    """Say whether the tick may close now. Notes in `tick` and `tempo` when the K-th report came."""
    # With `quorum_live`, who hangs does not live: heartbeats come from the courier, steps from the trainer.
    living = reports if not options.quorum_live else [r for r in reports if r.fresh or now < hangs_at(r)]
    need = needed(options, len(living))
    if len(reports) < need:
        return Verdict(False, f"waiting for learners live={len(reports)} quorum={need}")
    fresh = sum(report.fresh for report in reports)
    if fresh and tick.first_fresh_at is None:
        tick.first_fresh_at = now
    if fresh < need:
        awaited = [hangs_at(report) for report in living if not report.fresh]
        return TOO_FEW_FRESH._replace(again_at=min(awaited, default=None) if options.quorum_live else None)
    if tick.reached_at is None:
        _reach(now, tick, reports, tempo, options)
    if not options.grace:
        return Verdict(True, "quorum")
    if fresh == len(reports) and tempo.warm:
        return Verdict(True, "everyone")
    return (
        _grace(now, tick, reports, tempo, options) if tempo.warm else _warm_up(now, reports, tempo, options)
    )


def _reach(now: float, tick: Tick, reports: Sequence[Reporter], tempo: Tempo, options: SyncOptions) -> None:
    assert tick.first_fresh_at is not None
    tempo.quorum_s.add(now - max(tick.opened_at, tick.first_fresh_at))
    tick.reached_at = now
    tick.step_s = median_step_s(reports, now)
    if options.grace and tick.step_s is not None:
        tick.window_s = grace_window(
            tick.step_s, tempo.quorum_s.get(), tempo.sync_s.get(), options.overlap_steps, options.grace_margin
        )


def _warm_up(now: float, reports: Sequence[Reporter], tempo: Tempo, options: SyncOptions) -> Verdict:
    """Until every live learner has reported two steps there is no pace to judge by: wait for all of them."""
    step_s = median_step_s(reports, now)
    leaves_at = [stops_stepping_at(report, step_s, options) for report in reports]
    awaited = [at for at, report in zip(leaves_at, reports, strict=True) if not report.fresh and now < at]
    if all(report.reports >= 2 or now >= at for at, report in zip(leaves_at, reports, strict=True)):
        tempo.warm = True
    if not awaited:
        return Verdict(True, "everyone")
    return Verdict(False, "waiting for the first two steps", max(awaited))


def _grace(
    now: float, tick: Tick, reports: Sequence[Reporter], tempo: Tempo, options: SyncOptions
) -> Verdict:
    """Wait for whoever is still stepping, until the window is over."""
    assert tick.reached_at is not None
    last_leaves_at = max(
        (stops_stepping_at(report, tick.step_s, options) for report in reports if not report.fresh),
        default=now,
    )
    if now >= last_leaves_at:
        return Verdict(True, "everyone")
    closes_at = min(tick.reached_at + tick.window_s, last_leaves_at)
    return Verdict(True, "grace") if now >= closes_at else Verdict(False, "grace", closes_at)
