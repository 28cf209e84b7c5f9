"""Training in virtual time: the same storm gives the same losses and tapes, and survives its syncer."""

from pathlib import Path

from archipel.config import load
from archipel.protocol import messages as m
from archipel.roles.replaying import replay
from archipel.roles.simulation import train_virtually
from archipel.tape.replay import verify
from archipel.tape.tape import read, workers

SMALL = [
    "sync.learners=3", "sync.steps=40", "sync.fragments=4", "sync.interval_steps=4",
    "sync.outer_momentum=0.5", "sync.checkpoint_rounds=5", "model.width=16", "model.layers=1",
    "model.heads=2",
    "data.sequence=16",
    "data.batch=4", "evaluate.every_rounds=20", "evaluate.batches=1", "sim.speed_spread=0.2",
]  # fmt: skip
STORM = ["sim.weather={kill_s=30.0, partition_s=40.0, syncer_kill_s=15.0, mean_for_s=3.0}"]


def test_a_calm_run_learns() -> None:
    config = load(None, SMALL)
    outcome, losses = train_virtually(config, config.sim)
    assert outcome.complete and outcome.engine.syncer.rounds_merged == 40
    assert losses.points[-1]["loss"] < 0.9 * losses.points[0]["loss"]


def test_one_seed_gives_one_tape_and_one_loss(tmp_path: Path) -> None:
    config = load(None, SMALL + STORM)
    first, losses = train_virtually(config, config.sim, seed=4, folder=tmp_path / "a")
    second, again = train_virtually(config, config.sim, seed=4, folder=tmp_path / "b")
    assert first.tape_digest == second.tape_digest and losses.points == again.points
    other, _ = train_virtually(config, config.sim, seed=5, folder=tmp_path / "c")
    assert other.tape_digest != first.tape_digest


def test_the_runs_seed_draws_weights_and_data_as_in_a_live_run() -> None:
    firsts = []
    for seed in (0, 1):
        config = load(None, [*SMALL, "sync.steps=4", f"run.seed={seed}"])
        firsts.append(train_virtually(config, config.sim)[1].points[0]["loss"])
    assert firsts[0] != firsts[1]


def test_a_storm_that_takes_the_syncer_too_is_survived_and_verifies(tmp_path: Path) -> None:
    config = load(None, SMALL + STORM)
    outcome, losses = train_virtually(config, config.sim, seed=4, folder=tmp_path)
    assert outcome.complete and outcome.engine.epochs > 1
    assert outcome.engine.syncer.ledger.closes()
    assert losses.points[-1]["loss"] < losses.points[0]["loss"]
    assert verify(tmp_path).equal


BLOCKING = [
    *SMALL, "sync.learners=2", "sync.quorum=2", "sync.steps=20", "sync.fragments=1", "sync.interval_steps=5",
    "sync.overlap_steps=0", "sync.merge=average", "sync.checkpoint_rounds=1", "sim.fold_s=0.3",
    "sim.merge_s=0.5",
]  # fmt: skip


def test_a_blocking_run_comes_to_the_same_weights_whenever_its_syncer_is_stopped(tmp_path: Path) -> None:
    """Between rounds, while steps are taken, while pushes are folded and while a merge is under way."""
    straight = load(None, BLOCKING)
    _, losses = train_virtually(straight, straight.sim)
    plan = tmp_path / "plan.toml"
    for at_s in (2.0, 6.05, 6.3, 6.7, 7.2, 13.4):
        plan.write_text(f'[[fault]]\nkind="stop"\nworker="syncer"\nat_s={at_s}\nfor_s=3.0\n')
        stopped = load(None, [*BLOCKING, f"sim.faults={plan}"])
        outcome, again = train_virtually(stopped, stopped.sim)
        assert outcome.complete and outcome.engine.epochs == 2
        assert again.outer.digest() == losses.outer.digest(), at_s


ALONE = [
    *SMALL, "sync.learners=1", "sync.fragments=1", "sync.interval_steps=40", "sync.overlap_steps=0",
    "sync.merge=average", "sync.outer_lr=1.0", "sync.outer_momentum=0.0", "sync.push_codec=float32",
]  # fmt: skip


def test_a_lone_learner_that_is_merged_once_is_evaluated_on_its_way() -> None:
    config = load(None, ALONE)
    outcome, losses = train_virtually(config, config.sim, own_every=10)
    assert outcome.engine.syncer.rounds_merged == 1
    found = [point["loss"] for point in losses.points]
    assert len(found) == 1 + 4 + 1 and found == sorted(found, reverse=True)
    assert abs(found[-1] - found[-2]) < 1e-3  # the merge takes its weights


# ---- imagined hardware ----

HARDWARE = [
    *(option for option in SMALL if "speed_spread" not in option),
    "sim.hardware={chips=96, slice_chips=4, mtbi_s=1000.0, return_s=30.0,"
    " capacity={type='day_night', period_s=60.0, day_s=20.0, day_share=0.5}}",
]


def test_fewer_slices_take_fewer_windows_and_the_run_can_be_followed_bit_for_bit(tmp_path: Path) -> None:
    config = load(None, HARDWARE)
    outcome, losses = train_virtually(config, config.sim, seed=2, folder=tmp_path)
    batches = {
        record.event.tokens // config.data.sequence
        for file in workers(tmp_path)
        for record in read(file.path)
        if isinstance(record.event, m.StepCompleted)
    }
    assert outcome.complete and batches >= {2, 4}
    followed = replay(tmp_path, [])
    assert followed.first_difference is None and followed.digest == losses.outer.digest()


def test_an_elastic_learner_alone_loses_time_and_hardly_any_loss() -> None:
    alone = [option for option in ALONE if "speed_spread" not in option]
    whole = load(None, [*alone, "sim.hardware={chips=96, slice_chips=4, mtbi_s=inf}"])
    failing = load(None, [*alone, "sim.hardware={chips=96, slice_chips=4, mtbi_s=2000.0}"])
    calm, losses = train_virtually(whole, whole.sim)
    stormy, others = train_virtually(failing, failing.sim)
    assert stormy.figures()["slices_failed"] > 0
    assert stormy.engine.now > calm.engine.now + 20.0
    assert abs(others.points[-1]["loss"] - losses.points[-1]["loss"]) < 0.1
