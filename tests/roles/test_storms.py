"""Storms by the number: every seed under the witness, the same alone and among others."""

from pathlib import Path

import pytest

from archipel.protocol import messages as m
from archipel.protocol.learner import LearnerMachine
from archipel.roles.storms import storm, storms

FILE = str(Path(__file__).parents[2] / "runs" / "storm.toml")
SHORT = ["sync.steps=40", "sync.learners=3"]


def test_seeds_fare_the_same_alone_and_shared_out_over_processes() -> None:
    together = list(storms(FILE, SHORT, range(3, 9), cores=2))
    assert together == [storm(FILE, SHORT, seed) for seed in range(3, 9)]
    assert [found.seed for found in together] == list(range(3, 9))
    assert all(found.events > 500 and not found.failure for found in together)
    assert len({found.virtual_s for found in together}) > 1


def test_storms_on_failing_hardware_end_well() -> None:
    hardware = "sim.hardware={chips=3072, slice_chips=512, mtbi_s=40000.0, return_s=40.0}"
    found = list(storms(FILE, [*SHORT, "sim.speed_spread=0.0", "sim.jitter=0.0", hardware], range(10)))
    assert not [each.failure for each in found if each.failure]


def test_a_run_that_does_not_end_failed() -> None:
    assert storm(FILE, [*SHORT, "sim.horizon_s=20"], 1).failure == "no end by 20 s"


def test_a_machine_that_decides_what_it_must_not_is_found_by_its_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real machine, with one decision added at its 100th event: an alarm set into the past."""
    handle, events = LearnerMachine.handle, iter(range(10**9))

    def broken(machine: LearnerMachine, now: float, event: m.Event) -> list[m.Action]:
        actions = handle(machine, now, event)
        return [*actions, m.Wake(now - 1.0)] if next(events) == 100 else actions

    monkeypatch.setattr(LearnerMachine, "handle", broken)
    assert "alarm at" in storm(FILE, SHORT, 1).failure


def test_peers_have_storms_too() -> None:
    peers = ["gossip.peers=4", "gossip.rounds=6", "gossip.local_steps=3"]
    assert not [each for each in storms(FILE, peers, range(3)) if each.failure]
