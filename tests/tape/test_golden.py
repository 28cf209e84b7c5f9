"""Golden tapes: on every change, the recorded events must still lead to the recorded decisions.

If a decision changes on purpose, write the tapes anew, and say in the commit which decision changed and why:

    ARCHIPEL_REWRITE_GOLDEN=1 pytest tests/tape/test_golden.py
"""

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from archipel.chaos.plan import Weather
from archipel.errors import TapeError
from archipel.protocol.schedule import SyncOptions
from archipel.sim.scenario import Run, SimOptions, simulate
from archipel.tape.record import guard
from archipel.tape.replay import verify

GOLDEN = Path(__file__).parent / "golden"
SHORT = SyncOptions(steps=10, learners=3, fragments=4, interval_steps=4, checkpoint_rounds=4)
STORM = Weather(kill_s=12.0, freeze_s=15.0, partition_s=15.0, syncer_kill_s=20.0, mean_for_s=3.0)
RUNS = {
    "calm": Run(SHORT, SimOptions(speed_spread=0.3, jitter=0.1), seed=1),
    "diloco": Run(
        msgspec.structs.replace(SHORT, quorum=3, fragments=1, overlap_steps=0), SimOptions(jitter=0.2), seed=2
    ),
    "storm": Run(SHORT, SimOptions(speed_spread=0.3, weather=STORM), seed=3),
}


@pytest.mark.parametrize("name", RUNS)
def test_decisions_are_as_recorded(name: str) -> None:
    if os.environ.get("ARCHIPEL_REWRITE_GOLDEN"):
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        simulate(RUNS[name], folder=GOLDEN / name)
    found = verify(GOLDEN / name)
    assert found.equal, found.first_difference
    assert found.records > 100


def test_the_simulator_still_writes_the_golden_tapes(tmp_path: Path) -> None:
    for name, run in RUNS.items():
        simulate(run, folder=tmp_path / name)
        for tape in sorted((GOLDEN / name / "tape").iterdir()):
            assert (tmp_path / name / "tape" / tape.name).read_bytes() == tape.read_bytes(), tape


def copy_of(name: str, folder: Path) -> Path:
    shutil.copytree(GOLDEN / name, folder / name)
    return next((folder / name / "tape").glob("syncer.*.jsonl"))


def test_a_changed_quorum_is_caught_and_named(tmp_path: Path) -> None:
    tape = copy_of("calm", tmp_path)
    first, rest = tape.read_bytes().split(b"\n", 1)
    changed = first.rsplit(b"\t", 1)[0].replace(b'"quorum":1', b'"quorum":3')
    tape.write_bytes(changed + guard(changed) + b"\n" + rest)
    found = verify(tmp_path / "calm")
    assert not found.equal and found.first_difference is not None
    difference = found.first_difference
    assert (difference.worker, difference.record) == ("syncer", 0)
    assert "quorum=1" in difference.recorded and "quorum=3" in difference.replayed


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_a_flipped_byte_is_refused(tmp_path: Path, share: float) -> None:
    tape = copy_of("calm", tmp_path)
    data = bytearray(tape.read_bytes())
    data[int(share * (len(data) - 1))] ^= 1
    tape.write_bytes(data)
    with pytest.raises(TapeError):
        verify(tmp_path / "calm")
