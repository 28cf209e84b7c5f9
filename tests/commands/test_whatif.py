"""`simulate` with seeds: exit codes, counts, and commands that show a failing seed again."""

import shlex
from pathlib import Path

import msgspec
import pytest

from archipel import cli

FILE = str(Path(__file__).parents[2] / "runs" / "storm.toml")
SHORT = ["--set", "sync.steps=40", "--set", "sync.learners=3"]


def simulate(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", *arguments])
    return ended.value.code


def test_storms_that_end_well_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(FILE, "--seeds", "0:5", "--cores", "1", "--json", *SHORT) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert (found["storms"], found["failed"], found["failures"]) == (5, 0, [])
    assert found["events"] > 5000 and found["faults"] > 0


def test_a_seed_that_fails_is_printed_with_a_command_that_fails_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert (
        simulate(FILE, "--seeds", "3:5", "--cores", "1", "--set", "sim.horizon_s=20", *SHORT, "--json") == 1
    )
    shown = capsys.readouterr()
    (first, _) = msgspec.json.decode(shown.out)["failures"]
    assert first["seed"] == 3 and first["command"] in shown.err
    program, *arguments = shlex.split(first["command"])
    assert program == "archipel" and arguments[0] == "simulate"
    assert simulate(*arguments[1:], "--out", str(tmp_path / "run")) == 1


def test_seeds_that_are_no_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(FILE, "--seeds", "7") == 2
    assert "'7' is not FROM:TO" in capsys.readouterr().err
