"""Goodput by events: Table 1, the closed form, one step by step, and cases one can do by head."""

import heapq
import math

import numpy as np
import pytest
from msgspec.structs import replace

from archipel.errors import ConfigError
from archipel.sim import baselines, goodput
from archipel.sim.hardware import (
    STREAM_FAILURES,
    STREAM_RETURNS,
    YEAR_S,
    CapacityTrace,
    HardwareOptions,
    ReturnTimes,
    slices_per_learner,
    stream,
)

BUSY = HardwareOptions(chips=1_200_000, learners=1)


def test_all_sixty_cells_of_table_1_are_within_five_points_and_two_on_average() -> None:
    table = goodput.table1(seed=0, failures=8000)
    errors = [
        table[kind][row][column] - paper[row][column]
        for kind, paper in (("goodput", baselines.PAPER_GOODPUT), ("uptime", baselines.PAPER_UPTIME))
        for row in baselines.TABLE1_ROWS
        for column in range(5)
    ]
    assert len(errors) == 60
    assert max(map(abs, errors)) <= 5
    assert np.mean(np.abs(errors)) <= 2
    assert table["seconds"] < 60


def test_table_1_says_where_its_constants_come_from() -> None:
    constants = baselines.table1_constants()
    fitted = {name for name, entry in constants.items() if entry["source"] == "fitted to Table 1"}
    assert fitted == {"downscale_s", "upscale_s", "return_s"}
    assert constants["mtbi_s"] == {"value": YEAR_S, "source": "given by the paper"}


def test_calibration_finds_the_constants_that_are_the_defaults() -> None:
    found, loss = baselines.calibrate(goodput.closed_form)
    assert found == HardwareOptions()
    assert loss < 2


@pytest.mark.parametrize("chips", [150_000, 600_000])
def test_goodput_stays_when_chips_and_learners_grow_alike(chips: int) -> None:
    figures = [
        goodput.simulate(HardwareOptions(chips=k * chips, learners=2 * k), 0).goodput for k in (1, 2, 4)
    ]
    assert max(figures) - min(figures) < 0.03


@pytest.mark.parametrize("row", baselines.TABLE1_ROWS)
@pytest.mark.parametrize("chips", [150_000, 1_200_000])
def test_simulation_agrees_with_the_closed_form(row: str, chips: int) -> None:
    options = baselines.table1_options(row, chips)
    figures = goodput.simulate(options, 1, goodput.default_horizon_s(options, 8000))
    expected_goodput, expected_uptime = goodput.closed_form(options)
    assert figures.goodput == pytest.approx(expected_goodput, abs=0.015)
    assert figures.uptime == pytest.approx(expected_uptime, abs=0.015)


def step_by_step(options: HardwareOptions, steps: int) -> float:
    """Return one learner's goodput the slow way: Poisson failures drawn in every step, nothing skipped."""
    random = stream(7, 0, STREAM_FAILURES)
    returns = ReturnTimes(options, stream(7, 0, STREAM_RETURNS))
    slices = live = slices_per_learner(options)
    slice_hz = options.chips / slices / options.mtbi_s
    out: list[float] = []
    now_s = useful = 0.0
    for _ in range(steps):
        stop_s = 0.0
        now_s += options.step_s
        failed = min(live, int(random.poisson(live * slice_hz * options.step_s)))
        if failed:
            live -= failed
            for _ in range(failed):
                heapq.heappush(out, now_s + returns.draw())
            stop_s = options.downscale_s
        else:
            useful += live * options.step_s
            if out and out[0] <= now_s:
                stop_s = options.upscale_s
        now_s += stop_s
        if not live:
            now_s = max(now_s, out[0])
        while out and out[0] <= now_s and stop_s:
            heapq.heappop(out)
            live += 1
    return useful / (slices * now_s)


@pytest.mark.parametrize(
    "options",
    [
        BUSY,
        HardwareOptions(chips=64, learners=1, slice_chips=4, mtbi_s=64 * 100.0, return_s=200.0),
        HardwareOptions(chips=64, learners=1, slice_chips=8, mtbi_s=64 * 300.0, step_s=5.0, upscale_s=4.0),
    ],
)
def test_jumping_from_event_to_event_agrees_with_going_step_by_step(options: HardwareOptions) -> None:
    slow = step_by_step(options, 150_000)
    fast = goodput.simulate(options, 0, goodput.default_horizon_s(options, 8000)).goodput
    assert fast == pytest.approx(slow, abs=0.015)


def test_same_seed_same_figures_and_another_seed_others() -> None:
    first = goodput.simulate(BUSY, 5, 1e5)
    assert goodput.simulate(BUSY, 5, 1e5) == first
    assert goodput.simulate(BUSY, 6, 1e5) != first


def test_a_learner_fares_the_same_whoever_else_is_imagined() -> None:
    few = HardwareOptions(chips=100_000, learners=2)
    many = HardwareOptions(chips=400_000, learners=8)
    assert goodput.simulate(few, 0, 1e6).learners == goodput.simulate(many, 0, 1e6).learners[:2]


def test_chips_that_never_fail_are_always_useful() -> None:
    figures = goodput.simulate(HardwareOptions(learners=4, mtbi_s=math.inf), 0, 1000.0)
    assert (figures.goodput, figures.uptime, figures.failures) == (1.0, 1.0, 0)
    assert [learner.steps for learner in figures.learners] == [1000] * 4


