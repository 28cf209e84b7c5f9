"""What users of similar systems reported (the fault list, groups A and H), in virtual time.

Rows that are single messages stand in test_syncer.py, test_learner.py and test_membership.py, those that are
figures in test_figures.py, those that are stories in scenarios/, random ones in test_random_schedules.py.
Each names its row.
"""

from itertools import pairwise
from typing import Any

import pytest

from archipel.protocol import messages as m
from archipel.protocol.schedule import SyncOptions
from archipel.sim.engine import Engine
from archipel.sim.network import LinkOptions
from archipel.sim.ports import LearnerOptions
from archipel.sim.witness import Witness


class Run:
    """Some learners of one second a step each, under a witness."""

    def __init__(self, learners: int, **sync: Any) -> None:
        given = {
            "steps": 60,
            "learners": learners,
            "fragments": 4,
            "interval_steps": 4,
            "overlap_steps": 2,
            **sync,
        }
        self.sync = SyncOptions(**given)
        self.witness = Witness(self.sync)
        self.folds: list[tuple[float, m.Fold]] = []
        self.records = 0
        self.engine = Engine(self.sync, on_record=self.record)
        for i in range(learners):
            self.add(f"L-{i}", step_s=1 + 0.02 * i)

    def add(self, name: str, at: float = 0.0, **given: Any) -> None:
        self.engine.add(name, LearnerOptions(**given), at=at)

    def record(self, worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        self.witness.record(worker, now, event, actions)
        self.records += 1
        self.folds += [(now, action) for action in actions if isinstance(action, m.Fold)]

    def merges(self, since: float = 0.0, until: float = 1e9) -> list[tuple[str, ...]]:
        return [workers for at, _, _, workers in self.witness.merged if since <= at < until]

    def said(self, text: str) -> list[float]:
        return [
            at for at, worker, said in self.witness.notices if worker == m.SYNCER and said.startswith(text)
        ]

    def pauses(self, since: float = 0.0) -> list[float]:
        times = [at for at, *_ in self.witness.merged if at >= since]
        return [later - earlier for earlier, later in pairwise(times)]


# ---- A. membership, quorum, waiting ----


def test_a_stopped_learner_is_no_barrier() -> None:
    # faults.md row 01: 4 learners, one SIGSTOPped for 60 s, K = 3; the others within 5 %.
    whole, hit = Run(4, quorum=3, steps=160), Run(4, quorum=3, steps=160)
    hit.engine.freeze("L-3", at=40.5, until=100.5)
    for run in (whole, hit):
        run.engine.finish()
    rounds = [len(run.merges(since=40.5, until=100.5)) for run in (whole, hit)]
    assert rounds[1] >= 0.95 * rounds[0]
    assert any("L-3" in workers for workers in hit.merges(since=105.0))


def test_a_dead_learner_is_out_and_nobody_waits_for_it_again() -> None:
    # faults.md row 02.
    run = Run(4, quorum=2)
    run.engine.kill("L-3", at=20.3)
    run.engine.finish()
    assert not any("L-3" in workers for workers in run.merges(since=20.3 + 2 * run.sync.heartbeat_s))
    assert max(run.pauses()) < 1.06 + 1.06 + 0.1  # a step, a window of at most one step, the wire


def test_a_partition_leaves_one_lineage() -> None:
    # faults.md row 03, and section H, solo drift: 2 against 2 with K = 2, healed after some rounds.
    run = Run(4, quorum=2)
    for name in ("L-2", "L-3"):
        run.engine.partition(name, at=20.0, until=30.0)
    run.engine.finish()
    versions = [(fragment, version) for _, fragment, version, _ in run.witness.merged]
    assert len(set(versions)) == len(versions)  # the witness has checked that they count up
    assert all(set(workers) <= {"L-0", "L-1"} for workers in run.merges(since=21.0, until=30.0))
    assert any({"L-2", "L-3"} <= set(workers) for workers in run.merges(since=35.0))
    assert run.engine.syncer.ledger.fates("L-2")["absent"] > 0  # their drift was overwritten, not merged


@pytest.mark.parametrize("download_s", [2.5, 8.0])
def test_a_download_longer_than_any_window_does_not_shut_the_joiner_out(download_s: float) -> None:
    # faults.md row 04.
    run = Run(2, quorum=2, steps=40)
    run.add("L-9", at=5.0, link=LinkOptions(bytes_per_s=4e6 / download_s))
    run.engine.finish()
    [ready] = run.said("ready worker=L-9")
    first = next(at for at, tally in run.witness.ticks if "L-9" in tally.workers)
    assert first == next(at for at, _ in run.witness.ticks if at >= ready + 0.99)  # its first step


def test_a_learner_killed_during_its_push_is_gone_at_the_reset() -> None:
    # faults.md row 05: the push takes 0.5 s, the learner dies in the middle of it.
    run = Run(2, quorum=1)
    run.add("L-9", link=LinkOptions(bytes_per_s=2e6))
    run.engine.run(until=20.0)
    while not any("L-9" in round_.pulling for round_ in run.engine.syncer.rounds.flying.values()):
        run.engine.run(events=1)
    killed_at = run.engine.now + 0.1
    run.engine.kill("L-9", at=killed_at)
    run.engine.finish()
    [gone] = run.said("gone worker=L-9")
    assert gone - killed_at < 1.0
    assert max(run.pauses(since=15.0)) < 2.2


def test_a_killed_participant_does_not_hold_its_round_open() -> None:
    # faults.md row 12: dead before any byte of its push. Even where only keepalive can tell, K goes on.
    run = Run(3, quorum=2, pull_deadline_s=60.0)
    run.engine.run(until=20.0)
    while not any("L-2" in round_.pulling for round_ in run.engine.syncer.rounds.flying.values()):
        run.engine.run(events=1)
    asked_at = run.engine.now
    run.engine.kill("L-2", at=asked_at)
    run.engine.finish()
    assert run.merges(since=asked_at)[0] == ("L-0", "L-1")
    assert next(at for at, *_ in run.witness.merged if at >= asked_at) - asked_at < 1.02


def test_training_starts_with_those_who_came() -> None:
    # faults.md row 13: planned for four, three ever come, K = 2.
    run = Run(3, quorum=2, steps=10)
    assert SyncOptions(learners=4, quorum=2).quorum == 2
    assert run.engine.finish().complete
    assert len(run.merges()) == 10


@pytest.mark.parametrize("quorum", [1, 2, 3, 4])
@pytest.mark.parametrize("dead", [0, 1, 2, 3])
def test_it_progresses_if_and_only_if_a_quorum_lives(quorum: int, dead: int) -> None:
    # faults.md row 14.
    run = Run(4, quorum=quorum, steps=1000)
    for i in range(dead):
        run.engine.kill(f"L-{i}", at=10.5)
    run.engine.run(until=40.0)
    late = [at for at, _ in run.witness.ticks if at > 12.0]
    alive = 4 - dead
    assert (len(late) > 20) == (alive >= quorum)
    assert bool(run.said(f"waiting for learners live={alive}")) == (alive < quorum)


def test_without_learners_it_saves_says_so_and_sleeps() -> None:
    # faults.md row 15: no spin; an hour of waiting costs nothing.
    run = Run(2, quorum=1)
    for name in ("L-0", "L-1"):
        run.engine.kill(name, at=10.5)
    run.engine.run(until=30.0)
    assert len(run.said("no learners")) == 1
    assert run.engine.saved is not None and run.engine.saved.tick == run.engine.syncer.tick
    before = run.records
    run.engine.run(until=3630.0)
    assert run.records - before <= 2
    assert run.engine.hosts[m.SYNCER].finished is None


def test_without_learners_it_exits_by_option() -> None:
    # faults.md row 15.
    run = Run(2, quorum=1, idle_exit_s=60.0)
    for name in ("L-0", "L-1"):
        run.engine.kill(name, at=10.5)
    assert not run.engine.finish().complete
    assert run.engine.now == pytest.approx(10.55 + 60.0, abs=0.1)


def test_a_late_push_is_never_mixed_with_the_wrong_base() -> None:
    # faults.md row 11: a link so slow that its pushes come after rounds have moved on. What is folded is
    # relative to a version still kept (the witness checks), the rest is refused, and its tokens are counted
    # once.
    run = Run(2, quorum=1, pull_deadline_s=2.5, steps=80)
    run.add("L-9", step_s=5.0, link=LinkOptions(bytes_per_s=3e5))
    run.engine.finish()
    assert run.said("pull overdue worker=L-9") and run.said("refused push worker=L-9")
    assert run.engine.syncer.ledger.closes()


# ---- H. further material ----


def test_a_fast_learner_stays_through_a_long_local_phase() -> None:
    # Section H: 60 s quorum timeout shorter than the skew of H steps. One learner ten times faster, H = 500.
    run = Run(1, quorum=2, steps=1000, fragments=1, interval_steps=500)
    run.add("L-9", step_s=0.1)
    run.engine.finish()
    assert not [at for at in run.said("gone worker=L-9") if at < run.witness.merged[-1][0]]
    assert [set(workers) for workers in run.merges()] == [{"L-0", "L-9"}] * 2


def test_a_young_learner_never_overwrites_the_run() -> None:
    # Section H: all die, one restarts empty. It adopts what the syncer holds before it may report.
    run = Run(2, quorum=1)
    for name in ("L-0", "L-1"):
        run.engine.kill(name, at=20.5)
    run.engine.restart("L-0", at=30.0)
    run.engine.run(until=30.9)
    tick = run.engine.syncer.tick
    assert run.engine.learner("L-0").versions == run.engine.syncer.versions
    run.engine.finish()
    assert min(tally.tick for at, tally in run.witness.ticks if at > 30.0) == tick + 1


def test_a_syncer_that_starts_anew_from_its_checkpoint_wins_over_learners_that_went_on() -> None:
    # Section H, solo drift: learners that trained through an outage come back to the checkpoint's lineage.
    run = Run(2, quorum=2, checkpoint_rounds=5)
    run.engine.kill(m.SYNCER, at=20.2)
    run.engine.resume_syncer(at=40.0)
    run.engine.run(until=40.0)
    assert run.engine.learner("L-0").step > 35  # trained on
    held = run.engine.syncer.versions.copy()
    run.engine.run(until=42.5)
    assert run.engine.learner("L-0").versions == held
    assert run.engine.finish().complete


# ---- resuming ----


def decisions(run: Run) -> tuple[list[tuple[int, tuple[str, ...]]], list[tuple[int, str, float, int]]]:
    """Return what was counted at each tick and folded into each version, of the lineage that prevailed."""
    counted = {tally.tick: tuple(sorted(tally.workers)) for _, tally in run.witness.ticks}
    folded = {(f.fragment, f.base, f.worker): (f.fragment, f.worker, f.weight, f.base) for _, f in run.folds}
    return sorted(counted.items()), sorted(folded.values())


@pytest.mark.parametrize("stop_at", [12.0, 33.6, 45.0, 66.0, 80.0])
def test_a_resumed_blocking_run_decides_what_the_straight_one_does(stop_at: float) -> None:
    # K = M, τ = 0, H = 30: stopped before, at and between rounds; the same steps go into the same rounds.
    options = {"quorum": 3, "fragments": 1, "interval_steps": 30, "overlap_steps": 0, "steps": 90}
    straight, resumed = Run(3, **options), Run(3, **options)
    resumed.engine.stop(m.SYNCER, at=stop_at)
    resumed.engine.resume_syncer(at=stop_at + 7.0)
    for run in (straight, resumed):
        assert run.engine.finish().complete
    assert decisions(resumed) == decisions(straight)
    assert resumed.engine.syncer.ledger.table()["merged"] == 3 * 90 * 1000


def test_learners_that_hold_are_freed_when_one_of_them_dies() -> None:
    # τ = 0: two wait at the due step, the third dies before it gets there and comes back later.
    run = Run(3, quorum=3, fragments=1, interval_steps=10, overlap_steps=0, steps=40)
    run.engine.slow("L-2", 3.0, at=0.0)
    run.engine.kill("L-2", at=15.0)
    run.engine.restart("L-2", at=60.0)
    assert run.engine.finish().complete
    assert [set(workers) for workers in run.merges()][-1] == {"L-0", "L-1", "L-2"}


def test_a_late_joiner_at_tau_zero_neither_blocks_nor_is_blocked() -> None:
    run = Run(2, quorum=2, fragments=1, interval_steps=10, overlap_steps=0, steps=60)
    run.add("L-9", at=14.0, step_s=1.0)
    assert run.engine.finish().complete
    assert any("L-9" in workers for workers in run.merges())


def test_an_observer_sees_every_version_and_changes_no_decision() -> None:
    alone, watched = Run(2, quorum=2), Run(2, quorum=2)
    watched.engine.add("watch", LearnerOptions(), at=10.2, role="observer")
    for run in (alone, watched):
        run.engine.finish()
    assert watched.witness.ticks == alone.witness.ticks
    assert watched.engine.learner("watch").versions == watched.engine.syncer.versions
    assert watched.engine.syncer.ledger.table() == alone.engine.syncer.ledger.table()
