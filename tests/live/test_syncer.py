"""A syncer that stops, dies, resumes, or is besieged: learners train on, and no state is lost."""

import os
import pickle
import signal
import socket
import time
from pathlib import Path

import msgspec
import pytest
import torch

from archipel import config as configuration
from archipel.protocol import messages as m
from archipel.protocol.syncer import SyncerState
from archipel.roles.syncer import initial_weights
from archipel.runtime import checkpoint
from archipel.train.compute import OuterState

from .conftest import Rig

pytestmark = pytest.mark.live


def test_learners_train_on_while_the_syncer_is_away_and_come_back_by_themselves(rig: Rig) -> None:
    syncer = rig.syncer()
    learners = [rig.learner(0), rig.learner(1)]
    rig.wait(lambda: rig.folds("learner-0") >= 2 and rig.folds("learner-1") >= 2, "both take part")
    syncer.signal(signal.SIGTERM)
    assert syncer.exit_code() == 1  # not complete
    facts = rig.facts()
    found, outer = _checkpoint(rig)
    assert (outer.digest(), outer.momentum_digest()) == (facts["digest"], facts["momentum_digest"])
    assert outer.momentum_digest() != _zero_momentum(outer)
    steps = rig.count(m.StepCompleted, "learner-0")
    rig.wait(lambda: rig.count(m.StepCompleted, "learner-0") >= steps + 20, "learner-0 trains on")
    resumed = rig.syncer("--resume")
    assert f"digest={facts['digest']}" in resumed.output
    merged = rig.count(m.Merged)
    rig.wait(lambda: rig.count(m.Merged) >= merged + 6, "rounds go on")
    after = [record.event for record in rig.records() if isinstance(record.event, m.Merged)][merged:]
    assert after[0].version == found.versions[after[0].fragment] + 1
    # Killed this time: the newest checkpoint is from before, and the run goes on from there.
    resumed.signal(signal.SIGKILL)
    resumed.exit_code()
    assert rig.syncer("--resume", name="third").process.poll() is None
    merged = rig.count(m.Merged)
    rig.wait(lambda: rig.count(m.Merged) >= merged + 6, "rounds go on")
    assert all(learner.process.poll() is None for learner in learners)
    assert not rig.said("refused worker=learner")


def _checkpoint(rig: Rig) -> tuple[SyncerState, OuterState]:
    """Load the newest checkpoint as a syncer does."""
    found = checkpoint.load_newest(rig.out / "checkpoints", run="live")
    assert found is not None
    state = msgspec.json.decode(found.state, type=SyncerState)
    config = configuration.load(rig.config)
    schema, _, _ = initial_weights(config, "")
    outer = OuterState(schema, config.sync)
    outer.restore(found.tensors("weights"), found.tensors("momentum"), state.versions)
    return state, outer


def _zero_momentum(outer: OuterState) -> str:
    zeros = [type(state)(0, torch.zeros_like(state.momentum), state.momentum) for state in outer.states]
    return outer.digest(zeros)


def test_resumed_blocking_run_ends_with_the_weights_of_a_straight_one(
    rig: Rig, tmp_path: Path, tokens
) -> None:
    straight = Rig(tmp_path / "straight", tokens)
    # DiLoCo: K = M, P = 1, τ = 0, plain average (two terms add up to the same in either order).
    diloco = {"quorum": 2, "fragments": 1, "interval_steps": 10, "overlap_steps": 0, "merge": "average"}
    try:
        for each in (rig, straight):
            each.write(sync={**diloco, "steps": 200})
        syncer = rig.syncer()
        learners = [rig.learner(0), rig.learner(1)]
        rig.wait(lambda: _tick(rig) > 50 and _tick(rig) % 10 in (1, 2, 3), "a moment between rounds")
        syncer.signal(signal.SIGTERM)
        syncer.exit_code()
        stopped = rig.facts()
        assert 50 < stopped["tick"] < 200
        assert straight.facts_of_a_whole_run()["complete"]  # meanwhile the learners wait for their syncer
        resumed = rig.syncer("--resume")
        assert [resumed.exit_code(), *(learner.exit_code() for learner in learners)] == [0, 0, 0]
        for digest in ("digest", "momentum_digest", "versions"):
            assert rig.facts()[digest] == straight.facts()[digest]
    finally:
        straight.end()


def _tick(rig: Rig) -> int:
    return max((a.tick for r in rig.records() for a in r.actions if isinstance(a, m.Tally)), default=0)