def test_a_step_that_the_horizon_cuts_off_does_not_count() -> None:
    figures = goodput.simulate(HardwareOptions(learners=1, mtbi_s=math.inf), 0, 10.5)
    assert figures.learners[0].steps == 10
    assert figures.goodput == pytest.approx(10 / 10.5)


def test_waiting_for_repair_costs_more_than_going_on_without_the_slice() -> None:
    rigid = goodput.simulate(replace(BUSY, elastic=False), 0)
    elastic = goodput.simulate(BUSY, 0)
    assert rigid.goodput < elastic.goodput - 0.2
    assert rigid.goodput == pytest.approx(rigid.uptime)


def test_repair_of_several_slices_takes_as_long_as_the_slowest() -> None:
    def mean_stop_s(failures_per_step: float) -> float:
        options = HardwareOptions(
            chips=100, learners=1, slice_chips=1, mtbi_s=100 / failures_per_step, elastic=False
        )
        learner = goodput.simulate(options, 0, 200_000.0).learners[0]
        return 200_000.0 * (1 - learner.uptime) / learner.stops

    # A stop of about 74 s for one slice; of two or three the slowest takes visibly longer than the mean.
    assert mean_stop_s(0.01) == pytest.approx(74, abs=2)
    assert mean_stop_s(2.0) > 85


def test_failures_during_stops_lower_goodput() -> None:
    assert (
        goodput.simulate(replace(BUSY, fails_while_stopped=True), 0).goodput
        < goodput.simulate(BUSY, 0).goodput
    )


def test_a_learner_of_one_slice_stops_until_it_is_back() -> None:
    options = HardwareOptions(chips=100, learners=1, slice_chips=100, mtbi_s=100 * 1000.0, return_s=500.0)
    figures = goodput.simulate(options, 0)
    # Every 1,000 useful seconds it waits for the return and an upscale; the downscale falls into the wait.
    assert figures.goodput == pytest.approx(1000 / (1000 + 500 + options.upscale_s), abs=0.02)


def test_preempted_slices_neither_work_nor_count_as_owned() -> None:
    trace = CapacityTrace(points=((100.0, 0.5),))
    options = HardwareOptions(chips=4096, learners=1, mtbi_s=math.inf, downscale_s=20.0, capacity=trace)
    figures = goodput.simulate(options, 0, 220.0)
    # 100 s with four slices, a stop of 20 s and 100 s with two.
    assert figures.goodput == pytest.approx((400 + 200) / (400 + 240))
    assert figures.learners[0].stops == 1


def test_a_learner_that_is_given_up_and_comes_back_stops_nobody() -> None:
    trace = CapacityTrace(points=((100.0, 0.0), (200.0, 1.0)))
    options = HardwareOptions(
        chips=2048, learners=2, mtbi_s=math.inf, capacity=trace, capacity_from_learner=1
    )
    figures = goodput.simulate(options, 0, 300.0)
    assert (figures.goodput, figures.uptime) == (1.0, 1.0)
    assert [learner.uptime for learner in figures.learners] == pytest.approx([1.0, 2 / 3])


def test_a_change_of_capacity_that_changes_nothing_stops_nobody() -> None:
    trace = CapacityTrace(points=((0.0, 1.0), (50.0, 1.0)))
    options = HardwareOptions(chips=2048, learners=1, mtbi_s=math.inf, capacity=trace)
    assert goodput.simulate(options, 0, 100.0).goodput == 1.0


def test_slices_taken_away_while_out_do_not_return() -> None:
    options = HardwareOptions(
        chips=64, learners=1, slice_chips=8, mtbi_s=64 * 30.0, return_s=300.0,
        capacity=CapacityTrace(points=tuple((500.0 * k, (k % 3) / 2) for k in range(1, 200))),
    )  # fmt: skip
    line = goodput.timeline(options, 0, 100_000.0, seed=0)
    assert line.slices.min() > 0
    assert line.slices.max() <= 8
    assert (line.start_s[1:] >= line.end_s[:-1]).all()
    assert float(((line.end_s - line.start_s) * line.slices).sum()) <= line.owned_slice_s


def test_hardware_that_fails_in_every_step_ends_and_is_useless() -> None:
    figures = goodput.simulate(HardwareOptions(chips=1000, learners=1, slice_chips=10, mtbi_s=1.0), 0, 2000.0)
    assert figures.goodput < 0.01


def test_uptime_counts_overlapping_stretches_once() -> None:
    def line(*stretches: tuple[float, float]) -> goodput.Timeline:
        starts, ends = np.array(stretches).T
        return goodput.Timeline(
            start_s=starts, end_s=ends, slices=np.ones(len(starts), dtype=np.int64),
            owned_slice_s=10.0, failures=0, stops=0, step_s=1.0,
        )  # fmt: skip

    share = goodput.stepping_share([line((0, 6), (7, 8)), line((2, 3), (5, 7))], 10.0)
    assert share == pytest.approx(0.8)


def test_a_horizon_of_no_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="horizon_s=0"):
        goodput.simulate(BUSY, 0, 0.0)
