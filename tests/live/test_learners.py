"""Learners that die, freeze, come late or never come: the others' rounds go on."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipel.dashboard.collect import longest_pause
from archipel.protocol import messages as m
from archipel.runtime.relay import Relay
from archipel.train.data import read_journal

pytestmark = pytest.mark.live


@pytest.fixture
def relay() -> Iterator[list[Relay]]:
    made: list[Relay] = []
    yield made
    for each in made:
        each.stop()


def test_killed_learner_comes_back_and_every_token_has_a_fate(rig) -> None:
    rig.write(sync={"steps": 3000})
    syncer = rig.syncer()
    learners = [rig.learner(0), rig.learner(1)]
    rig.wait(lambda: rig.folds("learner-1") >= 5, "learner-1 takes part")
    learners[1].signal(signal.SIGKILL, group=True)
    learners[1].exit_code()
    rig.going(5)
    back = rig.learner(1)
    folds = rig.folds("learner-1")
    rig.wait(lambda: rig.folds("learner-1") >= folds + 5, "learner-1 takes part again")
    assert (syncer.exit_code(), learners[0].exit_code(), back.exit_code()) == (0, 0, 0)
    facts = rig.facts()
    drawn = sum(read_journal(path).position for path in sorted((rig.out / "journal").glob("*.bin")))
    fates = ("merged", "overwritten", "absent", "lost", "unmerged")
    assert facts["complete"] and facts["ledger_closes"] and not facts["tokens"]["tail_unknown"]
    assert facts["tokens"]["lost"] > 0
    assert 2 * drawn == facts["tokens"]["consumed"] == sum(facts["tokens"][fate] for fate in fates)
    pause = longest_pause(rig.records(), 1)
    assert pause.longest_pause_s < 2.5  # step times are milliseconds; a stall on the dead one would be seconds


def test_death_in_the_middle_of_a_push_is_noticed_at_once(rig, relay) -> None:
    # 4 MB in 50 ms pieces over a link of 1 MB/s: a push takes seconds, so the kill falls into one.
    rig.write(
        model={"width": 256, "layers": 2},
        sync={"fragments": 1, "push_codec": "float32", "pull_deadline_s": 30.0},
        data={"batch": 1, "sequence": 16},
    )
    rig.syncer()
    rig.learner(0)
    slow = Relay(rig.address)
    relay.append(slow)
    doomed = rig.learner(1, address=slow.start())
    rig.wait(lambda: rig.said("ready worker=learner-1"), "learner-1 is ready")
    slow.throttle(1e6)
    asked = rig.wait(lambda: _unanswered_pull(rig, "learner-1"), "learner-1 is asked for a push")
    at_s = time.time()
    doomed.signal(signal.SIGKILL, group=True)
    slow.cut()
    gone = rig.wait(lambda: _gone_at(rig, "learner-1", at_s), "learner-1 is gone")
    assert gone - at_s < 1.0
    rig.going(3)
    assert not _folded_of_tick(rig, "learner-1", asked)


def _unanswered_pull(rig, learner: str) -> int | None:
    """Return the tick of a pull that has been out for a quarter of a second."""
    open_since: dict[int, float] = {}
    now = time.time()
    for record in rig.records():
        for action in record.actions:
            if isinstance(action, m.Send) and action.to == learner and isinstance(action.message, m.Pull):
                open_since[action.message.tick] = record.t
        match record.event:
            case m.Received(sender=sender, message=m.Push(tick=tick) | m.Nothing(tick=tick)) if sender == learner:
                open_since.pop(tick, None)
    return next((tick for tick, since in open_since.items() if now - since > 0.25), None)


def _gone_at(rig, learner: str, since: float) -> float | None:
    return next(
        (
            record.t
            for record in rig.records()
            if record.t > since and isinstance(record.event, m.Disconnected) and record.event.worker == learner
        ),
        None,
    )


def _folded_of_tick(rig, learner: str, tick: int) -> bool:
    return any(
        isinstance(record.event, m.Received)
        and record.event.sender == learner
        and isinstance(record.event.message, m.Push)
        and record.event.message.tick == tick
        for record in rig.records()
    )


@pytest.mark.parametrize("group", [False, True], ids=["trainer", "trainer and courier"])
def test_frozen_learner_holds_up_nobody_and_catches_up(rig, group: bool) -> None:
    rig.write(sync={"silence_s": 3.0, "heartbeat_s": 0.5})
    rig.syncer()
    rig.learner(0)
    frozen = rig.learner(1)
    rig.wait(lambda: rig.folds("learner-1") >= 3, "learner-1 takes part")
    frozen.signal(signal.SIGSTOP, group=group)
    stopped_at = time.time()
    if group:
        rig.wait(lambda: _gone_at(rig, "learner-1", stopped_at), "a frozen courier is noticed")
    rig.going(20)
    frozen.signal(signal.SIGCONT, group=group)
    folds = rig.folds("learner-1")
    rig.wait(lambda: rig.folds("learner-1") >= folds + 3, "learner-1 takes part again")
    assert rig.count(m.StepCompleted, "learner-1") > 0
    assert longest_pause(rig.records(), 1).longest_pause_s < 5.0


@pytest.mark.slow
def test_learner_frozen_for_twenty_seconds_is_back_without_a_restart(rig) -> None:
    rig.syncer()
    rig.learner(0)
    frozen = rig.learner(1)
    rig.wait(lambda: rig.folds("learner-1") >= 3, "learner-1 takes part")
    frozen.signal(signal.SIGSTOP)
    until = time.monotonic() + 20.0
    rig.wait(lambda: time.monotonic() > until, "twenty seconds are over", 30.0)
    merged = rig.count(m.Merged)
    frozen.signal(signal.SIGCONT)
    folds = rig.folds("learner-1")
    rig.wait(lambda: rig.folds("learner-1") >= folds + 3, "learner-1 takes part again")
    assert merged > 20 and not rig.said("gone worker=learner-1")


def test_two_of_four_planned_learners_train_when_only_three_come(rig) -> None:
    rig.write(sync={"learners": 4, "quorum": 2, "steps": 400})
    syncer = rig.syncer()
    learners = [rig.learner(number) for number in range(3)]
    assert [syncer.exit_code(), *(learner.exit_code() for learner in learners)] == [0, 0, 0, 0]
    assert rig.facts()["rounds"] > 50


def test_late_joiner_adopts_the_weights_and_the_schedule(rig) -> None:
    rig.write(sync={"steps": 1500}, optimizer={"warmup_steps": 200})
    rig.syncer()
    rig.learner(0)
    rig.wait(lambda: _tick(rig) > 300, "the warm-up is over")
    late = rig.learner(1)
    assert late.exit_code() == 0
    events = [record.event for record in rig.records("learner-1")]
    steps = [at for at, event in enumerate(events) if isinstance(event, m.StepCompleted)]
    adopted = {event.fragment for event in events[: steps[0]] if isinstance(event, m.Applied)}
    first_step, first_push = events[steps[0]], _first_push(rig, "learner-1")
    assert adopted == {0, 1} and first_push.base >= 1
    assert first_step.tick > 200  # what the learning rate followed


def _tick(rig) -> int:
    return max((a.tick for r in rig.records() for a in r.actions if isinstance(a, m.Tally)), default=0)


def _first_push(rig, learner: str) -> m.Push:
    return next(
        record.event.message
        for record in rig.records()
        if isinstance(record.event, m.Received)
        and record.event.sender == learner
        and isinstance(record.event.message, m.Push)
    )


def test_killed_courier_ends_its_trainer_with_a_clear_word(rig) -> None:
    rig.syncer()
    rig.learner(0)
    widowed = rig.learner(1)
    rig.wait(lambda: rig.folds("learner-1") >= 1, "learner-1 takes part")
    import os

    os.kill(widowed.courier, signal.SIGKILL)
    assert widowed.exit_code() == 2
    assert "the courier process" in widowed.output.splitlines()[-1] and "signal 9" in widowed.output
    assert "Traceback" not in widowed.output
    rig.going(3)


def test_own_loop_in_plain_python_joins_trains_and_ends(rig) -> None:
    example = Path(__file__).parents[2] / "examples" / "own_loop.py"
    rig.config = example.with_suffix(".toml")
    init = rig.folder / "init.safetensors"
    assert rig.start("init", str(example), "--write-init", str(init)).exit_code() == 0
    syncer = rig.syncer("--init", str(init))
    out = rig.out
    learners = [
        rig.start(name, str(example), "--syncer", rig.address, "--name", name, "--out", str(out)) for name in "ab"
    ]
    assert [syncer.exit_code(), *(learner.exit_code() for learner in learners)] == [0, 0, 0]
    for learner in learners:
        last = learner.output.splitlines()[-1]
        assert last.startswith("done after") and float(last.rpartition(" ")[2]) < 0.3
    from safetensors.numpy import load_file

    merged = load_file(out / "model" / "weights.safetensors")
    start = load_file(init)
    assert (merged["1.running_var"] > 0).all() and abs(merged["1.running_mean"]).max() < 10
    assert not (merged["1.running_mean"] == start["1.running_mean"]).all()
    assert rig.facts()["ledger_closes"]


def test_trainer_that_raises_says_goodbye(rig) -> None:
    script = rig.folder / "raises.py"
    script.write_text(
        "import sys, torch, archipel\n"
        "model = torch.nn.Linear(2, 2)\n"
        "if sys.argv[1] == 'init':\n"
        "    archipel.save_weights(model, sys.argv[2])\n"
        "    sys.exit()\n"
        "with archipel.Learner(model, None, syncer=sys.argv[1], name='own', out=sys.argv[2]) as learner:\n"
        "    learner.step(tokens=1)\n"
        "    raise ValueError('my own mistake')\n"
    )
    init = rig.folder / "init.safetensors"
    assert rig.start("init", str(script), "init", str(init)).exit_code() == 0
    rig.syncer("--init", str(init))
    raising = rig.start("own", str(script), rig.address, str(rig.out))
    assert raising.exit_code() == 1
    assert "ValueError: my own mistake" in raising.output and "WorkerDied" not in raising.output
    rig.wait(lambda: rig.said("left worker=own tokens=1 reason='ValueError: my own mistake'"), "the goodbye")
