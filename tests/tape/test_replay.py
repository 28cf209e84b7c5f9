"""Verify and follow, on tapes that the simulator writes."""

from pathlib import Path

import pytest

from archipel.errors import TapeError
from archipel.protocol import messages as m
from archipel.tape.record import Header, Record
from archipel.tape.replay import Follower, Ports, machine_of, verify, verify_records
from archipel.tape.tape import TapeWriter, read, tape_path

WELCOME = {"sync": {"steps": 8, "fragments": 1, "interval_steps": 2, "overlap_steps": 1}}
SEED = {"role": "learner", "name": "a", "run": "r", "incarnation": "1", "shard": -1, "position": -1}


def write(folder: Path, events: list[m.Event], *, change: int = -1) -> Path:
    """Write the tape of a learner that is told these events; at record `change` it did nothing."""
    header = Header("r", "a", "learner", "1", 0.0, settings={"machine": SEED})
    machine = machine_of(header)
    path = tape_path(folder, "a", "1")
    writer = TapeWriter(path, header)
    for number, event in enumerate(events):
        actions = machine.handle(float(number), event)
        writer.write(float(number), event, [] if number == change else actions)
    writer.close()
    return path


def life() -> list[m.Event]:
    """A learner joins, adopts and steps."""
    spec = m.TensorSpec("w", (3,))
    welcome = m.Welcome("r", 1, WELCOME, 0, 0, 0, (0,), ())
    return [
        m.Connected(m.SYNCER),
        m.Received(m.SYNCER, welcome),
        m.Prepared((spec,)),
        m.Received(m.SYNCER, m.Welcome("r", 1, WELCOME, 0, 0, 0, (0,), (0,))),
        m.Received(m.SYNCER, m.Update(0, 0, 0)),
        m.Applied(0, 0, 0),
        m.StepCompleted(1, 10, 0.5, (0,)),
    ]


def test_a_tape_verifies(tmp_path: Path) -> None:
    write(tmp_path, life())
    found = verify(tmp_path)
    assert found.equal and found.records == 7


def test_a_changed_decision_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, life(), change=6)
    difference, _ = verify_records(read(path))
    assert difference is not None and (difference.worker, difference.record) == ("a", 6)
    assert "Progress" in difference.replayed and "Progress" not in difference.recorded


def test_a_folder_without_tapes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="tape"):
        verify(tmp_path)


class Numbers:
    """A learner's and a syncer's port in one, with numbers for weights; notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepare(self, settings: object, shard: int, position: int) -> None:
        self.calls.append(f"prepare {shard}")

    def step(self, number: int, tick: int) -> tuple[int, tuple[int, ...]]:
        self.calls.append(f"step {number} at {tick}")
        return 10, ()

    def copy(self, fragments: tuple[int, ...]) -> None:
        self.calls.append(f"copy {fragments}")

    def snapshot(self, fragment: int, step: int, *, full: bool) -> str:
        return f"push of {step}"

    def apply(self, fragment: int, version: int, payload: object) -> None:
        self.calls.append(f"apply {payload}")

    def fold(self, action: m.Fold, payload: object) -> None:
        self.calls.append(f"fold {payload}")

    def merge(self, fragment: int, version: int) -> None:
        self.calls.append(f"merge {version}")

    def discard(self, fragment: int) -> None:
        self.calls.append("discard")

    def payload(self, fragment: int, version: int) -> str:
        return f"version {version}"


def record(event: m.Event, *actions: m.Action) -> Record:
    return Record(0, 0.0, event, actions)


def test_decisions_are_carried_out_in_the_order_given() -> None:
    numbers = Numbers()
    follower = Follower(Ports(lambda worker: numbers, numbers))
    push = m.Push(0, 1, 0, 1, 1, 10, 10)
    follower.take("a", record(m.Woke(), m.Prepare({}, 3, 0)))
    follower.take("a", record(m.StepCompleted(1, 10, 0.1, (0,), 7), m.Send(m.SYNCER, push)))
    follower.take(m.SYNCER, record(m.Received("a", push), m.Fold(0, "a", 1.0, 0)))
    follower.take(m.SYNCER, record(m.Folded(0, "a"), m.Merge(0, 1)))
    follower.take(m.SYNCER, record(m.Merged(0, 1), m.Send("a", m.Update(0, 1, 1))))
    follower.take("a", record(m.Applied(0, 1, 1)))
    asked = ["prepare 3", "copy (0,)", "step 1 at 7", "fold push of 1", "merge 1", "apply version 1"]
    assert numbers.calls == asked


def test_a_landing_that_no_tape_explains_is_refused() -> None:
    numbers = Numbers()
    follower = Follower(Ports(lambda worker: numbers, numbers))
    follower.take("a", record(m.Woke(), m.Prepare({}, 0, 0)))
    with pytest.raises(TapeError, match="no tape shows it being sent"):
        follower.take("a", record(m.Applied(0, 1, 1)))


def test_other_data_than_recorded_is_refused() -> None:
    numbers = Numbers()
    follower = Follower(Ports(lambda worker: numbers, numbers))
    follower.take("a", record(m.Woke(), m.Prepare({}, 0, 0)))
    with pytest.raises(TapeError, match="had 11 tokens, here it has 10"):
        follower.take("a", record(m.StepCompleted(1, 11, 0.1)))
