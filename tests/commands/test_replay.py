"""`replay`: exit codes, and what it says of tapes that do not verify."""

from pathlib import Path

import msgspec
import pytest

from archipel import cli
from archipel.protocol import messages as m
from archipel.tape.record import Header, encode, guard
from archipel.tape.replay import machine_of
from archipel.tape.tape import TapeWriter, read, tape_path

RUNS = Path(__file__).parents[2] / "runs"
SHORT = ["--set", "sync.steps=20", "--set", "sync.learners=2", "--set", "sim.weather={}"]


def archipel(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return ended.value.code


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return the folder of a short simulated run, with costs only."""
    assert archipel("simulate", str(RUNS / "storm.toml"), *SHORT, "--out", str(tmp_path / "run")) == 0
    capsys.readouterr()
    return tmp_path / "run"


def damage(run: Path) -> None:
    """Let the syncer's tape say that it did nothing at a record at which it did something."""
    (path,) = (run / "tape").glob("syncer.*.jsonl")
    number, record = next((n, one) for n, one in enumerate(read(path)) if n > 5 and one.actions)
    lines = path.read_bytes().splitlines(keepends=True)
    body = encode(msgspec.structs.replace(record, actions=()))
    lines[number + 1] = body + guard(body) + b"\n"
    path.write_bytes(b"".join(lines))


def test_a_sound_tape_verifies(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert archipel("replay", str(run), "--verify-only", "--json") == 0
    assert msgspec.json.decode(capsys.readouterr().out)["equal"] is True


@pytest.mark.parametrize("more", [[], ["--verify-only"]], ids=["", "verify-only"])
@pytest.mark.parametrize("change", [[], ["--set", "sync.merge=average"]], ids=["as it was", "changed"])
def test_a_tape_that_does_not_verify_is_exit_code_1_whatever_was_asked(
    run: Path, capsys: pytest.CaptureFixture[str], more: list[str], change: list[str]
) -> None:
    damage(run)
    assert archipel("replay", str(run), *more, *change) == 1
    shown = capsys.readouterr().out
    assert "equal: False" in shown
    assert "first_difference:\n  worker: syncer\n  record: " in shown and "recorded: []" in shown


def warnings_of(run: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert archipel("replay", str(run), "--verify-only", "--json") == 0
    found: list[str] = msgspec.json.decode(capsys.readouterr().out)["warnings"]
    return found


def test_a_whole_run_has_no_warning(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert warnings_of(run, capsys) == []


def test_an_emptied_tape_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = (run / "tape").glob("learner-0.*.jsonl")
    path.write_bytes(b"")
    (warning,) = warnings_of(run, capsys)
    assert warning.startswith(f"{path} has no record")


def test_a_run_without_its_syncers_tape_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = (run / "tape").glob("syncer.*.jsonl")
    path.unlink()
    (warning,) = warnings_of(run, capsys)
    assert "has no tape of the run's syncer or rendezvous" in warning
    assert archipel("replay", str(run), "--verify-only") == 0
    assert f"warning: {warning}" in capsys.readouterr().out
    assert archipel("replay", str(run)) == 2
    assert warning in capsys.readouterr().err


def test_tapes_without_any_record_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run / "tape").iterdir():
        path.write_bytes(b"")
    assert archipel("replay", str(run), "--verify-only") == 2
    assert "has no record in any tape" in capsys.readouterr().err


def test_peers_of_a_list_need_no_centre(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = {"role": "peer", "name": "a", "run": "r", "incarnation": "1", "shard": -1, "position": -1}
    members = [["a", "a:1"], ["b", "b:1"]]
    settings = {"machine": {**seed, "members": members}, "gossip": {"peers": 2}}
    header = Header("r", "a", "peer", "1", 0.0, settings=settings)
    writer = TapeWriter(tape_path(tmp_path, "a", "1"), header)
    event = m.Connected("b")
    writer.write(0.0, event, machine_of(header).handle(0.0, event))
    writer.close()
    assert warnings_of(tmp_path, capsys) == []


@pytest.mark.parametrize("file", ["storm.toml", "gossip.toml"])
def test_a_run_with_costs_only_has_nothing_to_follow(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = SHORT if file == "storm.toml" else ["--set", "gossip.rounds=2"]
    assert archipel("simulate", str(RUNS / file), *short, "--out", str(tmp_path / "run")) == 0
    assert archipel("replay", str(tmp_path / "run")) == 2
    shown = capsys.readouterr().err
    assert "was simulated with costs only" in shown and "--verify-only" in shown
    assert archipel("replay", str(tmp_path / "run"), "--verify-only") == 0
