"""A gossip run carried out again from its tapes: bit for bit, and with one thing changed."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from archipel.config import load
from archipel.errors import CheckpointError, ConfigError, DataError
from archipel.protocol import messages as m
from archipel.roles.followed_peers import ReplayedGossip, is_gossip, replay_gossip
from archipel.roles.gossiping import gossip_virtually
from archipel.roles.replaying import ReplayStopped
from archipel.roles.resuming import Work
from archipel.tape.replay import verify
from archipel.tape.tape import TapeWriter, read, tape_path, workers

SMALL = [
    "gossip.peers=3", "gossip.rounds=8", "gossip.local_steps=3", "gossip.scheme=one_peer",
    "model.width=16", "model.layers=1", "model.heads=2", "data.sequence=16", "data.batch=4",
    "evaluate.batches=1", "sim.speed_spread=0.3",
]  # fmt: skip
STORM = ["sim.weather={kill_s=25.0, partition_s=40.0, slow_s=20.0, mean_for_s=4.0}"]
# Peers are killed, and come back with a checkpoint or as clones.
SAVING = [*STORM, "gossip.rounds=16", "gossip.timeout_s_max=6.0", "gossip.checkpoint_rounds=2"]


def run_of(folder: Path, *more: str, seed: int = 3) -> None:
    config = load(None, [*SMALL, *more])
    outcome, *_ = gossip_virtually(config, config.sim, seed=seed, folder=folder)
    assert outcome.complete


def test_a_calm_run_comes_out_bit_for_bit(tmp_path: Path) -> None:
    run_of(tmp_path)
    found = replay_gossip(tmp_path, [])
    assert found.equal and found.compared > 3 * 8 and found.first_difference is None


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_storm_comes_out_bit_for_bit(tmp_path: Path, seed: int) -> None:
    run_of(tmp_path, *STORM, "gossip.rounds=16", "gossip.timeout_s_max=6.0", seed=seed)
    assert verify(tmp_path).equal
    found = replay_gossip(tmp_path, [])
    assert found.first_difference is None and found.equal


@pytest.mark.parametrize("seed", [1, 2])
def test_a_peer_killed_right_after_its_checkpoint_comes_out_bit_for_bit(tmp_path: Path, seed: int) -> None:
    """Nothing on its tape follows the checkpoint, and the next process of it begins with that."""
    run_of(tmp_path, *SAVING, seed=seed)
    headers = [tape.header for tape in map(read, (file.path for file in workers(tmp_path))) if any(tape)]
    assert any(header and header.settings.get("machine", {}).get("kept", -1) > 0 for header in headers)
    found = replay_gossip(tmp_path, [])
    assert found.first_difference is None and found.equal


def test_another_learning_rate_is_an_ablation_under_the_same_storm(tmp_path: Path) -> None:
    run_of(tmp_path)
    found = replay_gossip(tmp_path, ["gossip.outer_lr=0.3"])
    assert not found.equal and found.first_difference is not None


def test_what_decisions_were_made_from_may_not_change(tmp_path: Path) -> None:
    run_of(tmp_path)
    with pytest.raises(ConfigError, match=r"gossip\.local_steps"):
        replay_gossip(tmp_path, ["gossip.local_steps=5"])


def test_another_model_is_an_ablation_too(tmp_path: Path) -> None:
    run_of(tmp_path)
    found = replay_gossip(tmp_path, ["model.width=24"])
    assert found.first_difference is not None and found.compared > 3 * 8


def test_tapes_of_peers_alone_are_gossip(tmp_path: Path) -> None:
    """A rendezvous may be on another host, and a list of members needs none."""
    run_of(tmp_path)
    assert is_gossip(tmp_path)
    for file in workers(tmp_path):
        if file.worker == "rendezvous":
            file.path.unlink()
    assert is_gossip(tmp_path) and replay_gossip(tmp_path, []).first_difference is None


# ---- in pieces ----


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run through a storm."""
    folder = tmp_path_factory.mktemp("storm")
    run_of(folder, *SAVING, seed=4)
    return folder


def in_pieces(folder: Path, work: Path, overrides: list[str], records: int) -> tuple[ReplayedGossip, int]:
    """Replay, stopping after so many records each time and going on; return the outcome and the pieces."""
    pieces, countdown = 1, [records]

    def stopped() -> bool:
        countdown[0] -= 1
        return countdown[0] == 0

    while True:
        try:
            kept = Work(work, resume=pieces > 1)
            return replay_gossip(folder, overrides, work=kept, stopped=stopped), pieces
        except ReplayStopped:
            pieces, countdown[0] = pieces + 1, records


