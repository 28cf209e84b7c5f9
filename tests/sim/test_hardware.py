"""Imagined hardware: reproducible draws of the distributions they claim; wrong options are refused."""

import itertools
import math

import numpy as np
import pytest

from archipel.errors import ConfigError
from archipel.sim.hardware import (
    STREAM_FAILURES,
    STREAM_RETURNS,
    CapacityTrace,
    DayNight,
    HardwareOptions,
    ReturnTimes,
    Spot,
    StepTimes,
    capacity_changes,
    slices_per_learner,
    step_factor,
    stream,
    unit_mean,
)


def test_stream_depends_on_seed_learner_and_kind_only() -> None:
    draws = {
        key: stream(*key).random()
        for key in itertools.product((0, 1), (0, 1, 999), (STREAM_FAILURES, STREAM_RETURNS))
    }
    assert len(set(draws.values())) == len(draws)
    assert stream(1, 999, STREAM_RETURNS).random() == draws[1, 999, STREAM_RETURNS]


def test_mean_of_a_plain_weibull_is_the_gamma_function() -> None:
    for shape in (0.5, 1.0, 1.5, 4.0):
        assert unit_mean(shape, 1.0) == pytest.approx(math.gamma(1 + 1 / shape), rel=1e-6)


def test_mean_of_an_exponent_of_two_is_that_of_the_larger_of_two() -> None:
    # max(X, Y) = X + Y − min(X, Y), and the smaller of two exponentials has half the mean.
    assert unit_mean(1.0, 2.0) == pytest.approx(1.5, rel=1e-6)


@pytest.mark.parametrize(("shape", "exponent"), [(1.5, 1.5), (0.7, 0.5), (3.0, 4.0)])
def test_return_times_have_the_mean_that_was_asked_for(shape: float, exponent: float) -> None:
    options = HardwareOptions(return_s=60.0, return_shape=shape, return_exponent=exponent)
    times = ReturnTimes(options, stream(0, 0, STREAM_RETURNS))
    drawn = [times.draw() for _ in range(40_000)]
    assert np.mean(drawn) == pytest.approx(60.0, rel=0.05)
    assert min(drawn) > 0


def test_quantile_inverts_the_exponentiated_weibull() -> None:
    options = HardwareOptions(return_s=60.0, return_shape=1.5, return_exponent=2.5)
    times = ReturnTimes(options, stream(0, 0, STREAM_RETURNS))
    share = np.array([1e-6, 0.25, 0.5, 0.999])
    back = (1 - np.exp(-((times.quantile(share) / times.scale_s) ** 1.5))) ** 2.5
    assert back == pytest.approx(share, rel=1e-6)


def test_slowest_learner_is_the_spread_slower_than_the_fastest() -> None:
    options = HardwareOptions(learners=8, speed_spread=0.18)
    factors = [step_factor(options, learner) for learner in range(8)]
    assert factors == sorted(factors)
    assert factors[-1] / factors[0] == pytest.approx(1.18)
    assert np.mean(factors) == pytest.approx(1.0)


def test_jitter_spreads_steps_around_their_mean() -> None:
    times = StepTimes(HardwareOptions(step_s=2.0, step_jitter=0.1), seed=3, learner=0)
    drawn = [times.draw(2.0 * step) for step in range(20_000)]
    assert np.mean(drawn) == pytest.approx(2.0, rel=0.01)
    assert np.std(drawn) == pytest.approx(0.2, rel=0.03)


def test_transient_slowdowns_take_their_share_of_time() -> None:
    options = HardwareOptions(slowdown_interval_s=300.0, slowdown_s=100.0, slowdown_factor=3.0)
    times = StepTimes(options, seed=0, learner=0)
    drawn = np.array([times.draw(float(second)) for second in range(200_000)])
    assert set(drawn.round(6)) == {round(step_factor(options, 0), 6), round(3 * step_factor(options, 0), 6)}
    assert (drawn > 2).mean() == pytest.approx(0.25, abs=0.03)


def test_without_slowdowns_steps_are_all_alike() -> None:
    times = StepTimes(HardwareOptions(learners=1, step_s=1.5), seed=0, learner=0)
    assert {times.draw(1e9 * step) for step in range(10)} == {1.5}


def test_day_and_night_alternate_and_fixed_learners_are_left_alone() -> None:
    options = HardwareOptions(
        chips=8 * 1024,
        learners=2,
        capacity=DayNight(period_s=100.0, day_s=40.0, day_share=0.5, night_share=1.0),
        capacity_from_learner=1,
    )
    assert list(capacity_changes(options, 0, 0)) == []
    first = list(itertools.islice(capacity_changes(options, 0, 1), 4))
    assert first == [(0.0, 2), (40.0, 4), (100.0, 2), (140.0, 4)]


def test_a_trace_is_read_as_recorded() -> None:
    options = HardwareOptions(
        chips=4096, learners=1, capacity=CapacityTrace(points=((5.0, 0.25), (9.0, 0.0), (12.0, 1.0)))
    )
    assert list(capacity_changes(options, 0, 0)) == [(5.0, 1), (9.0, 0), (12.0, 4)]


def test_spot_slices_are_present_for_their_share_of_time() -> None:
    options = HardwareOptions(
        chips=10 * 1024, learners=1, capacity=Spot(preemption_interval_s=300.0, absence_s=100.0)
    )
    changes = list(itertools.islice(capacity_changes(options, 0, 0), 20_000))
    times = np.array([at_s for at_s, _ in changes])
    counts = np.array([count for _, count in changes])
    assert set(counts) <= set(range(11))
    mean = np.average(counts[:-1], weights=np.diff(times))
    assert mean == pytest.approx(7.5, abs=0.15)  # 300 of 400 seconds


def test_a_learner_has_at_least_one_slice() -> None:
    assert slices_per_learner(HardwareOptions(chips=8, learners=8, slice_chips=1024)) == 1
    assert slices_per_learner(HardwareOptions(chips=8192, learners=2, slice_chips=1024)) == 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"chips": 0}, "hardware.chips=0"),
        ({"chips": 4, "learners": 8}, "hardware.learners=8"),
        ({"mtbi_s": -1.0}, "hardware.mtbi_s=-1.0"),
        ({"return_s": math.nan}, "hardware.return_s=nan"),
        ({"return_s": math.inf}, "hardware.return_s=inf"),
        ({"downscale_s": -0.1}, "hardware.downscale_s=-0.1"),
        ({"step_jitter": 0.5}, "hardware.step_jitter=0.5"),
        ({"slowdown_factor": 0.5}, "hardware.slowdown_factor=0.5"),
        ({"capacity_from_learner": 9}, "hardware.capacity_from_learner=9"),
        ({"capacity": DayNight(day_s=90000.0)}, "hardware.capacity.day_s=90000.0"),
        ({"capacity": DayNight(day_share=1.5)}, "hardware.capacity.day_share=1.5"),
        ({"capacity": Spot(absence_s=0.0)}, "hardware.capacity.absence_s=0.0"),
        ({"capacity": CapacityTrace(points=((5.0, 1.0), (1.0, 0.5)))}, "hardware.capacity.points"),
    ],
)
def test_wrong_options_are_refused_by_name(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        HardwareOptions(**wrong)  # type: ignore[arg-type]


def test_chips_that_never_fail_may_be_imagined() -> None:
    assert HardwareOptions(mtbi_s=math.inf).mtbi_s == math.inf