def test_syncer_without_learners_saves_idles_and_ends_when_told_to(rig: Rig) -> None:
    rig.write(sync={"idle_exit_s": 12.0})  # longer than a learner takes to come on a busy machine
    syncer = rig.syncer()
    learner = rig.learner(0)
    rig.wait(lambda: rig.folds("learner-0") >= 2, "learner-0 takes part")
    learner.signal(signal.SIGKILL, group=True)
    rig.wait(lambda: rig.said("no learners"), "the syncer says so")
    before, at = _cpu_s(syncer.process.pid), time.monotonic()
    assert syncer.exit_code() == 1
    assert "finished reason='no learners' complete=False" in syncer.output
    merged = rig.count(m.Merged)
    found = checkpoint.load_newest(rig.out / "checkpoints", run="live")
    assert found is not None and found.step == merged
    assert before < 60 and time.monotonic() - at < DEADLINE_IDLE_S
    with socket.socket() as probe:  # the port is free again
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        host, port = rig.address.split(":")
        probe.bind((host, int(port)))


DEADLINE_IDLE_S = 30.0


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def test_idle_syncer_uses_no_processor(rig: Rig) -> None:
    syncer = rig.syncer()
    rig.wait(lambda: _cpu_s(syncer.process.pid) > 0.1, "it has started")
    before, at = _cpu_s(syncer.process.pid), time.monotonic()
    rig.wait(lambda: time.monotonic() - at > 2.0, "two seconds are over")
    assert _cpu_s(syncer.process.pid) - before < 0.3


# ---- one syncer, many visitors ----


def test_second_syncer_on_the_run_folder_is_refused(busy: Rig) -> None:
    out = ("--listen", "127.0.0.1:0", "--out", str(busy.out))
    second = busy.archipel("second", "syncer", str(busy.config), *out, "--resume")
    assert second.exit_code() == 2
    assert "already has a syncer (pid=" in second.output.splitlines()[-1]
    busy.going()


def test_port_in_use_is_said_with_the_port(busy: Rig, tmp_path: Path) -> None:
    out = ("--listen", busy.address, "--out", str(tmp_path / "other"))
    second = busy.archipel("clash", "syncer", str(busy.config), *out)
    assert second.exit_code() == 2
    last = second.output.splitlines()[-1]
    assert last.startswith("archipel: ") and busy.address.split(":")[1] in last
    busy.going()


def test_learner_of_another_run_or_model_is_refused_with_what_differs(busy: Rig, tmp_path: Path) -> None:
    to = ("--syncer", busy.address, "--out", str(tmp_path / "other"))
    other = tmp_path / "other.toml"
    other.write_text('[run]\nname = "another"\n')
    stranger = busy.archipel("stranger", "learner", str(other), *to)
    script = tmp_path / "model.py"
    script.write_text(
        "import torch, archipel, sys\n"
        "model = torch.nn.Linear(3, 3)\n"
        f"there = dict(syncer={busy.address!r}, out={str(tmp_path)!r}, name='odd')\n"
        "with archipel.Learner(model, None, **there): pass\n"
    )
    odd = busy.start("odd", str(script))
    assert stranger.exit_code() == 2 and odd.exit_code() == 1
    assert "run 'another', this syncer serves 'live'" in stranger.output.splitlines()[-1]
    last = odd.output.splitlines()[-1]
    assert "JoinRefused" in last and "the model differs" in last and "bias" in last
    busy.going()


def test_garbage_and_pickles_change_nothing(busy: Rig, tmp_path: Path) -> None:
    bait = tmp_path / "executed"
    host, port = busy.address.split(":")
    bomb = pickle.dumps(_Bomb(str(bait)))
    for data in (
        os.urandom(1 << 16),
        bomb,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bomb,
    ):
        with socket.create_connection((host, int(port)), timeout=5.0) as visitor:
            visitor.sendall(data)
    for message in (bomb, b"\xc1", msgspec.msgpack.encode([{}, ["Push", 1]]), os.urandom(300)):
        _say(busy.address, message)
    busy.going(3)
    assert not bait.exists()


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def _say(address: str, message: bytes) -> None:
    """Send one control frame with a proper hello before it."""
    import threading

    from archipel.runtime.dialing import Client
    from archipel.runtime.wire import NetworkOptions

    there = threading.Event()

    class Sink:
        def connected(self) -> None:
            there.set()

        def disconnected(self, reason: str) -> None: ...
        def received(self, message, payload, seconds) -> None: ...
        def allocate(self, message, length):
            return memoryview(bytearray(length))

        def refused(self, reason: str, final: bool) -> None: ...

    client = Client(Sink(), NetworkOptions(), address=address, worker="visitor", run="")
    client.start()
    assert there.wait(10.0)
    client.send(message)
    client.stop()


def test_tape_of_a_running_run_is_readable(busy: Rig) -> None:
    shown = busy.archipel("tape", "tape", str(busy.out))
    assert shown.exit_code() == 0
    assert "learner-0" in shown.output and "syncer" in shown.output
