"""Verdicts and grace windows by hand-sized numbers."""

from dataclasses import dataclass

import pytest

from archipel.protocol.quorum import (
    MovingAverage,
    Tempo,
    Tick,
    grace_window,
    judge,
    lower_median,
    median_step_s,
    needed,
    patience_s,
    weight,
)
from archipel.protocol.schedule import SyncOptions


@dataclass
class Seen:
    """A learner as the quorum sees it."""

    fresh: bool = True
    reports: int = 5
    quiet_since: float = 10.0
    pace_s: float | None = 1.0
    patience_s: float = 60.0


def warm() -> Tempo:
    return Tempo(MovingAverage(0.0), MovingAverage(0.0), warm=True)


def options(**given: object) -> SyncOptions:
    return SyncOptions(**{"quorum": 2, "fragments": 1, "interval_steps": 4, **given})  # type: ignore[arg-type]


# ---- eq. 3 ----


@pytest.mark.parametrize(
    ("step_s", "quorum_s", "sync_s", "overlap", "window_s"),
    [
        (1.0, 0.2, 0.8, 2, 0.9),  # slack 1.0, margin 0.9
        (1.0, 0.0, 0.0, 2, 1.0),  # slack 2.0: capped at one step
        (1.0, 0.5, 1.5, 2, 0.0),  # no slack
        (1.0, 0.0, 5.0, 2, 0.0),  # negative slack
        (1.0, 0.0, 0.0, 0, 0.0),  # τ = 0 leaves none
        (2.0, 0.0, 1.0, 1, 0.9),
    ],
)
def test_grace_window(step_s: float, quorum_s: float, sync_s: float, overlap: int, window_s: float) -> None:
    assert grace_window(step_s, quorum_s, sync_s, overlap, 0.9) == pytest.approx(window_s)


def test_weight_is_quantity_times_quality() -> None:
    assert weight(steps=4, tokens=200) == 200 * 50
    assert weight(steps=0, tokens=0) == 0.0


def test_one_slow_learner_of_two_does_not_set_the_pace() -> None:
    assert lower_median([5.0, 1.0]) == 1.0
    assert lower_median([3.0, 1.0, 2.0]) == 2.0
    assert lower_median([]) is None


def test_moving_average_starts_with_its_first_sample() -> None:
    average = MovingAverage()
    assert average.get() == 0.0
    average.add(2.0)
    average.add(12.0)
    assert average.get() == pytest.approx(3.0)


def test_who_has_stopped_stepping_does_not_set_the_pace() -> None:
    stepping = [Seen(pace_s=1.0), Seen(pace_s=1.2)]
    asleep = [Seen(pace_s=0.5, quiet_since=0.0)] * 3
    assert median_step_s([*stepping, *asleep], now=10.5) == 1.0
    assert median_step_s(asleep, now=10.5) == 0.5  # nobody steps: what is known of all


# ---- quorum ----


def test_needed_is_k_or_all_that_live() -> None:
    assert needed(options(quorum=3), live=2) == 3
    assert needed(options(quorum=3, quorum_live=True), live=2) == 2
    assert needed(options(quorum=3, quorum_live=True), live=0) == 1


def test_too_few_learners_say_so() -> None:
    verdict = judge(10.0, Tick(1, 9.0), [Seen()], warm(), options())
    assert verdict == (False, "waiting for learners live=1 quorum=2", None)


def test_too_few_reports_wait_for_an_event() -> None:
    verdict = judge(10.0, Tick(1, 9.0), [Seen(), Seen(fresh=False)], warm(), options())
    assert not verdict.close and verdict.again_at is None


def test_without_grace_the_quorum_closes() -> None:
    reports = [Seen(), Seen(), Seen(fresh=False)]
    assert judge(10.0, Tick(1, 9.0), reports, warm(), options(grace=False)) == (True, "quorum", None)


def test_two_of_eight_close_a_tick_when_the_window_is_over() -> None:
    tick, tempo = Tick(1, 9.0), warm()
    reports = [Seen(), Seen(), *[Seen(fresh=False)] * 6]
    assert judge(10.0, tick, reports, tempo, options()) == (False, "grace", 11.0)
    assert not judge(10.999, tick, reports, tempo, options()).close
    assert judge(11.0, tick, reports, tempo, options()) == (True, "grace", None)


def test_window_ends_early_when_everyone_has_reported() -> None:
    tick, late = Tick(1, 9.0), Seen(fresh=False)
    assert not judge(10.0, tick, [Seen(), Seen(), late], warm(), options()).close
    late.fresh = True
    assert judge(10.2, tick, [Seen(), Seen(), late], warm(), options()) == (True, "everyone", None)


