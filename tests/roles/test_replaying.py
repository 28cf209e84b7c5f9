"""Replays of simulated runs with real tensors: bit for bit through any storm, in one go or in pieces."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from archipel.config import Config, load, settings_of
from archipel.errors import CheckpointError, ConfigError, TapeError
from archipel.protocol import messages as m
from archipel.roles.local import LocalLearner, LocalSyncer
from archipel.roles.replaying import Replayed, ReplayStopped, conditions, replay
from archipel.roles.resuming import Work
from archipel.roles.simulation import train_virtually
from archipel.roles.syncer import initial_weights
from archipel.sim.scenario import Run, simulate
from archipel.tape.follow import starts
from archipel.tape.record import Header
from archipel.tape.tape import TapeWriter, read, tape_path, workers
from archipel.train import data
from archipel.train.compute import OuterState

SMALL = [
    "sync.learners=3", "sync.steps=30", "sync.fragments=4", "sync.interval_steps=4",
    "sync.outer_momentum=0.5", "sync.checkpoint_rounds=5", "model.width=16", "model.layers=1",
    "model.heads=2", "data.sequence=16", "data.batch=4", "evaluate.every_rounds=100", "evaluate.batches=1",
    "sim.link={bytes_per_s=inf}", "sim.speed_spread=0.2",
]  # fmt: skip
# Learners killed and started again, cut off, frozen; the syncer killed and resumed from its checkpoints.
STORM = [
    "sim.weather={kill_s=30.0, partition_s=40.0, freeze_s=60.0, syncer_kill_s=15.0, mean_for_s=3.0}",
    "sync.push_codec=int4", "sync.error_feedback=true",
]  # fmt: skip
SEED = 5


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run through a storm."""
    folder = tmp_path_factory.mktemp("storm")
    simulated(SMALL + STORM, folder)
    return folder


def simulated(options: list[str], folder: Path) -> str:
    """Write the tapes of a run; return the digest of its weights."""
    config = load(None, options)
    _, losses = train_virtually(config, config.sim, seed=SEED, folder=folder)
    return losses.outer.digest()


def test_a_storm_that_takes_learners_links_and_the_syncer_replays_bit_for_bit(tmp_path: Path) -> None:
    digest = simulated(SMALL + STORM, tmp_path)
    assert sum(len(start.versions) > 0 for start in starts(tmp_path)) >= 3, "it was resumed, not calm"
    found = replay(tmp_path, [])
    assert (found.equal, found.digest, found.first_difference) == (True, digest, None)
    assert found.merges >= 30


def test_a_run_whose_batches_change_from_step_to_step_replays_bit_for_bit(tmp_path: Path) -> None:
    """Slices of an imagined cluster fail and return: a learner's step has the rows that are left to it."""
    cluster = (
        "sim.hardware={chips=24, learners=3, slice_chips=2, mtbi_s=100.0, return_s=4.0, downscale_s=0.1, "
        "upscale_s=0.1}"
    )
    digest = simulated([*SMALL[:-1], cluster], tmp_path)
    tapes = [read(file.path) for file in workers(tmp_path) if file.worker != "syncer"]
    events = [record.event for tape in tapes for record in tape]
    tokens = {event.tokens for event in events if isinstance(event, m.StepCompleted)}
    assert len(tokens) > 1, "several batch sizes took part"
    assert replay(tmp_path, []).digest == digest


