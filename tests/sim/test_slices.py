"""Slices of one learner: what fails, returns and is given away, on cases one can do by head."""

import math

from msgspec.structs import replace

from archipel.sim.hardware import CapacityTrace, HardwareOptions
from archipel.sim.slices import Slices

CALM = HardwareOptions(chips=64, learners=1, slice_chips=8, mtbi_s=math.inf)
BUSY = replace(CALM, mtbi_s=64 * 100.0)


def traced(*points: tuple[float, float]) -> Slices:
    return Slices(replace(CALM, capacity=CapacityTrace(points=points)), 0, 0)


def fail_once(slices: Slices) -> float:
    """Step until a chip has failed; return when its step was over."""
    now_s = 0.0
    while slices.survive(1.0):
        now_s += 1.0
    slices.fail(slices.failing_hz - slices.exposure, now_s + 1.0)
    return now_s + 1.0


def test_chips_that_never_fail_survive_for_ever() -> None:
    slices = Slices(CALM, 0, 0)
    assert slices.survive(1e12)
    assert slices.next_s == math.inf


def test_a_failed_slice_is_out_until_it_is_admitted() -> None:
    slices = Slices(BUSY, 0, 3)
    fail_once(slices)
    assert (slices.live, slices.owned, slices.failures) == (7, 8, 1)
    back_s = slices.next_s
    assert slices.admit(back_s - 1e-6) is None
    assert slices.admit(back_s) == BUSY.upscale_s
    assert slices.live == 8


def test_where_all_wait_for_repair_no_slice_is_missing_and_the_stop_takes_the_return_time() -> None:
    elastic, rigid = Slices(BUSY, 0, 3), Slices(replace(BUSY, elastic=False), 0, 3)
    now_s = fail_once(elastic)
    while rigid.survive(1.0):
        pass
    stop_s = rigid.fail(rigid.failing_hz - rigid.exposure, now_s)
    assert rigid.live == 8
    assert stop_s == elastic.next_s - now_s + BUSY.downscale_s + BUSY.upscale_s


def test_what_returns_during_a_stop_joins_at_its_end() -> None:
    slices = Slices(BUSY, 0, 3)
    fail_once(slices)
    slices.stopped(100.0, slices.next_s + 1.0)
    assert slices.live == 8 and slices.next_s == math.inf


def test_fewer_slices_stop_a_learner_for_a_downscale_more_for_an_upscale() -> None:
    slices = traced((10.0, 0.5), (20.0, 1.0))
    assert slices.admit(10.0) == CALM.downscale_s and slices.live == 4
    assert slices.admit(20.0) == CALM.upscale_s and slices.live == 8


def test_coming_into_being_and_going_stop_nobody() -> None:
    slices = traced((0.0, 0.0), (20.0, 1.0), (30.0, 0.0))
    assert slices.admit(0.0) is None and slices.live == 0
    assert slices.admit(20.0) is None and slices.live == 8
    assert slices.admit(30.0) is None and slices.owned == 0


def test_owned_slice_time_follows_capacity_up_to_the_horizon() -> None:
    options = replace(CALM, capacity=CapacityTrace(points=((10.0, 0.5),)))
    slices = Slices(options, 0, 0, horizon_s=30.0)
    slices.admit(10.0)
    slices.count_to(50.0)
    assert slices.owned_slice_s == 8 * 10 + 4 * 20
