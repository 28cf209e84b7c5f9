"""The planner: what it recommends where, what it says limits, and that its text and table hold together."""

import json
import math

import pytest
from msgspec.structs import replace

from archipel.errors import ConfigError
from archipel.sim import planner
from archipel.sim.planner import PlanOptions, Setting, plan, round_gbit_s

WIDE = PlanOptions(chips=1_200_000, link_gbit_s=1000.0)


def test_many_failing_chips_ask_for_many_learners() -> None:
    few, many = plan(replace(WIDE, chips=64)), plan(WIDE)
    assert few.learners == 2
    assert many.learners == 16
    assert any(limit.startswith("failures") for limit in many.limits)


def test_a_wide_link_gets_the_papers_settings() -> None:
    chosen = plan(WIDE)
    assert (chosen.quorum, chosen.fragments, chosen.interval_steps, chosen.overlap_steps) == (1, 24, 24, 2)
    assert (chosen.push_codec, chosen.update_codec, chosen.fits) == ("bf16", "float32", True)
    assert not any(limit.startswith("link") for limit in chosen.limits)


def test_a_narrower_link_gets_fewer_bits_then_rarer_rounds_and_says_so() -> None:
    wide = plan(replace(WIDE, chips=2048, link_gbit_s=100.0))
    narrow = plan(replace(WIDE, chips=2048, link_gbit_s=4.0))
    assert wide.interval_steps < narrow.interval_steps
    assert narrow.fits
    assert narrow.needed_gbit_s <= 4.0 * WIDE.link_share
    assert any(limit.startswith("link") for limit in narrow.limits)


def test_a_hopeless_link_is_called_so() -> None:
    chosen = plan(PlanOptions(chips=1024, parameters=1e12, link_gbit_s=0.1))
    assert not chosen.fits
    assert "times more rarely" in chosen.limits[0]


def test_latency_longer_than_two_steps_asks_for_more_overlap() -> None:
    chosen = plan(PlanOptions(chips=64, parameters=1e6, step_s=0.1, link_latency_s=0.1))
    assert chosen.overlap_steps == 4
    assert chosen.fits


def test_latency_beyond_every_overlap_fits_nothing_and_stays_printable() -> None:
    chosen = plan(PlanOptions(chips=64, parameters=1e6, step_s=0.1, link_latency_s=10.0))
    assert not chosen.fits
    assert planner.as_dict(chosen)["needed_gbit_s"] is None
    assert "inf" in planner.render(chosen)


def test_one_good_site_does_not_need_learners_and_is_told() -> None:
    chosen = plan(PlanOptions(chips=16, sites=1, slice_chips=1, parameters=1e8, link_latency_s=0.0))
    assert any("data parallel would do as well" in limit for limit in chosen.limits)


def test_every_site_gets_as_many_learners() -> None:
    chosen = plan(PlanOptions(chips=30_000, sites=3))
    assert [row.learners for row in chosen.table] == [1, 3, 6, 12]


def test_round_bandwidth_by_head() -> None:
    # 4 learners at 2 sites: 2 remote ones. Pushes 2 × 24 Gbit × 16 bits, updates twice that; P = 24.
    options = PlanOptions(parameters=24e9, step_s=1.0, link_latency_s=0.0)
    # In time: (32 + 64) Gbit within 2 s. In H steps: 24 · 64 Gbit within 24 s, or 48 s.
    assert round_gbit_s(options, 4, Setting()) == pytest.approx(64)
    assert round_gbit_s(options, 4, Setting(interval_steps=48)) == pytest.approx(48)
    assert round_gbit_s(replace(options, link_latency_s=0.7), 4, Setting()) == math.inf


def test_prediction_and_simulation_of_the_choice_agree() -> None:
    for chips in (150_000, 2_400_000):
        chosen = plan(replace(WIDE, chips=chips))
        assert chosen.goodput_simulated == pytest.approx(chosen.goodput, abs=0.02)


def test_all_learners_step_together_less_often_the_more_they_are() -> None:
    shares = [row.all_up for row in plan(replace(WIDE, chips=600_000)).table]
    assert shares[0] == pytest.approx(0.70, abs=0.02)  # data parallel: its uptime
    assert shares[1:] == sorted(shares[1:], reverse=True)


def test_constants_left_alone_are_marked_fitted_and_others_given() -> None:
    constants = plan(PlanOptions(chips=1024, upscale_s=5.0)).constants
    assert constants["downscale_s"]["source"] == "fitted to Table 1"
    assert constants["upscale_s"] == {"value": 5.0, "source": "given in the options"}


def test_plan_is_plain_json_and_text() -> None:
    chosen = plan(PlanOptions(chips=150_000))
    told = json.loads(json.dumps(planner.as_dict(chosen), allow_nan=False))
    assert told["learners"] == chosen.learners
    assert len(told["table"]) == len(chosen.table)
    text = planner.render(chosen)
    assert f"M={chosen.learners} learners, K=1" in text
    assert "(fitted to Table 1)" in text
    assert text.count("\n> ") == 1


def test_same_options_same_plan() -> None:
    assert plan(PlanOptions(), seed=3) == plan(PlanOptions(), seed=3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"parameters": 0}, "plan.parameters=0"),
        ({"link_gbit_s": math.inf}, "plan.link_gbit_s=inf"),
        ({"link_share": 1.5}, "plan.link_share=1.5"),
        ({"sites": 0}, "plan.sites=0"),
        ({"sites": 20}, "plan.learners_max=16 is below 20"),
        ({"chips": 1}, "plan.chips=1"),
        ({"mtbi_s": 0.0}, "hardware.mtbi_s=0.0"),
        ({"link_latency_s": -1.0}, "plan.link_latency_s=-1.0"),
    ],
)
def test_wrong_options_are_refused_by_name(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        PlanOptions(**wrong)  # type: ignore[arg-type]
