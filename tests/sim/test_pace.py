"""Steps on imagined hardware: what a failed chip costs, and that the fast path says the same."""

import math
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from archipel.protocol import messages as m
from archipel.protocol.schedule import SyncOptions
from archipel.sim import goodput
from archipel.sim.engine import Engine
from archipel.sim.hardware import CapacityTrace, DayNight, HardwareOptions, Spot
from archipel.sim.pace import Island
from archipel.sim.ports import LearnerOptions
from archipel.sim.scenario import Outcome, Run, SimOptions, simulate

CALM = HardwareOptions(chips=64, learners=1, slice_chips=8, mtbi_s=math.inf)
BUSY = HardwareOptions(chips=4096, slice_chips=64, mtbi_s=400_000.0)
SYNC = SyncOptions(steps=60, learners=1, fragments=2, interval_steps=2, overlap_steps=1)


class Steps:
    """The completed steps of a run: (worker, when, tokens)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def __call__(self, worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        if isinstance(event, m.StepCompleted):
            self.seen.append((worker, now, event.tokens))

    def gaps(self) -> list[float]:
        """Return the time between steps where it is more than a step."""
        times = [now for _, now, _ in self.seen]
        between = (round(later - sooner, 6) for sooner, later in pairwise(times))
        return [gap for gap in between if gap > 1.0]


def ran(hardware: HardwareOptions, sync: SyncOptions = SYNC, seed: int = 0) -> tuple[Outcome, Steps]:
    steps = Steps()
    return simulate(Run(sync, SimOptions(hardware=hardware), seed=seed), watch=steps), steps


def traced(*points: tuple[float, float], **changes: Any) -> HardwareOptions:
    return replace(CALM, capacity=CapacityTrace(points=points), **changes)


# ---- one learner ----


def test_whole_hardware_changes_nothing() -> None:
    outcome, steps = ran(CALM)
    assert outcome.figures()["goodput"] > 0.99
    assert {tokens for _, _, tokens in steps.seen} == {1000} and not steps.gaps()


def test_a_failed_chip_costs_its_step_and_a_downscale_and_its_return_an_upscale() -> None:
    outcome, steps = ran(replace(CALM, mtbi_s=64 * 60.0, return_s=1.0), seed=1)
    failures = outcome.figures()["slices_failed"]
    assert failures > 0  # back before the stop is over, so that nothing stops it again
    # The lost step, the stop, and the step that is completed then.
    assert steps.gaps() == [1.0 + CALM.downscale_s + 1.0] * failures


def test_fewer_slices_carry_proportionally_fewer_tokens() -> None:
    _, steps = ran(traced((10.0, 0.5), (40.0, 0.25)))
    first = [tokens for _, now, tokens in steps.seen if now < 10.0]
    halved = [tokens for _, now, tokens in steps.seen if 12.0 < now < 40.0]
    assert set(first) == {1000} and set(halved) == {500}
    assert steps.seen[-1][2] == 250
    assert steps.gaps() == [1.0 + CALM.downscale_s] * 2


def test_rows_are_whole_and_make_up_for_what_rounding_keeps_back() -> None:
    island = Island(traced((0.0, 0.625)), 0, 0)
    island.slices.admit(0.0)
    rows = [island.rows(2) for _ in range(40)]
    assert set(rows) == {1, 2} and sum(rows) == 50


def test_a_step_has_at_least_one_row() -> None:
    island = Island(traced((0.0, 0.125)), 0, 0)
    island.slices.admit(0.0)
    assert [island.rows(2) for _ in range(8)] == [1] * 8


def test_a_learner_without_slices_is_dead_and_comes_back_as_another_process() -> None:
    sync = replace(SYNC, learners=2)
    hardware = traced((20.0, 0.0), (35.0, 1.0), chips=128, capacity_from_learner=1)
    outcome, steps = ran(hardware, sync)
    absent = [now for worker, now, _ in steps.seen if worker == "learner-1" and 21.0 < now < 36.0]
    after = [now for worker, now, _ in steps.seen if worker == "learner-1" and now > 36.0]
    assert outcome.complete and not absent and after
    texts = [text for _, worker, text in outcome.witness.notices if worker == "syncer"]
    assert sum(text.startswith("joined worker=learner-1") for text in texts) == 2


def test_a_learner_that_owns_nothing_at_first_joins_later() -> None:
    cycle = DayNight(period_s=40.0, day_s=20.0)
    hardware = replace(CALM, chips=128, capacity=cycle, capacity_from_learner=1)
    _, steps = ran(hardware, replace(SYNC, learners=2))
    theirs = [now for worker, now, _ in steps.seen if worker == "learner-1"]
    assert theirs[0] > 20.0 and not [now for now in theirs if 41.0 < now < 60.0]
    assert next(now for worker, now, _ in steps.seen if worker == "learner-0") < 2.0


def test_preempted_slices_come_and_go_while_the_run_goes_on() -> None:
    outcome, steps = ran(replace(CALM, capacity=Spot(preemption_interval_s=100.0, absence_s=30.0)), seed=2)
    assert outcome.complete
    assert len({tokens for _, _, tokens in steps.seen}) > 2


def test_a_learner_that_is_killed_during_a_stop_steps_again_when_it_is_back() -> None:
    made = Engine(SYNC)
    made.add("L-0", LearnerOptions(), island=Island(traced((10.0, 0.5)), 0, 0))
    made.kill("L-0", at=14.0)
    made.restart("L-0", at=16.0)
    made.run(until=19.0)
    assert made.hosts["L-0"].steps >= 1


def test_a_lost_step_is_no_uptime() -> None:
    outcome, _ = ran(replace(CALM, mtbi_s=64 * 10.0), seed=3)
    figures = outcome.figures()
    useful = sum(island.useful_slice_s for island in outcome.engine.pace.islands.values())
    assert figures["slices_failed"] > 0
    assert useful <= figures["uptime"] * figures["virtual_s"] * 8 + 1e-6


# ---- the fast path ----


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("learners", [1, 2, 4])
def test_step_by_step_agrees_with_jumping_from_event_to_event(learners: int, elastic: bool) -> None:
    """The same slices fail at the same stepping time in both: what differs is when the protocol lets a
    learner begin."""
    hardware = replace(BUSY, elastic=elastic)
    sync = SyncOptions(steps=2000, learners=learners, fragments=4, interval_steps=4)
    outcome, _ = ran(hardware, sync, seed=3)
    figures = outcome.figures()
    fast = goodput.simulate(replace(hardware, learners=learners), 3, figures["virtual_s"])
    assert figures["slices_failed"] == pytest.approx(fast.failures, abs=1)
    assert figures["slices_failed"] > 5
    assert figures["goodput"] == pytest.approx(fast.goodput, abs=0.02)
    assert figures["uptime"] == pytest.approx(fast.uptime, abs=0.02)


def test_the_protocol_on_hardware_comes_near_what_long_runs_of_the_fast_path_say() -> None:
    """Other seeds on each side, so that only the statistics can agree."""
    hardware = replace(BUSY, learners=4)
    sync = SyncOptions(steps=6000, learners=4, fragments=4, interval_steps=4)
    figures = ran(hardware, sync, seed=11)[0].figures()
    fast = goodput.simulate(hardware, 5)
    assert figures["goodput"] == pytest.approx(fast.goodput, abs=0.03)
    assert figures["uptime"] == pytest.approx(fast.uptime, abs=0.03)


def test_unequal_speeds_and_failures_agree_with_the_fast_path_too() -> None:
    hardware = replace(BUSY, learners=3, speed_spread=0.3)
    sync = SyncOptions(steps=2000, learners=3, fragments=4, interval_steps=4)
    figures = ran(hardware, sync, seed=4)[0].figures()
    fast = goodput.simulate(hardware, 4, figures["virtual_s"])
    assert figures["goodput"] == pytest.approx(fast.goodput, abs=0.02)