def test_window_of_zero_closes_at_once() -> None:
    # K fresh, no slack: ξ_sync takes all of τ·ξ_step.
    tempo = Tempo(MovingAverage(0.0), MovingAverage(2.0), warm=True)
    verdict = judge(10.0, Tick(1, 9.0), [Seen(), Seen(), Seen(fresh=False)], tempo, options())
    assert verdict == (True, "grace", None)


def test_a_learner_silent_for_three_medians_is_not_waited_for() -> None:
    gone = Seen(fresh=False, quiet_since=7.5)  # leaves at 10.5, before the window's end at 11
    tick = Tick(1, 9.0)
    assert judge(10.0, tick, [Seen(), Seen(), gone], warm(), options()) == (False, "grace", 10.5)
    assert judge(10.5, tick, [Seen(), Seen(), gone], warm(), options()) == (True, "everyone", None)


def test_quorum_time_runs_from_the_first_report_to_the_last_needed() -> None:
    tick, tempo = Tick(1, opened_at=5.0), Tempo()
    second = Seen(fresh=False)
    judge(10.0, tick, [Seen(), second], tempo, options())
    second.fresh = True
    judge(10.3, tick, [Seen(), second], tempo, options())
    assert tempo.quorum_s.get() == pytest.approx(0.3)


def test_quorum_time_is_zero_for_a_quorum_of_one() -> None:
    tempo = Tempo()
    judge(10.0, Tick(1, opened_at=5.0), [Seen()], tempo, options(quorum=1))
    assert tempo.quorum_s.get() == 0.0


def test_a_window_is_granted_once() -> None:
    tick, first, second = Tick(1, 9.0), Seen(), Seen()
    judge(10.0, tick, [first, second, Seen(fresh=False)], warm(), options())
    judge(10.5, tick, [first, Seen(fresh=False), Seen(fresh=False)], warm(), options())  # `second` died
    assert judge(11.0, tick, [first, Seen(), Seen(fresh=False)], warm(), options()).close


# ---- trainers that hang ----


def test_a_learner_hangs_after_ten_of_its_steps_or_transfers_but_not_within_a_minute() -> None:
    assert patience_s(step_s=1.0, transfer_s=0.0) == 60.0
    assert patience_s(step_s=30.0, transfer_s=2.0) == 300.0
    assert patience_s(step_s=1.0, transfer_s=20.0) == 200.0


def test_with_quorum_live_a_learner_that_hangs_is_waited_for_only_so_long() -> None:
    both = [Seen(), Seen(fresh=False, quiet_since=10.0)]
    tick = Tick(1, 9.0)
    assert judge(69.9, tick, both, warm(), options(quorum_live=True)) == (False, "waiting for reports", 70.0)
    assert judge(70.0, tick, both, warm(), options(quorum_live=True)).close
    assert not judge(70.0, Tick(1, 9.0), both, warm(), options()).close


def test_where_everybody_hangs_a_tick_waits_for_an_event() -> None:
    both = [Seen(fresh=False), Seen(fresh=False)]
    verdict = judge(70.0, Tick(1, 9.0), both, warm(), options(quorum_live=True))
    assert verdict == (False, "waiting for reports", None)


# ---- the first steps ----


def test_the_first_ticks_wait_for_all() -> None:
    tempo = Tempo()
    young = Seen(fresh=False, reports=0, pace_s=None)
    verdict = judge(10.0, Tick(1, 9.0), [Seen(reports=1), Seen(reports=1), young], tempo, options())
    assert verdict == (False, "waiting for the first two steps", 13.0)
    assert not tempo.warm


def test_warm_once_all_have_reported_two_steps() -> None:
    tempo = Tempo()
    assert judge(10.0, Tick(1, 9.0), [Seen(reports=2), Seen(reports=2)], tempo, options()).close
    assert tempo.warm


def test_who_does_not_begin_is_not_waited_for_at_the_start() -> None:
    tempo = Tempo()
    hung = Seen(fresh=False, reports=0, pace_s=None, quiet_since=10.0)
    verdict = judge(
        13.0, Tick(1, 9.0), [Seen(quiet_since=13.0), Seen(quiet_since=12.5), hung], tempo, options()
    )
    assert verdict.close and tempo.warm


def test_without_any_pace_the_wait_is_bounded_by_silence() -> None:
    # τ = 0 after the syncer came back: learners have steps in hand, and nobody's pace is known.
    fresh, hung = Seen(pace_s=None), Seen(fresh=False, pace_s=None)
    verdict = judge(10.0, Tick(1, 9.0), [fresh, hung], Tempo(), options(quorum=1, silence_s=15.0))
    assert verdict.again_at == 25.0
