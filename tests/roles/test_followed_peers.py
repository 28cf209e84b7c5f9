"""A gossip run carried out again from its tapes: bit for bit, and with one thing changed."""

from pathlib import Path

import pytest

from archipel.config import load
from archipel.errors import ConfigError
from archipel.roles.followed_peers import replay_gossip
from archipel.roles.gossiping import gossip_virtually
from archipel.tape.replay import verify

SMALL = [
    "gossip.peers=3", "gossip.rounds=8", "gossip.local_steps=3", "gossip.scheme=one_peer",
    "model.width=16", "model.layers=1", "model.heads=2", "data.sequence=16", "data.batch=4",
    "evaluate.batches=1", "sim.speed_spread=0.3",
]  # fmt: skip
STORM = ["sim.weather={kill_s=25.0, partition_s=40.0, slow_s=20.0, mean_for_s=4.0}"]


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


def test_another_learning_rate_is_an_ablation_under_the_same_storm(tmp_path: Path) -> None:
    run_of(tmp_path)
    found = replay_gossip(tmp_path, ["gossip.outer_lr=0.3"])
    assert not found.equal and found.first_difference is not None


def test_what_decisions_were_made_from_may_not_change(tmp_path: Path) -> None:
    run_of(tmp_path)
    with pytest.raises(ConfigError, match=r"gossip\.local_steps"):
        replay_gossip(tmp_path, ["gossip.local_steps=5"])
