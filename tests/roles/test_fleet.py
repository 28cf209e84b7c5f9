"""A fleet over small programs in the place of syncer and learners: what it does when they end."""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel import config as configuration
from archipel.errors import CheckpointError, ConfigError, WorkerDied
from archipel.roles.fleet import Fleet
from archipel.runtime import checkpoint, launch
from archipel.runtime.launch import Launcher, WorkerProgram

# What every program begins with: where it is, who it is, how often it was started, and how to wait.
HEAD = """
import os, pathlib, sys, time
kind, arguments = sys.argv[1], sys.argv[2:]
options = dict(zip(arguments, arguments[1:]))
out = pathlib.Path(options["--out"])
name = options.get("--name", kind)
start = 1
while (out / f"{name}.{start}").exists():
    start += 1
(out / f"{name}.{start}").touch()
def wait_for(file):
    while not (out / file).exists():
        time.sleep(0.01)
"""
LISTEN = """
def listen():
    from archipel.tape.tape import Header, TapeWriter, tape_path
    header = Header("run", kind, kind, str(start), time.time(), {}, {})
    TapeWriter(tape_path(out, kind, str(start)), header)
    pathlib.Path(options["--address-file"]).write_text("127.0.0.1:1")
"""
UNTIL_DONE = "listen(); wait_for('done')"
SLEEP = "time.sleep(600)"


class SmallFleet(Fleet):
    """A fleet whose programs are these scripts, by kind; they get the arguments of the real ones."""

    scripts: dict[str, str] = {}  # noqa: RUF012 (set for each fleet)

    def _program(self, name: str, command: list[str], **how: Any) -> WorkerProgram:
        program = super()._program(name, command, **how)
        source = HEAD + LISTEN + self.scripts.get(command[0], SLEEP)
        return WorkerProgram(name, (sys.executable, "-c", source, *program.argv[3:]), restart=program.restart)


def fleet(out: Path, *overrides: str, syncer: str = UNTIL_DONE, learner: str = SLEEP) -> SmallFleet:
    quick = ["launch.backoff_s_min=0.01", "launch.backoff_s_max=0.05", "launch.stop_grace_s=0.5"]
    made = SmallFleet(configuration.load(None, [*quick, "sync.learners=2", *overrides]), out, quiet=True)
    made.scripts = {"syncer": syncer, "learner": learner}
    return made


def followed(made: SmallFleet) -> bool:
    """Start everything and follow it; return whether the run reached its end."""
    made.out.mkdir(parents=True, exist_ok=True)
    with Launcher(made.out, made.config.launch) as launcher:
        made._start_center(launcher, resume=False)
        made._await_center(launcher)
        made._start_members(launcher, made.address)
        return made._watch(launcher)


# ---- a folder that holds a run ----

HELD = {"config.toml": "old", "syncer.json": "{}", "address": "127.0.0.1:7"}


def held(out: Path, *, states: str = "checkpoints", run: str = "run") -> Path:
    """Make the folder of a run with one checkpoint."""
    checkpoint.save(out / states, 7, {"weights": {"w": np.zeros(2)}}, {}, run=run, keep=1)
    for name, text in HELD.items():
        (out / name).write_text(text)
    return out


def refused(made: SmallFleet, words: str) -> None:
    """The fleet does not start, and leaves the run's files as they were."""
    with pytest.raises(CheckpointError, match=words):
        made.run()
    assert {name: (made.out / name).read_text() for name in HELD} == HELD


def test_a_run_that_exists_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    words = "checkpoints holds a checkpoint of round 7: --resume goes on from it, another --out starts afresh"
    refused(fleet(held(tmp_path)), words)


def test_another_run_is_not_resumed_and_left_as_it_is(tmp_path: Path) -> None:
    made = fleet(held(tmp_path, run="other"))
    made.resume = True
    refused(made, "step-000000007 belongs to run 'other', not to 'run': name its own directory")


def test_a_run_of_the_other_kind_is_not_resumed_and_left_as_it_is(tmp_path: Path) -> None:
    made = fleet(held(tmp_path, states="rendezvous"))
    made.resume = True
    refused(made, "rendezvous is of a run that has no syncer")


