"""`archipel train`: one command for a whole run; stopped, killed and resumed."""

import json
import os
import signal
import time

import pytest

from archipel.protocol import messages as m

from .conftest import Rig, mentioning

pytestmark = pytest.mark.live


def test_interrupted_run_stops_in_order_and_resume_goes_on(rig: Rig) -> None:
    run = rig.archipel("train", "train", str(rig.config), "--out", str(rig.out), "--json")
    rig.wait(lambda: rig.folds("learner-0") >= 2 and rig.folds("learner-1") >= 2, "both take part", 60.0)
    run.signal(signal.SIGINT)
    assert run.exit_code() == 1
    assert not mentioning(str(rig.out))
    stopped = json.loads(run.output.splitlines()[-1])
    assert not stopped["complete"] and stopped["tokens"]["lost"] == 0
    assert stopped["tokens"]["consumed"] == sum(
        stopped["tokens"][fate] for fate in ("merged", "overwritten", "absent", "unmerged")
    )
    ticks = rig.count(m.Merged)
    more = ["--set", f"sync.steps={rig.facts()['tick'] + 60}"]
    resumed = rig.archipel(
        "resumed", "train", str(rig.config), "--out", str(rig.out), "--resume", "--json", *more
    )
    assert resumed.exit_code(60.0) == 0
    ended = json.loads(resumed.output.splitlines()[-1])
    assert ended["complete"] and ended["rounds"] > stopped["rounds"] and rig.count(m.Merged) > ticks
    assert ended["tokens"]["consumed"] > stopped["tokens"]["consumed"]
    assert ended["tokens"]["consumed"] == sum(
        ended["tokens"][fate] for fate in ("merged", "overwritten", "absent", "lost", "unmerged")
    )
    assert ended["val_loss_first"] == stopped["val_loss_first"] > ended["val_loss_last"]
    assert (rig.out / "model" / "config.json").exists()


def test_killed_syncer_is_revived_and_a_killed_launcher_leaves_nobody(rig: Rig) -> None:
    rig.write(evaluate={"every_rounds": 4})
    run = rig.archipel("train", "train", str(rig.config), "--out", str(rig.out))
    rig.wait(lambda: rig.folds("learner-0") >= 2, "learner-0 takes part", 60.0)
    syncer = next(pid for pid in mentioning("--address-file") if pid in mentioning(str(rig.out)))
    os.kill(syncer, signal.SIGKILL)
    folds = rig.folds("learner-0")
    rig.wait(lambda: rig.folds("learner-0") >= folds + 2, "rounds go on", 60.0)
    evaluations = (rig.out / "metrics.jsonl").read_text().count("validation")
    rig.wait(
        lambda: (rig.out / "metrics.jsonl").read_text().count("validation") >= evaluations + 2,
        "the evaluator goes on",
    )
    assert len(list((rig.out / "tape").glob("evaluator.*"))) == 1  # it was never restarted
    assert any(record.i == 0 and record.t > 0 for record in rig.records()[1:])  # a second tape
    run.signal(signal.SIGKILL)
    run.exit_code()
    deadline = time.monotonic() + 10.0
    rig.wait(lambda: not mentioning(str(rig.out)) or time.monotonic() > deadline, "they die with it", 15.0)
    assert not mentioning(str(rig.out))


def test_learner_waits_for_a_syncer_that_is_not_there_and_can_be_interrupted(rig: Rig) -> None:
    waiting = rig.learner(0, address="127.0.0.1:1")
    rig.wait(lambda: "not_connected" in waiting.output, "it says that it cannot connect")
    waiting.signal(signal.SIGINT)
    assert waiting.exit_code() == 0
    assert "Traceback" not in waiting.output