def facts(found: ReplayedGossip) -> ReplayedGossip:
    return msgspec.structs.replace(found, seconds=0.0, resumed_at=0)


def test_a_replay_in_pieces_comes_to_the_same_bits(storm: Path, tmp_path: Path) -> None:
    """Stopped some sixty times: within rounds, while offers and states are in flight, between processes."""
    whole = replay_gossip(storm, [])
    found, pieces = in_pieces(storm, tmp_path / "work", [], 7)
    assert pieces > 50 and found.resumed_at > 0
    assert found.equal and facts(found) == facts(whole)
    assert not (tmp_path / "work").exists(), "nothing is left to go on from"


@pytest.mark.parametrize(
    "changes", [["gossip.codec=bf16"], ["gossip.form=drift", "optimizer.lr=1e-3"], ["gossip.form=postmix"]]
)
def test_an_ablation_in_pieces_comes_to_the_same_bits(
    changes: list[str], storm: Path, tmp_path: Path
) -> None:
    """The first difference, found before the last stop, is kept as well."""
    whole = replay_gossip(storm, changes)
    found, _ = in_pieces(storm, tmp_path / "work", changes, 60)
    assert facts(found) == facts(whole) and found.first_difference is not None


def test_a_replay_stopped_at_the_end_comes_to_the_same_bits(storm: Path, tmp_path: Path) -> None:
    """While final models are gathered, and before the mean is accepted everywhere."""
    whole = replay_gossip(storm, [])
    for left in (1, 3, 5, 9):
        found, _ = in_pieces(storm, tmp_path / "work", [], whole.records - left)
        assert found.resumed_at == whole.records - left and facts(found) == facts(whole)


def stop_early(folder: Path, work: Work, overrides: list[str]) -> None:
    with pytest.raises(ReplayStopped, match="goes on"):
        replay_gossip(folder, overrides, work=work, stopped=lambda: True)


def test_what_is_kept_of_another_replay_is_refused(storm: Path, tmp_path: Path) -> None:
    kept = Work(tmp_path / "work", resume=True)
    stop_early(storm, kept, [])
    with pytest.raises(CheckpointError, match=r"no --set, this one has --set gossip.*another --work folder"):
        replay_gossip(storm, ["gossip.outer_lr=0.3"], work=kept)
    run_of(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"of other tapes \(digest .*another --work folder"):
        replay_gossip(tmp_path / "other", [], work=kept)


def test_without_resume_it_begins_anew(storm: Path, tmp_path: Path) -> None:
    stop_early(storm, Work(tmp_path), ["gossip.outer_lr=0.3"])
    assert replay_gossip(storm, [], work=Work(tmp_path)).resumed_at == 0


# ---- what processes had of their own ----


def told(folder: Path, to: Path, environment: dict[str, Any]) -> None:
    """Write the tapes again, of peers that said this of themselves."""
    for file in workers(folder):
        tape = read(file.path)
        records = list(tape)
        assert tape.header is not None
        writer = TapeWriter(tape_path(to, file.worker, file.incarnation), tape.header)
        for record in records:
            event = record.event
            if isinstance(event, m.Prepared):
                event = m.Prepared(event.schema, environment)
            writer.write(record.t, event, record.actions, record.clock)
        writer.close()


def test_other_conditions_are_named_with_their_peers(tmp_path: Path) -> None:
    run_of(tmp_path / "run")
    assert replay_gossip(tmp_path / "run", []).conditions == []
    told(tmp_path / "run", tmp_path / "told", {"torch": "1.0", "threads": 1, "device": "GPU", "batch": 4})
    assert replay_gossip(tmp_path / "told", []).conditions[0].startswith("device: recorded 'GPU', here 'cpu'")
    line = replay_gossip(tmp_path / "told", []).conditions[1]
    assert line.startswith("torch: recorded '1.0', here '") and line.endswith("(peer-0, peer-1, peer-2)")


def test_micro_batches_are_those_of_the_peers_host(tmp_path: Path) -> None:
    run_of(tmp_path / "run")
    told(tmp_path / "run", tmp_path / "told", {"accumulate": 5})
    with pytest.raises(DataError, match=r"optimizer\.accumulate=5 exceeds"):
        replay_gossip(tmp_path / "told", [])