@pytest.mark.parametrize("leased", [".", "logs"], ids=["its syncer lives", "its fleet lives, its syncer not"])
def test_a_run_that_lives_is_refused_and_left_as_it_is(tmp_path: Path, leased: str) -> None:
    made = fleet(held(tmp_path))
    made.resume = True
    with checkpoint.lease(tmp_path / leased):
        refused(made, "already has a syncer")


# ---- the start ----

REFUSAL = "print('archipel: this is the remedy', file=sys.stderr); sys.exit(2)"


def test_a_center_that_dies_at_the_start_is_noticed_at_once_and_says_why(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=r"did not start \(exit 2\): this is the remedy$"):
        fleet(tmp_path, syncer=REFUSAL).run()
    assert time.monotonic() - began < 30.0


def test_a_crash_at_the_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match=r"(?s)did not start \(exit 1\): its log ends:.*ZeroDivisionError"):
        fleet(tmp_path, syncer="1 / 0").run()


def test_a_run_whose_center_does_not_start_keeps_its_files(tmp_path: Path) -> None:
    made = fleet(held(tmp_path), syncer=REFUSAL)
    made.resume = True
    with pytest.raises(WorkerDied):
        made.run()
    assert {name: (tmp_path / name).read_text() for name in ("config.toml", "syncer.json")} == {
        name: HELD[name] for name in ("config.toml", "syncer.json")
    }


def test_weights_to_start_from_are_refused_for_gossip(tmp_path: Path) -> None:
    made = Fleet(configuration.load(None, ["gossip.peers=2"]), tmp_path / "run", init="weights")
    with pytest.raises(ConfigError, match="--init weights: a rendezvous has no weights"):
        made.run()
    assert not (tmp_path / "run").exists()


# ---- a center that ends on the way ----


def starts(out: Path) -> int:
    """Return how often the syncer was started."""
    return len(list(out.glob("syncer.[0-9]")))


def test_a_center_that_crashes_is_started_again_where_it_was(tmp_path: Path) -> None:
    syncer = """
assert start == 1 or ("--resume" in arguments and options["--listen"] == "127.0.0.1:1")
listen()
sys.exit(1 if start < 4 else 0)
"""
    assert followed(fleet(tmp_path, syncer=syncer)) and starts(tmp_path) == 4


def test_a_center_that_crashes_before_it_listens_again_is_started_again(tmp_path: Path) -> None:
    syncer = "start == 2 and sys.exit(1); listen(); sys.exit(1 if start == 1 else 0)"
    assert followed(fleet(tmp_path, syncer=syncer)) and starts(tmp_path) == 3


def test_crashes_of_a_center_count_within_a_window_only(tmp_path: Path) -> None:
    window = ("launch.restarts_max=1", "launch.restarts_window_s=0.001")
    syncer = "listen(); sys.exit(1 if start < 4 else 0)"
    assert followed(fleet(tmp_path, *window, syncer=syncer)) and starts(tmp_path) == 4


@pytest.mark.parametrize(
    ("ends", "count"),
    [
        ("sys.exit(1)", 3),
        ("sys.exit(2)", 1),
        ("(out / 'syncer.json').touch(); sys.exit(1)", 1),
    ],
    ids=["it crashes again and again", "a person must mend something", "it was stopped in order"],
)
def test_a_center_is_not_started_again_when(ends: str, count: int, tmp_path: Path) -> None:
    assert not followed(fleet(tmp_path, "launch.restarts_max=2", syncer=f"listen(); {ends}"))
    assert starts(tmp_path) == count


# ---- members ----


def test_a_run_ends_when_all_members_crash_again_and_again(tmp_path: Path) -> None:
    assert not followed(fleet(tmp_path, "launch.restarts_max=1", learner="sys.exit(1)"))


def test_a_member_that_came_back_from_a_crash_loop_keeps_the_run_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LOOP_RETRY_S", 0.3)
    learner = """
if name == "learner-0":
    start > 1 or sys.exit(1)
    (out / "back").touch()
elif start == 1:
    wait_for("back")
    sys.exit(1)
else:
    (out / "done").touch()
time.sleep(600)
"""
    assert followed(fleet(tmp_path, "launch.restarts_max=0", learner=learner))
