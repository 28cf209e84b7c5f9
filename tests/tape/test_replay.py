"""Verify, on tapes of a machine."""

from pathlib import Path

import pytest

from archipel.errors import TapeError
from archipel.protocol import messages as m
from archipel.tape.record import Header
from archipel.tape.replay import machine_of, verify, verify_records
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
