"""Gossip's experiments: the lock-step baselines are what the protocol does where the two must be one."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "experiments"
SPEC = importlib.util.spec_from_file_location("gossip_cells", FOLDER / "gossip_cells.py")
assert SPEC is not None and SPEC.loader is not None
CELLS = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(CELLS)

EXPERIMENT = {
    "tokens": 4 * 8 * 4 * 2 * 16, "batch": 2, "sequence": 16, "local_steps": 4,
    "set": ["model.width=16", "model.layers=1", "model.heads=2", "evaluate.batches=1", "gossip.adapt=false",
            "sim.link={latency_s=1e-3, bytes_per_s=1e9}"],
}  # fmt: skip


def run(method: str, *overrides: str, peers: int = 4, seed: int = 3) -> dict[str, Any]:
    variant = {"name": "x", "method": method, "set": list(overrides)}
    found: dict[str, Any] = CELLS.run_cell(EXPERIMENT, {"variant": variant, "learners": peers, "seed": seed})
    return found


@pytest.mark.parametrize("scheme", ["one_peer", "two_peer"])
def test_local_dadam_is_gossip_without_outer_momentum(scheme: str) -> None:
    same = [f"gossip.scheme={scheme}", "gossip.outer_lr=1.0", "gossip.outer_momentum=0.0"]
    live, lock_step = run("gossip", *same), run("local_dadam", *same)
    assert live["complete"] and live["tokens"] == lock_step["tokens"] == EXPERIMENT["tokens"]
    assert live["models_sent"] == lock_step["models_sent"] == (1 if scheme == "one_peer" else 2)
    for name in ("loss", "mean", "worst", "consensus_error"):
        assert live[name] == pytest.approx(lock_step[name], rel=1e-5), name
    assert live["consensus_error"] > 1e-4 and len(live["points"]) == len(lock_step["points"])


def test_overlapped_mixing_keeps_peers_further_apart_than_mixing_what_the_steps_reached() -> None:
    ring = ["gossip.scheme=two_peer"]
    after, beside = run("local_dadam", *ring), run("overlapped", *ring)
    assert beside["consensus_error"] > 1.2 * after["consensus_error"]


def test_noloco_sends_two_models_and_learns() -> None:
    found = run("noloco", "gossip.scheme=one_peer", "gossip.outer_momentum=0.5")
    assert found["models_sent"] == 2 and found["loss"] < 0.95 * found["points"][0]["loss"]
    assert found["consensus_error"] > 0


def test_a_seed_draws_the_cell() -> None:
    one, other = run("gossip", seed=0), run("gossip", seed=1)
    assert one["loss"] != other["loss"]
