"""A run in virtual time from its options: tapes, determinism, hardware and all-reduces."""

from pathlib import Path

import pytest

from archipel.config import Config, dump, load
from archipel.errors import ConfigError
from archipel.sim.scenario import AllReduce, Outcome, Run, simulate
from archipel.tape.replay import verify

FAILING = (
    "sim.hardware={chips=4096, slice_chips=256, mtbi_s=100000.0, return_s=20.0,"
    " capacity={type='day_night', period_s=60.0, day_s=40.0}, capacity_from_learner=3}"
)
SMALL = ["sync.learners=4", "sync.steps=150", "sync.fragments=4", "sync.interval_steps=4", FAILING]
STORM = "sim.weather={kill_s=60.0, freeze_s=80.0, partition_s=70.0, syncer_kill_s=100.0, mean_for_s=10.0}"


def ran(config: Config, seed: int, folder: Path | None = None) -> Outcome:
    return simulate(Run(config.sync, config.sim, seed=seed), folder=folder)


def test_a_seed_gives_the_same_tapes_byte_for_byte_on_failing_hardware_in_a_storm(tmp_path: Path) -> None:
    config = load(None, [*SMALL, STORM])
    folders = [tmp_path / name for name in ("one", "again", "other")]
    for folder, seed in zip(folders, (7, 7, 8), strict=True):
        assert ran(config, seed, folder).complete
    tapes = [{path.name: path.read_bytes() for path in (folder / "tape").iterdir()} for folder in folders]
    assert tapes[0] == tapes[1] and tapes[0] != tapes[2]


def test_decisions_on_failing_hardware_follow_from_their_tapes(tmp_path: Path) -> None:
    assert ran(load(None, [*SMALL, STORM]), 7, tmp_path).figures()["slices_failed"] > 0
    assert verify(tmp_path).equal


def test_a_cluster_is_shared_out_over_the_runs_learners() -> None:
    outcome = ran(
        load(None, ["sync.learners=2", "sync.steps=5", "sim.hardware={chips=4096, slice_chips=256}"]), 0
    )
    islands = outcome.engine.pace.islands
    assert [island.slices.full for island in islands.values()] == [8, 8]


def test_a_cluster_of_other_learners_than_the_run_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hardware\.learners=3 is not sync\.learners=2"):
        load(None, ["sync.learners=2", "sim.hardware={learners=3}"])
    with pytest.raises(ConfigError, match=r"capacity_from_learner=3 is outside 0 … hardware\.learners=2"):
        load(None, ["sync.learners=2", "sim.hardware={capacity_from_learner=3}"])


def test_hardware_says_how_long_steps_take() -> None:
    with pytest.raises(ConfigError, match=r"sim\.jitter=0\.1 beside sim\.hardware"):
        load(None, [*SMALL, "sim.jitter=0.1"])


def test_hardware_that_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"hardware\.mtbi_s=0"):
        load(None, ["sim.hardware={mtbi_s=0.0}"])


def test_hardware_in_a_dumped_configuration_loads_as_it_was(tmp_path: Path) -> None:
    for overrides in (SMALL, ["sim.hardware={mtbi_s=inf}"]):
        written = load(None, overrides)
        (tmp_path / "run.toml").write_text(dump(written))
        assert load(tmp_path / "run.toml") == written


# ---- data parallel over several sites ----


def test_an_all_reduce_is_hidden_by_the_backward_pass_but_for_its_last_bucket() -> None:
    # 1e9 parameters of 16 bits between two sites at 4 GB/s: 0.5 s, of which a fortieth shows.
    assert AllReduce(sites=2, bytes_per_s=4e9).exposed_s(1e9, 1.0) == pytest.approx(0.5 / 40)
    # At 0.1 GB/s: 20 s, less two thirds of a second.
    assert AllReduce(sites=2, bytes_per_s=1e8).exposed_s(1e9, 1.0) == pytest.approx(20 - 2 / 3)


def test_a_slow_line_makes_data_parallel_slow_and_its_compute_idle() -> None:
    alone = ["sync.learners=1", "sync.steps=20", "sync.fragments=1", "sync.interval_steps=20",
             "sync.overlap_steps=0", "sim.fragment_bytes=4e9"]  # fmt: skip
    near = ran(load(None, alone), 0).figures()
    far = ran(load(None, [*alone, "sim.all_reduce={sites=2, bytes_per_s=1e8}"]), 0).figures()
    assert far["virtual_s"] - near["virtual_s"] == pytest.approx(20 * (20 - 2 / 3), rel=0.01)
    assert far["goodput"] == pytest.approx(20 / far["virtual_s"], rel=0.01)


# ---- large ----


def test_a_thousand_learners_run_under_the_witness() -> None:
    options = [
        "sync.learners=1000", "data.shards=1000", "sync.steps=4", "sync.fragments=2", "sync.interval_steps=2",
        "sync.overlap_steps=1", "sync.pulls_max=64", "sim.jitter=0.1",
    ]  # fmt: skip
    config = load(None, options)
    outcome = simulate(Run(config.sync, config.sim, shards=config.data.shards), remember=False)
    assert outcome.complete and outcome.engine.syncer.ledger.closes()
    assert outcome.witness.folded > 0.9 * 1000 * outcome.witness.rounds > 0


def test_what_a_witness_keeps_does_not_grow_unless_it_is_to_remember() -> None:
    config = load(None, ["sync.learners=2", "sync.steps=50", "sync.outer_momentum=0.5"])
    run = Run(config.sync, config.sim)
    forgetful, mindful = (simulate(run, remember=remember).witness for remember in (False, True))
    assert not forgetful.merged and not forgetful.ticks and not forgetful.notices
    assert forgetful.rounds == mindful.rounds == len(mindful.merged)
    assert forgetful.folded == sum(len(workers) for *_, workers in mindful.merged)