def test_a_learner_with_half_the_batch_and_one_that_comes_late_replay_bit_for_bit(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[[fault]]\nkind="kill"\nworker="learner-1"\nat_s=0.0\nfor_s=12.0\n')
    config = load(None, [*SMALL, f"sim.faults={plan}"])
    batches = {"learner-0": 4, "learner-1": 4, "learner-2": 2}
    digest = simulated_apart(config, batches, tmp_path)
    assert replay(tmp_path, []).digest == digest


def simulated_apart(config: Config, batches: dict[str, int], folder: Path) -> str:
    """Write the tapes of a run whose learners have batches of their own; return its digest."""
    schema, weights, model = initial_weights(config, "")
    config = msgspec.structs.replace(config, model=model)
    corpus, outer = data.load(config.data), OuterState(schema, config.sync)
    outer.begin(weights)

    def make_port(name: str, said: Any) -> Any:
        if name not in batches:
            return LocalSyncer(outer, said)
        own = msgspec.structs.replace(config.data, batch=batches[name])
        return LocalLearner(msgspec.structs.replace(config, data=own), corpus, said)

    run = Run(config.sync, config.sim, settings=settings_of(config), schema=schema, make_port=make_port)
    assert simulate(run, folder=folder).complete
    return outer.digest()


# ---- the same storm with one thing changed ----


@pytest.mark.parametrize(
    "change",
    [
        "sync.merge=average",
        "sync.outer_lr=0.3",
        "sync.push_codec=bf16",
        "sync.fragmentation=tensor",
        "optimizer.lr=1e-3",
        "model.seed=7",
    ],
)
def test_an_ablation_is_the_run_that_would_have_been(change: str, storm: Path, tmp_path: Path) -> None:
    """In virtual time, over links without a limit, no tensor decides anything: the other run can be had."""
    other = simulated([*SMALL, *STORM, change], tmp_path)
    found = replay(storm, [change])
    assert found.digest == other
    assert not found.equal and found.val_loss is not None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("sync.fragments=2", "decisions name that many fragments: sync.fragmentation may change"),
        ("sync.quorum=2", "recorded decisions follow from that"),
        ("data.batch=2", "every step's tokens are recorded"),
        ("data.sequence=8", "tokens are counted in windows"),
        ("run.seed=3", "change model.seed or data.seed"),
        ("checkpoint.keep=1", "takes part in a replay"),
        ("sync.no_such=1", "no option"),
    ],
)
def test_what_decisions_were_made_from_may_not_change(change: str, reason: str, storm: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        replay(storm, [change])


def test_a_change_to_what_the_run_had_is_no_change(storm: Path) -> None:
    assert replay(storm, ["sync.fragments=4", "sync.push_codec=int4"]).equal


def test_an_ablation_that_breaks_down_says_where(storm: Path) -> None:
    with pytest.raises(TapeError, match="cannot be"):
        replay(storm, ["optimizer.lr=1e30", "optimizer.clip=0.0"])


# ---- in pieces ----


def in_pieces(folder: Path, work: Path, overrides: list[str], records: int) -> tuple[Replayed, int]:
    """Replay, stopping after so many records each time and going on; return the outcome and the pieces."""
    pieces, countdown = 1, [records]

    def stopped() -> bool:
        countdown[0] -= 1
        return countdown[0] == 0

    while True:
        try:
            kept = Work(work, resume=pieces > 1)
            return replay(folder, overrides, work=kept, stopped=stopped, evaluated=True), pieces
        except ReplayStopped:
            pieces, countdown[0] = pieces + 1, records


def facts(found: Replayed) -> Replayed:
    return msgspec.structs.replace(found, seconds=0.0, resumed_at=0)


def test_a_replay_in_pieces_comes_to_the_same_bits(storm: Path, tmp_path: Path) -> None:
    """Stopped some twenty times, within rounds, while pushes and updates are in flight, between syncers."""
    whole = replay(storm, [], evaluated=True)
    found, pieces = in_pieces(storm, tmp_path / "work", [], 97)
    assert pieces > 15 and found.resumed_at > 0
    assert found.equal and facts(found) == facts(whole)
    assert not (tmp_path / "work").exists(), "nothing is left to go on from"


def test_an_ablation_in_pieces_comes_to_the_same_bits(storm: Path, tmp_path: Path) -> None:
    changes = ["sync.fragmentation=tensor", "sync.merge=average"]
    found, _ = in_pieces(storm, tmp_path / "work", changes, 400)
    assert facts(found) == facts(replay(storm, changes))


def stop_early(folder: Path, work: Work, overrides: list[str]) -> None:
    with pytest.raises(ReplayStopped, match="goes on"):
        replay(folder, overrides, work=work, stopped=lambda: True)


def test_what_is_kept_of_another_replay_is_refused(storm: Path, tmp_path: Path) -> None:
    kept = Work(tmp_path / "work", resume=True)
    stop_early(storm, kept, [])
    with pytest.raises(CheckpointError, match="a replay with no --set, this one has --set sync"):
        replay(storm, ["sync.merge=average"], work=kept)
    simulated(SMALL, tmp_path / "other")
    with pytest.raises(CheckpointError, match="of other tapes"):
        replay(tmp_path / "other", [], work=kept)


def test_without_resume_it_begins_anew(storm: Path, tmp_path: Path) -> None:
    stop_early(storm, Work(tmp_path), ["sync.merge=average"])
    assert replay(storm, [], work=Work(tmp_path)).resumed_at == 0


def test_checkpoints_of_a_run_are_not_taken_for_a_replays(storm: Path, tmp_path: Path) -> None:
    from archipel.runtime import checkpoint

    checkpoint.save(tmp_path, 5, {}, {}, run="a run", keep=1)
    with pytest.raises(CheckpointError, match="a run"):
        replay(storm, [], work=Work(tmp_path))
    assert (tmp_path / "step-000000005").exists()


def test_a_folder_that_cannot_be_written_costs_only_the_way_back(storm: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert replay(storm, [], work=Work(tmp_path / "file" / "work", every_s=0.2)).equal


# ---- what does not hold here ----


def test_other_conditions_are_named_with_their_workers(storm: Path, tmp_path: Path) -> None:
    environment = {"torch": "1.0", "threads": 3}
    for file in workers(storm):
        tape = read(file.path)
        records = list(tape)
        assert isinstance(tape.header, Header)
        here = environment if file.worker == "syncer" else {}
        writer = TapeWriter(
            tape_path(tmp_path, file.worker, file.incarnation),
            msgspec.structs.replace(tape.header, environment=here),
        )
        for record in records:
            writer.write(record.t, record.event, record.actions, record.clock)
        writer.close()
    (found,) = conditions(tmp_path)
    assert found.startswith("torch: recorded '1.0', here '") and found.endswith("(syncer)")


def test_a_run_is_not_equal_if_nothing_could_be_compared(tmp_path: Path) -> None:
    config = load(None, [*SMALL, "sync.steps=2", "sync.fragments=1", "sync.interval_steps=8"])
    train_virtually(config, config.sim, seed=1, folder=tmp_path)
    found = replay(tmp_path, [])
    assert found.merges == 0 and not found.equal
