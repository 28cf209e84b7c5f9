"""A machine's host: the record comes before the deed, the alarm rings, unused payloads go back."""

import threading
import time

import pytest

from archipel.errors import PayloadError
from archipel.protocol import messages as m
from archipel.runtime.host import Envelope, Host, decode_envelope
from archipel.tape.tape import Header, TapeWriter, read, tape_path


class Machine:
    """Answers events as a script says; an event without an entry calls for nothing."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.seen = []

    def handle(self, now, event):
        self.seen.append((now, event))
        for kind, actions in self.answers:
            if isinstance(event, kind):
                return actions
        return []


class Port:
    """Records what it is asked for, and how long the tape was then."""

    def __init__(self, tape_file):
        self.sent, self.acted, self.discarded, self.records = [], [], [], []
        self._tape_file = tape_file

    def send(self, to, message, envelope):
        self.sent.append((to, message, decode_envelope(envelope)))
        self._note()

    def act(self, action, payload):
        self.acted.append((action, payload))
        self._note()

    def discard(self, payload):
        self.discarded.append(payload)

    def _note(self):
        self.records.append(len(list(read(self._tape_file))))


@pytest.fixture
def hosted(tmp_path):
    """Return a function that hosts a machine on a tape of its own."""

    def build(machine):
        path = tape_path(tmp_path, "w", "1")
        tape = TapeWriter(path, Header(run="r", worker="w", role="learner", incarnation="1", started=0.0))
        port = Port(path)
        return Host(machine, port, tape, name="w"), port, path

    return build


FINISH = [m.Finish("over")]


def test_record_is_on_the_tape_before_its_actions_take_effect(hosted):
    save, send = m.Save(1), m.Send("syncer", m.Heartbeat())
    host, port, path = hosted(Machine((m.Connected, [save, send]), (m.StopRequested, FINISH)))
    host.post(m.Connected("syncer"))
    host.post(m.StopRequested())
    assert host.run() == m.Finish("over")
    assert port.records == [1, 1]
    assert [list(record.actions) for record in read(path)] == [[save, send], FINISH]


def test_alarm_rings_at_its_time_and_the_newest_replaces_any_other(hosted):
    machine = Machine((m.Woke, FINISH))
    host, _, _ = hosted(machine)
    machine.answers.append((m.Connected, [m.Wake(host.now() + 60.0), m.Wake(host.now() + 0.05)]))
    asked = host.now()
    host.post(m.Connected("syncer"))
    host.run()
    (woken_at, event) = machine.seen[-1]
    assert isinstance(event, m.Woke) and 0.05 <= woken_at - asked < 30.0


def test_full_inbox_does_not_keep_the_alarm_from_ringing(hosted):
    machine = Machine((m.Woke, FINISH))
    host, _, _ = hosted(machine)
    machine.answers.append((m.Connected, [m.Wake(host.now())]))
    for _ in range(50):
        host.post(m.Connected("syncer"))
    host.run()
    assert len(machine.seen) < 50


def test_time_does_not_go_back(hosted, monkeypatch):
    host, _, _ = hosted(Machine())
    first = host.now()
    monkeypatch.setattr(time, "monotonic", lambda: -1000.0)
    assert host.now() == first


def test_payload_goes_with_the_action_that_takes_it(hosted):
    fold = m.Fold(0, "a", 1.0, 0)
    host, port, _ = hosted(Machine((m.Received, [m.Save(1), fold])))
    host.handle(m.Received("a", m.Heartbeat()), b"bytes")
    assert port.acted == [(m.Save(1), None), (fold, b"bytes")] and port.discarded == []


def test_payload_that_nobody_takes_is_given_back(hosted):
    host, port, _ = hosted(Machine())
    host.handle(m.Received("a", m.Heartbeat()), b"bytes")
    assert port.discarded == [b"bytes"]


def test_message_carries_what_changed_on_the_clock(hosted):
    host, port, _ = hosted(Machine((m.StepCompleted, [m.Send("syncer", m.Heartbeat())])))
    host.handle(m.StepCompleted(3, 10, 0.1))
    host.handle(m.StepCompleted(4, 10, 0.1))
    assert [envelope.clock for _, _, envelope in port.sent] == [{"w": 3}, {"w": 4}]


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04.", b"\xc1", b"\x92\x80\x91\xa4Push", bytes(100), b"\x91" * 100_000]
)
def test_bytes_that_are_no_message_are_refused(hosted, data):
    machine = Machine()
    host, _, _ = hosted(machine)
    with pytest.raises(PayloadError, match="are not a message"):
        host.deliver("a", data, None)
    assert machine.seen == []


def test_delivered_message_reaches_the_machine_with_its_sender(hosted):
    machine = Machine((m.Received, FINISH))
    host, _, _ = hosted(machine)
    envelope = host.envelope("a", m.Progress(1, 2, 0.5))
    host.deliver("a", envelope, None)
    host.run()
    assert machine.seen[0][1] == m.Received("a", m.Progress(1, 2, 0.5))
    assert isinstance(decode_envelope(envelope), Envelope)


def test_error_of_another_thread_ends_the_run(hosted):
    host, _, _ = hosted(Machine())
    threading.Thread(target=lambda: host.fail(MemoryError("no room"))).start()
    with pytest.raises(MemoryError, match="no room"):
        host.run()


def test_work_is_done_in_turn_and_idle_after_each(hosted):
    host, _, _ = hosted(Machine((m.StopRequested, FINISH)))
    order = []
    host.call(lambda: order.append("first"))
    host.post(m.StopRequested())
    host.run(lambda: order.append("idle"))
    assert order == ["first", "idle", "idle"]
