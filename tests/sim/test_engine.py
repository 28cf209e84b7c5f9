"""The virtual host: boundaries, faults and determinism. What machines decide is tested in tests/protocol."""

from dataclasses import dataclass
from typing import Any

import pytest

from archipel.protocol import messages as m
from archipel.protocol.schedule import SyncOptions
from archipel.sim.engine import Engine, uniform
from archipel.sim.network import LinkOptions
from archipel.sim.ports import CostPort, EngineOptions, LearnerOptions, Said

SYNC = SyncOptions(steps=20, learners=2, quorum=1, fragments=2, interval_steps=2, overlap_steps=1)


class Log:
    """Everything that was recorded."""

    def __init__(self) -> None:
        self.records: list[tuple[str, float, m.Event, tuple[m.Action, ...]]] = []

    def __call__(self, worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        self.records.append((worker, now, event, tuple(actions)))

    def events(self, worker: str, kind: type) -> list[tuple[float, Any]]:
        return [
            (now, event) for name, now, event, _ in self.records if name == worker and isinstance(event, kind)
        ]


def engine(*paces: float, sync: SyncOptions = SYNC, **options: Any) -> tuple[Engine, Log]:
    log = Log()
    made = Engine(sync, EngineOptions(**options), on_record=log)
    for i, pace in enumerate(paces):
        made.add(f"L-{i}", LearnerOptions(step_s=pace))
    return made, log


# ---- boundaries ----


def test_updates_land_at_the_end_of_a_step_after_the_copy() -> None:
    made, log = engine(1.0)
    made.run(until=10.0)
    kinds = m.StepCompleted | m.Applied
    boundary = [
        event for name, now, event, _ in log.records if name == "L-0" and now > 5 and isinstance(event, kinds)
    ]
    assert len(boundary) > 8
    for step, applied in zip(boundary[::2], boundary[1::2], strict=False):
        assert isinstance(step, m.StepCompleted) and isinstance(applied, m.Applied)
        assert applied.step == step.step


def test_a_step_takes_its_time_and_slowness_its_factor() -> None:
    made, log = engine(2.0)
    made.slow("L-0", 3.0, at=5.0, until=20.0)
    made.run(until=30.0)
    assert {round(event.step_s, 6) for _, event in log.events("L-0", m.StepCompleted)} == {2.0, 6.0}


def test_a_paused_learner_finishes_its_step_later() -> None:
    made, log = engine(2.0)
    made.run(until=5.0)
    [*_, (last, _)] = log.events("L-0", m.StepCompleted)
    made.pause("L-0", at=last + 1.5, until=last + 11.5)
    made.run(until=30.0)
    following = next(at for at, _ in log.events("L-0", m.StepCompleted) if at > last)
    assert following == pytest.approx(last + 12.0)


def test_a_frozen_learner_hears_everything_when_it_thaws() -> None:
    made, log = engine(1.0, 1.0)
    made.freeze("L-1", at=5.5, until=8.5)
    made.run(until=9.0)
    assert not [at for at, _ in log.events("L-1", m.Event) if 5.5 < at < 8.5]
    assert [at for at, _ in log.events("L-1", m.Received) if at == 8.5]


def test_fold_and_merge_take_virtual_time() -> None:
    made, log = engine(1.0, fold_s=0.1, merge_s=0.2)
    made.run(until=5.0)
    asked = next(now for _, now, _, actions in log.records if any(isinstance(a, m.Fold) for a in actions))
    assert log.events("syncer", m.Folded)[0][0] == pytest.approx(asked + 0.1)
    assert log.events("syncer", m.Merged)[0][0] == pytest.approx(asked + 0.3)


def test_jitter_stays_within_its_share_and_differs_by_learner() -> None:
    made, log = engine()
    for name in ("a", "b"):
        made.add(name, LearnerOptions(step_s=1.0, jitter=0.1))
    made.run(until=30.0)
    times = {name: [event.step_s for _, event in log.events(name, m.StepCompleted)] for name in "ab"}
    assert all(0.9 <= step_s <= 1.1 for step_s in times["a"] + times["b"])
    assert times["a"][:5] != times["b"][:5]


def test_random_numbers_are_uniform_and_depend_on_every_argument() -> None:
    draws = [uniform(1, "L-0", number) for number in range(4000)]
    assert 0.48 < sum(draws) / 4000 < 0.52
    assert all(360 < sum(k <= 10 * x < k + 1 for x in draws) < 440 for k in range(10))
    assert len({uniform(1, "a", 1), uniform(2, "a", 1), uniform(1, "b", 1), uniform(1, "a", 2)}) == 4


# ---- faults ----


def test_a_kill_is_noticed_on_both_terms() -> None:
    made, log = engine(1.0, 1.0)
    made.kill("L-1", at=5.5)
    made.run(until=9.0)
    assert [at for at, _ in log.events("syncer", m.Disconnected)] == [pytest.approx(5.55)]
    assert not [at for at, _ in log.events("L-1", m.Event) if at > 5.5]


def test_a_restart_is_a_new_incarnation_on_its_shard_where_its_data_stopped() -> None:
    made, log = engine(1.0, 1.0)
    made.kill("L-1", at=5.5)
    made.restart("L-1", at=7.0)
    made.run(until=9.0)
    joins = [a.message for name, _, _, actions in log.records if name == "L-1"
             for a in actions if isinstance(a, m.Send) and isinstance(a.message, m.Join)]  # fmt: skip
    assert len({join.incarnation for join in joins}) == 2
    assert (joins[-1].shard, joins[-1].position) == (1, 5000)


def test_a_partition_is_noticed_by_keepalive_and_mended_by_dialling() -> None:
    made, log = engine(1.0, 1.0)
    made.partition("L-1", at=5.5, until=15.0)
    made.run(until=18.0)
    assert log.events("syncer", m.Disconnected)[0][0] == pytest.approx(5.5 + 4.7)
    assert log.events("L-1", m.Disconnected)[0][0] == pytest.approx(5.5 + 4.7)
    assert 15.0 <= log.events("L-1", m.Connected)[-1][0] < 16.0


def test_a_short_partition_goes_unnoticed() -> None:
    made, log = engine(1.0, 1.0)
    made.partition("L-1", at=5.5, until=7.5)
    made.run(until=15.0)
    assert not log.events("syncer", m.Disconnected)
    assert [at for at, event in log.events("syncer", m.Received) if event.sender == "L-1" and 7.5 < at < 7.6]


def test_the_syncer_comes_back_from_what_it_saved() -> None:
    made, _ = engine(1.0, 1.0)
    made.stop("syncer", at=8.3)
    made.resume_syncer(at=12.0)
    made.run(until=12.0)
    state = made.saved
    assert state is not None and state.tick >= 7
    made.run(until=12.5)
    assert made.syncer.epoch == 2 and made.syncer.tick == state.tick
    assert made.finish().complete


def test_a_worker_that_is_not_there_cannot_be_hurt() -> None:
    made, _ = engine(1.0)
    made.add("late", LearnerOptions(), at=9.0)
    for hurt in (made.kill, made.pause, made.freeze, made.stop):
        hurt("late", 3.0)
    assert made.finish().complete


def test_killed_twice_and_restarted_twice_is_one_process() -> None:
    made, log = engine(1.0, 1.0)
    for at in (5.0, 5.01):
        made.kill("L-1", at=at)
    for at in (6.0, 6.5):
        made.restart("L-1", at=at)
    made.run(until=10.0)
    steps = [event.step for at, event in log.events("L-1", m.StepCompleted) if at > 6.0]
    assert steps == list(range(1, len(steps) + 1))


# ---- the run ----


def test_two_runs_are_one() -> None:
    logs = []
    for _ in range(2):
        made, log = engine(1.0, 1.3, seed=5)
        made.kill("L-1", at=7.7)
        made.restart("L-1", at=9.0)
        made.finish()
        logs.append(log.records)
    assert logs[0] == logs[1]


def test_time_never_runs_backwards_and_alarms_replace_each_other() -> None:
    made, log = engine(1.0, 1.3)
    made.finish()
    times = [now for _, now, _, _ in log.records]
    assert times == sorted(times)
    rung = [now for now, _ in log.events("syncer", m.Woke)]
    assert len(set(rung)) == len(rung)


def test_a_port_with_tensors_fits_the_same_place() -> None:
    """Payloads are moved, not read: what a learner's port gives the syncer's port gets, and back."""
    seen: dict[str, list[bool]] = {"fold": [], "apply": []}

    @dataclass(frozen=True)
    class Payload:
        what: tuple[object, ...]
        nbytes: int = 1000

    class Port(CostPort):
        def __init__(self, name: str, said: Said) -> None:
            super().__init__(said, (m.TensorSpec("w", (1,)),), tokens=10)
            self.name = name

        def snapshot(self, fragment: int, step: int, *, full: bool) -> Any:
            return Payload(("push", self.name, fragment))

        def payload(self, fragment: int, version: int) -> Any:
            return Payload(("weights", fragment, version))

        def fold(self, action: m.Fold, payload: Any) -> None:
            seen["fold"].append(payload == Payload(("push", action.worker, action.fragment)))
            super().fold(action, payload)

        def apply(self, fragment: int, version: int, payload: Any) -> None:
            seen["apply"].append(payload == Payload(("weights", fragment, version)))

    made = Engine(SYNC, make_port=Port)
    made.add("L-0", LearnerOptions())
    assert made.finish().complete
    assert len(seen["fold"]) == 20 and all(seen["fold"])
    assert len(seen["apply"]) > 20 and all(seen["apply"])


def test_a_newer_update_replaces_one_that_waits() -> None:
    made, log = engine(
        1.0, sync=SyncOptions(steps=40, quorum=1, fragments=2, interval_steps=2, overlap_steps=1)
    )
    made.add("slow", LearnerOptions(step_s=9.0, link=LinkOptions(latency_s=0.001)))
    made.run(until=35.0)
    landed = [(at, event.fragment) for at, event in log.events("slow", m.Applied) if at > 1]
    assert len(landed) == len(set(landed)) == 6  # three boundaries, each fragment once


def test_it_says_where_it_stands_when_a_run_does_not_end() -> None:
    made, _ = engine(1.0, sync=SyncOptions(steps=5, quorum=2, fragments=1, interval_steps=1, overlap_steps=0))
    with pytest.raises(AssertionError, match="no end by 50"):
        made.finish(horizon_s=50.0)
