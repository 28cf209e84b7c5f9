"""The courier's half of a peer's compute port, over a real channel; the test is the trainer."""

import gc
from typing import Any

import numpy as np
import pytest

from archipel.errors import PayloadError
from archipel.protocol import gossip as g
from archipel.protocol import messages as m
from archipel.protocol.messages import TensorSpec
from archipel.protocol.peer import PeerMachine
from archipel.runtime import frames
from archipel.runtime.lending import Lender, borrow
from archipel.runtime.peer import PeerCompute
from archipel.runtime.shared import Channel

SCHEMA = (TensorSpec("a", (2, 3)), TensorSpec("b", (4,)))
NBYTES = 4 * 10


class Bench:
    """A peer "a" in round 0 of two: its courier's port, and the trainer's end of everything it touches."""

    def __init__(self, **options: Any) -> None:
        self.trainer, fd = Channel.pair()
        self.channel = Channel.from_fd(fd)
        self.machine = PeerMachine("a", "a1")
        self.events: list[m.Event] = []
        self.port = PeerCompute(self.channel, self.machine, self.happened, lambda work: work())
        self.lender = Lender(2)
        settings = {"gossip": {"peers": 2, "scheme": "one_peer", "local_steps": 1, **options}}
        self.tell(m.Connected(g.RENDEZVOUS), m.Received(g.RENDEZVOUS, g.Admitted("run", settings, 0, 0)))
        self.say(frames.Ready(SCHEMA))
        view = g.View(1, 0, (g.Address("a", "x:1"), g.Address("b", "x:2")))
        self.tell(m.Received(g.RENDEZVOUS, view), m.Connected("b"))

    def happened(self, event: m.Event) -> None:
        self.events.append(event)
        self.tell(event)

    def tell(self, *events: m.Event) -> None:
        for event in events:
            for action in self.machine.handle(1.0, event):
                if not isinstance(action, m.Send | m.Wake | m.Notice | g.Know):
                    self.port.act(action, None)

    def say(self, frame: frames.Frame, descriptors: list[int] | None = None) -> None:
        self.trainer.send(frames.encode(frame), descriptors or ())
        for data in self.channel.receive(1.0):
            self.port.receive(frames.decode(data))

    def heard(self, kind: type = frames.Frame) -> list[Any]:
        return [f for data in self.trainer.receive() if isinstance(f := frames.decode(data), kind)]

    def answer(self, event: Any, payload: bytes) -> frames.Stretch:
        filled = self.lender.take(len(payload))
        filled[:] = np.frombuffer(payload, np.uint8)
        stretch, descriptor = self.lender.lend(filled)
        self.say(frames.Answered(event, stretch), [descriptor])
        return stretch


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.port.close()


def test_a_step_is_answered_once_all_it_calls_for_was_said(bench: Bench) -> None:
    bench.heard()
    bench.say(frames.Stepped(1, 10, 0.1, (), 0))
    heard = bench.heard()
    assert [type(frame) for frame in heard] == [frames.Pace, frames.Asked, frames.Settled]
    assert heard[0].hold and heard[1].action == g.Offer(0)


def test_an_offer_is_sent_from_the_trainers_own_memory_and_goes_back_after_the_round(bench: Bench) -> None:
    bench.say(frames.Stepped(1, 10, 0.1, (), 0))
    stretch = bench.answer(g.Offered(0), b"x" * NBYTES)
    payload = bench.port.payload(g.Model(0), "b")
    assert payload is not None and bytes(payload) == b"x" * NBYTES
    bench.port.act(g.Mix(0), None)
    gc.collect()
    assert not bench.heard(frames.Free)  # it is still being sent
    del payload
    gc.collect()
    assert bench.heard(frames.Free) == [frames.Free(stretch.number)]


def test_a_model_that_comes_in_reaches_the_trainer_where_it_was_received(bench: Bench) -> None:
    room = bench.port.room("b", g.Model(0), NBYTES)
    room[:] = b"y" * NBYTES
    bench.heard()
    bench.port.act(g.Take(0, "b"), room)
    [asked] = bench.heard(frames.Asked)
    assert asked.action == g.Take(0, "b")
    assert bytes(borrow(bench.trainer, asked.stretch)) == b"y" * NBYTES
    bench.say(frames.Free(asked.stretch.number))
    assert bench.port._lender.away == 0


@pytest.mark.parametrize(
    ("sender", "message", "length"),
    [
        ("b", g.Model(0), NBYTES - 4),  # of another model
        ("b", g.Model(7), NBYTES),  # of a round that is not under way
        ("c", g.Model(0), NBYTES),  # of no partner
        ("b", g.State(0, 1), NBYTES),  # asked of nobody
        ("b", g.Final(1), NBYTES),  # before the end
        ("b", g.Mean("x", 1), NBYTES),
        ("b", m.Heartbeat(), NBYTES),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, m.Message) else None,
)
def test_no_memory_is_given_for_what_nobody_waits_for(
    bench: Bench, sender: str, message: m.Message, length: int
) -> None:
    with pytest.raises(PayloadError):
        bench.port.room(sender, message, length)


def test_compressed_offers_are_shorter() -> None:
    bench = Bench(codec="bf16")
    assert len(bench.port.room("b", g.Model(0), NBYTES // 2)) == NBYTES // 2
    with pytest.raises(PayloadError):
        bench.port.room("b", g.Model(0), NBYTES)
    bench.port.close()


def test_a_state_is_taken_from_the_donor_alone_and_has_a_limit() -> None:
    bench = Bench()
    machine = bench.machine = bench.port._machine = PeerMachine("z", "z1")
    settings = {"gossip": {"peers": 2}}
    for event in (
        m.Connected(g.RENDEZVOUS),
        m.Received(g.RENDEZVOUS, g.Admitted("run", settings, 0, 0, "b", "x:2")),
        m.Prepared(SCHEMA),
    ):
        machine.handle(1.0, event)
    assert len(bench.port.room("b", g.State(5, 1), 1000)) == 1000
    for sender, length in (("c", 1000), ("b", 1 << 30)):
        with pytest.raises(PayloadError):
            bench.port.room(sender, g.State(5, 1), length)
    bench.port.close()
