"""Learners that die, freeze, come late or never come: the others' rounds go on."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from archipel.dashboard.collect import longest_pause
from archipel.protocol import messages as m
from archipel.runtime.relay import Relay
from archipel.train.data import read_journal

from .conftest import TINY, Rig, Worker

pytestmark = pytest.mark.live


@pytest.fixture
def relay() -> Iterator[list[Relay]]:
    made: list[Relay] = []
    yield made
    for each in made:
        each.stop()


@pytest.fixture
def guest(busy: Rig) -> Worker:
    """Learner-1 of the busy run, taking part; started when the test before has left none."""
    running = [w for w in busy.workers if w.name == "learner-1" and w.process.poll() is None]
    worker = running[0] if running else busy.learner(1)
    again(busy)
    return worker


def again(rig: Rig, learner: str = "learner-1") -> None:
    """Wait until pushes of the learner are folded in, from now on."""
    folds = rig.folds(learner)
    rig.wait(lambda: rig.folds(learner) >= folds + 3, f"{learner} takes part")


def test_late_joiner_adopts_the_weights_and_the_schedule(busy: Rig, guest: Worker) -> None:
    warm_up = TINY["optimizer"]["warmup_steps"]
    events = [record.event for record in busy.records("learner-1")]
    steps = [at for at, event in enumerate(events) if isinstance(event, m.StepCompleted)]
    adopted = {event.fragment: event.version for event in events[: steps[0]] if isinstance(event, m.Applied)}
    assert set(adopted) == {0, 1} and min(adopted.values()) >= 1
    assert events[steps[0]].tick > warm_up  # what its first step's learning rate followed
    pushes = [
        record.event.message
        for record in busy.records()
        if isinstance(record.event, m.Received) and record.event.sender == "learner-1"
        and isinstance(record.event.message, m.Push)
    ]  # fmt: skip
    assert min(push.base for push in pushes) >= 1


@pytest.mark.parametrize("group", [False, True], ids=["trainer", "trainer and courier"])
def test_frozen_learner_holds_up_nobody_and_catches_up(busy: Rig, guest: Worker, group: bool) -> None:
    stopped_at = clock(busy)
    guest.signal(signal.SIGSTOP, group=group)
    if group:
        gone_at = busy.wait(lambda: gone(busy, "learner-1", stopped_at), "a frozen courier is noticed")
        assert gone_at - stopped_at < 10.0
    busy.going(10)
    assert gone(busy, "learner-1", stopped_at) or not group
    guest.signal(signal.SIGCONT, group=group)
    again(busy)
    assert guest.process.poll() is None


def test_killed_courier_ends_its_trainer_with_a_clear_word(busy: Rig, guest: Worker) -> None:
    os.kill(guest.courier, signal.SIGKILL)
    assert guest.exit_code() == 2
    last = guest.output.splitlines()[-1]
    assert last.startswith("archipel: the courier process") and "signal 9" in last
    busy.going(3)


def test_killed_learner_comes_back_and_the_others_went_on(busy: Rig, guest: Worker) -> None:
    killed_at = clock(busy)
    guest.signal(signal.SIGKILL, group=True)
    guest.exit_code()
    busy.wait(lambda: gone(busy, "learner-1", killed_at), "the syncer notices")
    busy.going(5)
    busy.learner(1)
    again(busy)


def test_in_the_end_every_token_has_a_fate(busy: Rig, guest: Worker) -> None:
    """After all that, with learners killed in the middle of a step: the data's own count is the ledger's."""
    running = [worker for worker in busy.workers if worker.process.poll() is None]
    for worker in running[1:]:
        worker.signal(signal.SIGTERM)
    assert [worker.exit_code() for worker in running[1:]] == [0, 0]
    running[0].signal(signal.SIGTERM)
    assert running[0].exit_code() == 1  # the run did not reach its end
    facts = busy.facts()
    drawn = sum(read_journal(path).position for path in sorted((busy.out / "journal").glob("*.bin")))
    fates = ("merged", "overwritten", "absent", "lost", "unmerged")
    assert facts["ledger_closes"] and not facts["tokens"]["tail_unknown"]
    assert min(facts["tokens"]["merged"], facts["tokens"]["lost"]) > 0
    assert 2 * drawn == facts["tokens"]["consumed"] == sum(facts["tokens"][fate] for fate in fates)
    # Steps take hundredths of a second; waiting for the dead and the frozen would take seconds.
    assert longest_pause(busy.records(), 1).longest_pause_s < 3.0


# ---- runs of their own ----


def test_death_in_the_middle_of_a_push_is_noticed_at_once(rig: Rig, relay: list[Relay]) -> None:
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
    at_s = clock(rig)
    doomed.signal(signal.SIGKILL, group=True)
    slow.cut()
    gone_at = rig.wait(lambda: gone(rig, "learner-1", at_s), "learner-1 is gone")
    assert gone_at - at_s < 1.0
    rig.going(3)
    assert not _folded_of_tick(rig, "learner-1", asked)


def _unanswered_pull(rig, learner: str) -> int | None:
    """Return the tick of a pull that has been out for a quarter of a second."""
    open_since: dict[int, float] = {}
    now = clock(rig)
    for record in rig.records():
        for action in record.actions:
            if isinstance(action, m.Send) and action.to == learner and isinstance(action.message, m.Pull):
                open_since[action.message.tick] = record.t
        match record.event:
            case m.Received(sender=sender, message=m.Push(tick=tick) | m.Nothing(tick=tick)) if (
                sender == learner
            ):
                open_since.pop(tick, None)
    return next((tick for tick, since in open_since.items() if now - since > 0.25), None)


def clock(rig: Rig) -> float:
    """Return the newest moment on the syncer's clock; the machine's own may have been adjusted since."""
    return max(record.t for record in rig.records())


def gone(rig: Rig, learner: str, since: float) -> float | None:
    return next(
        (
            record.t
            for record in rig.records()
            if record.t > since
            and isinstance(record.event, m.Disconnected)
            and record.event.worker == learner
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


@pytest.mark.slow
def test_learner_frozen_for_twenty_seconds_is_back_without_a_restart(rig: Rig) -> None:
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


def test_own_loop_in_plain_python_joins_trains_and_ends(rig: Rig) -> None:
    example = Path(__file__).parents[2] / "examples" / "own_loop.py"
    rig.config = example.with_suffix(".toml")
    init = rig.folder / "init.safetensors"
    assert rig.start("init", str(example), "--write-init", str(init)).exit_code() == 0
    syncer = rig.syncer("--init", str(init), "--set", "sync.quorum=2")
    out = rig.out
    learners = [
        rig.start(name, str(example), "--syncer", rig.address, "--name", name, "--out", str(out))
        for name in "ab"
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


def test_trainer_that_raises_says_goodbye(rig: Rig) -> None:
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
