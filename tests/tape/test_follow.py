"""Recorded decisions carried out by other ports: in their order, with the payloads that went beside them."""

from pathlib import Path
from typing import Any

import pytest

from archipel.errors import TapeError
from archipel.protocol import messages as m
from archipel.tape.follow import Follower, Ports, starts
from archipel.tape.order import Ordered
from archipel.tape.record import Header, Record
from archipel.tape.tape import TapeWriter, tape_path


class Numbers:
    """A learner's and a syncer's port in one, with words for weights; notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.steps = 0

    def rows(self, tokens: int) -> int:
        if tokens % 5:
            raise TapeError("rows have 5 tokens")
        return tokens // 5

    def step(self, number: int, tick: int, rows: int | None = None) -> tuple[int, tuple[int, ...]]:
        self.steps += 1
        self.calls.append(f"step {number} at {tick} of {rows}")
        return 5 * (rows or 2), ()

    def copy(self, fragments: tuple[int, ...]) -> None:
        self.calls.append(f"copy {fragments}")

    def snapshot(self, fragment: int, step: int, *, full: bool) -> str:
        return f"push {fragment} of {step}"

    def apply(self, fragment: int, version: int, payload: object) -> None:
        self.calls.append(f"apply {payload}")

    def start(self, number: int) -> None:
        self.calls.append(f"start {number}")

    def fold(self, action: m.Fold, payload: object) -> None:
        self.calls.append(f"fold {payload}")

    def merge(self, fragment: int, version: int, digest: str) -> None:
        self.calls.append(f"merge {version}")

    def payload(self, fragment: int, version: int) -> str:
        return f"version {version} after {len(self.calls)}"


class Run:
    """A follower and the ports it drives, fed record by record."""

    def __init__(self, **options: Any) -> None:
        self.numbers = Numbers()
        self.follower = Follower(Ports(lambda *_: self.numbers, self.numbers), **options)
        self.take(m.SYNCER, m.Woke())

    @property
    def calls(self) -> list[str]:
        return self.numbers.calls

    def take(
        self, worker: str, event: m.Event, *actions: m.Action, of: str = "1", last: bool = False
    ) -> None:
        self.follower.take(Ordered(worker, Record(0, 0.0, event, actions), of, last))

    def join(self, worker: str = "a", of: str = "1") -> None:
        self.take(worker, m.Woke(), m.Prepare({}, 3, 0), of=of)
        self.take(worker, m.Prepared(()), of=of)

    def held(self) -> int:
        """Count the payloads the follower holds."""
        return len(self.follower.state()[1])


def push(step: int, fragment: int = 0) -> m.Push:
    return m.Push(fragment, step, 0, step, 1, 10, 10 * step)


UPDATE = m.Update(0, 1, 1)


def test_decisions_are_carried_out_in_the_order_given() -> None:
    run = Run()
    run.join()
    run.take("a", m.StepCompleted(1, 10, 0.1, (0,), 7), m.Send(m.SYNCER, push(1)))
    run.take(m.SYNCER, m.Received("a", push(1)), m.Fold(0, "a", 1.0, 0))
    run.take(m.SYNCER, m.Folded(0, "a"), m.Merge(0, 1))
    run.take(m.SYNCER, m.Merged(0, 1), m.Send("a", UPDATE))
    run.take("a", m.Received(m.SYNCER, UPDATE), m.Apply(0, 1))
    run.take("a", m.Applied(0, 1, 1))
    asked = ["start 0", "copy (0,)", "step 1 at 7 of 2", "fold push 0 of 1", "merge 1"]
    assert run.calls == [*asked, "apply version 1 after 5"]


def test_a_step_has_the_rows_that_its_tokens_say() -> None:
    run = Run()
    run.join()
    for step, tokens in enumerate((10, 5, 25), 1):
        run.take("a", m.StepCompleted(step, tokens, 0.1))
    assert [call for call in run.calls if "step" in call] == [
        "step 1 at 0 of 2", "step 2 at 0 of 1", "step 3 at 0 of 5",
    ]  # fmt: skip


def test_tokens_that_are_no_whole_rows_are_refused_by_name() -> None:
    run = Run()
    run.join()
    with pytest.raises(TapeError, match=r"a\.1: step 1 had 11 tokens: rows have 5 tokens"):
        run.take("a", m.StepCompleted(1, 11, 0.1))


def test_a_landing_that_no_tape_explains_is_refused() -> None:
    run = Run()
    run.join()
    with pytest.raises(TapeError, match="no tape shows it being sent"):
        run.take("a", m.Applied(0, 1, 1))


def test_a_fold_of_a_push_that_no_tape_explains_is_refused() -> None:
    with pytest.raises(TapeError, match="are all tapes of the run here"):
        Run().take(m.SYNCER, m.Received("a", push(1)), m.Fold(0, "a", 1.0, 0))


def test_what_is_folded_is_the_push_that_arrived_not_a_later_one() -> None:
    run = Run()
    run.join()
    for step in (1, 2, 3):
        run.take("a", m.StepCompleted(step, 10, 0.1, (0,)), m.Send(m.SYNCER, push(step)))
    # The first is lost with its channel; the second arrives while the third is on its way.
    run.take(m.SYNCER, m.Received("a", push(2)), m.Fold(0, "a", 1.0, 0))
    run.take(m.SYNCER, m.Merged(0, 1))
    assert run.calls[-2:] == ["fold push 0 of 2", "merge 1"]
    assert run.held() == 1


def test_what_was_rejected_is_left_out() -> None:
    run = Run()
    for worker in ("a", "b"):
        run.join(worker)
        run.take(worker, m.StepCompleted(1, 10, 0.1, (0,)), m.Send(m.SYNCER, push(1)))
        run.take(m.SYNCER, m.Received(worker, push(1)), m.Fold(0, worker, 1.0, 0))
    run.take(m.SYNCER, m.Rejected(0, "a", "it holds NaN"))
    run.take(m.SYNCER, m.Merged(0, 1))
    assert sum("fold" in call for call in run.calls) == 1


def test_a_round_that_failed_is_not_merged() -> None:
    run = Run()
    run.join()
    run.take("a", m.StepCompleted(1, 10, 0.1, (0,)), m.Send(m.SYNCER, push(1)))
    run.take(m.SYNCER, m.Received("a", push(1)), m.Fold(0, "a", 1.0, 0))
    run.take(m.SYNCER, m.Folded(0, "a"), m.Merge(0, 1))
    run.take(m.SYNCER, m.MergeFailed(0, "overflow"), m.Discard(0))
    assert "merge 1" not in run.calls and run.held() == 0


def test_a_syncer_started_again_sends_its_own_version_of_a_number() -> None:
    run = Run()
    run.join()
    run.take(m.SYNCER, m.Merged(0, 1), m.Send("a", UPDATE))
    run.take("a", m.Received(m.SYNCER, UPDATE), m.Apply(0, 1))
    run.take("a", m.Applied(0, 1, 1))
    run.take(m.SYNCER, m.Merged(0, 1), m.Send("a", UPDATE), of="2")
    run.take("a", m.Received(m.SYNCER, UPDATE), m.Apply(0, 1))
    run.take("a", m.Applied(0, 1, 2))
    applied = [call for call in run.calls if call.startswith("apply")]
    assert len(set(applied)) == 2 and "start 1" in run.calls


def test_a_merge_that_was_saved_before_its_word_came_is_made_good(tmp_path: Path) -> None:
    run = Run(begun=starts(resumed(tmp_path)))
    run.join()
    run.take("a", m.StepCompleted(1, 10, 0.1, (0,)), m.Send(m.SYNCER, push(1)))
    run.take(m.SYNCER, m.Received("a", push(1)), m.Fold(0, "a", 1.0, 0))
    run.take(m.SYNCER, m.Folded(0, "a"), m.Merge(0, 1), m.Save(1))
    run.take(m.SYNCER, m.Woke(), of="2")
    assert run.calls[-3:] == ["fold push 0 of 1", "merge 1", "start 1"]


def resumed(folder: Path) -> Path:
    """Write the tapes of a syncer that was resumed at version 1 of its only fragment."""
    sync = {"sync": {"steps": 8, "fragments": 1, "interval_steps": 2, "overlap_steps": 1}}
    ledger: dict[str, Any] = {"fragments": 1}
    state = {"epoch": 1, "tick": 2, "rounds_merged": 1, "versions": [1], "taken": {}, "positions": {},
             "quorum_s": None, "sync_s": None, "ledger": ledger}  # fmt: skip
    for number, held in (("1", None), ("2", state)):
        seed = {"role": "syncer", "name": "syncer", "run": "r", "shards": 4, "state": held}
        header = Header("r", m.SYNCER, m.SYNCER, number, float(number), settings={**sync, "machine": seed})
        TapeWriter(tape_path(folder, m.SYNCER, number), header).close()
    return folder


def test_a_run_without_its_beginning_is_refused(tmp_path: Path) -> None:
    resumed(tmp_path)
    next((tmp_path / "tape").glob("syncer.1.*")).unlink()
    with pytest.raises(TapeError, match="from its beginning only"):
        starts(tmp_path)


def test_what_is_held_does_not_grow_with_the_learners_that_came_and_went() -> None:
    run = Run()
    held = []
    for number in range(30):
        name, version = f"l{number}", number + 1
        run.join(name)
        run.take(name, m.StepCompleted(1, 10, 0.1, (0,)), m.Send(m.SYNCER, push(1)))
        run.take(m.SYNCER, m.Received(name, push(1)), m.Fold(0, name, 1.0, 0))
        update = m.Update(0, version, 1)
        run.take(m.SYNCER, m.Merged(0, version), m.Send(name, update))
        # It dies with a push and an update on their way.
        run.take(name, m.StepCompleted(2, 10, 0.1, (0,)), m.Send(m.SYNCER, push(2)), last=True)
        run.take(m.SYNCER, m.Woke(), m.Send(name, update))
        run.take(m.SYNCER, m.Disconnected(name))
        held.append(run.held())
    assert set(held) == {1}, "the newest update, encoded once"
    assert not run.follower.learners


def test_updates_that_a_slow_learner_never_applied_are_let_go() -> None:
    run = Run()
    run.join()
    for version in range(1, 20):
        update = m.Update(0, version, 1)
        run.take(m.SYNCER, m.Merged(0, version), m.Send("a", update))
        run.take("a", m.Received(m.SYNCER, update), m.Apply(0, version))
    run.take("a", m.Applied(0, 19, 1))
    assert run.held() == 1


def test_updates_to_a_worker_without_a_tape_are_not_kept() -> None:
    run = Run(taped=["a"])
    run.take(m.SYNCER, m.Merged(0, 1), m.Send("elsewhere", UPDATE))
    assert run.held() == 0


def test_a_state_goes_on_as_its_follower_does() -> None:
    """Stop after each record in turn, restore, and go on."""

    def records(run: Run, first: int, stop: int) -> None:
        work = [
            lambda: run.take("a", m.Woke(), m.Prepare({}, 3, 0)),
            lambda: run.take("a", m.Prepared(())),
            lambda: run.take("a", m.StepCompleted(1, 10, 0.1, (0,)), m.Send(m.SYNCER, push(1))),
            lambda: run.take(m.SYNCER, m.Received("a", push(1)), m.Fold(0, "a", 1.0, 0)),
            lambda: run.take(m.SYNCER, m.Folded(0, "a"), m.Merge(0, 1)),
            lambda: run.take(m.SYNCER, m.Merged(0, 1), m.Send("a", UPDATE)),
            lambda: run.take("a", m.Received(m.SYNCER, UPDATE), m.Apply(0, 1)),
            lambda: run.take("a", m.Applied(0, 1, 1)),
        ]  # fmt: skip
        for one in work[first:stop]:
            one()

    straight = Run()
    records(straight, 0, 8)
    for stop in range(9):
        first, second = Run(), Run()
        records(first, 0, stop)
        state, payloads = first.follower.state()
        second.numbers.calls[:] = first.calls
        second.follower.restore(state, payloads, {key: second.numbers for key in first.follower.learners})
        records(second, stop, 8)
        assert second.calls == straight.calls and second.follower.records == 9, stop
