"""`replay`: exit codes, and what it says of tapes that do not verify."""

from pathlib import Path

import msgspec
import pytest

from archipel import cli
from archipel.tape.record import encode, guard
from archipel.tape.tape import read

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
