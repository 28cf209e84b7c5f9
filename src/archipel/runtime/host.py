"""Drives one machine live: an inbox of events, the wall clock, the tape, the network (DESIGN.md, section 1).

Threads of the network, the compute port and signals only `post`; one thread runs the machine. For each event:
the machine decides, the record goes to the tape, and only then do its actions take effect.

Invariants: `now` never decreases and is comparable with other hosts' wall clocks; an action that names a
payload is carried out in the order the machine gave it.
"""

import logging
import queue
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from ..errors import PayloadError
from ..protocol import gossip as g
from ..protocol import messages as m
from ..protocol.clock import VectorClock
from ..tape.tape import TapeWriter

log = logging.getLogger("archipel")


class Envelope(Struct, frozen=True, array_like=True):
    """A message as it travels: what its sender knows of others' progress, as far as it changed."""

    clock: dict[str, int]
    message: m.AnyMessage


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


def decode_envelope(data: bytes) -> Envelope:
    """Return the envelope. PayloadError if the bytes are none."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PayloadError(
            f"{len(data)} bytes are not a message: {error}; is the peer an archipel?"
        ) from None


class Port(Protocol):
    """What a host asks of the role that owns it: bytes out, and everything that touches tensors."""

    def send(self, to: str, message: m.Message, envelope: bytes) -> None: ...

    def act(self, action: m.Action, payload: Any | None) -> None: ...

    def discard(self, payload: Any) -> None:
        """The machine had no use for a payload that came in."""
        ...


class Host:
    """One worker's inbox and clock around its machine."""

    def __init__(self, machine: m.Machine, port: Port, tape: TapeWriter, *, name: str) -> None:
        self.machine = machine
        self.name = name
        self.clock = VectorClock(name)
        self.finished: m.Finish | None = None
        self._port = port
        self._tape = tape
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._alarm_at: float | None = None
        self._epoch = time.time() - time.monotonic()
        self._last = 0.0

    def now(self) -> float:
        """Return seconds since 1970 on a clock that no adjustment sets back."""
        self._last = max(self._last, self._epoch + time.monotonic())
        return self._last

    def post(self, event: m.Event, payload: Any | None = None, clock: dict[str, int] | None = None) -> None:
        """Hand an event to the machine's thread. From any thread."""
        self._inbox.put(lambda: self.handle(event, payload, clock))

    def call(self, work: Callable[[], None]) -> None:
        """Have `work` done by the machine's thread, in turn. From any thread."""
        self._inbox.put(work)

    def fail(self, error: BaseException) -> None:
        """Have `run` raise an error that another thread met and cannot mend. From any thread."""

        def throw() -> None:
            raise error

        self._inbox.put(throw)

    def deliver(self, sender: str, data: bytes, payload: Any | None) -> None:
        """Hand over a message from the network. From any thread. PayloadError if it is none."""
        envelope = decode_envelope(data)
        self.post(m.Received(sender, envelope.message), payload, envelope.clock)

    def run(self, idle: Callable[[], None] | None = None) -> m.Finish:
        """Handle events until the machine finishes. `idle` runs after each of them."""
        while self.finished is None:
            self._turn()
            if idle is not None:
                idle()
        return self.finished

    def _turn(self) -> None:
        wait_s = None if self._alarm_at is None else max(0.0, self._alarm_at - self.now())
        try:
            work = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            work = self._ring
        if wait_s == 0.0:
            self._ring()  # a full inbox must not keep the alarm from ringing
        if self.finished is None:
            work()

    def _ring(self) -> None:
        if self._alarm_at is not None and self.now() >= self._alarm_at:
            self._alarm_at = None
            self.handle(m.Woke())

    def handle(self, event: m.Event, payload: Any | None = None, clock: dict[str, int] | None = None) -> None:
        """Let the machine decide, put it on the tape, then carry it out. Only from the machine's thread."""
        now = self.now()
        actions = self.machine.handle(now, event)
        news = self.clock.observe(clock) if clock else None
        self._advance_clock(event, actions)
        self._tape.write(now, event, actions, news)
        used = False
        for action in actions:
            used = self._act(action, payload) or used
        if payload is not None and not used:
            self._port.discard(payload)

    def _advance_clock(self, event: m.Event, actions: list[m.Action]) -> None:
        if isinstance(event, m.StepCompleted):
            self.clock.advance(event.step)
        for action in actions:
            if isinstance(action, m.Tally):
                self.clock.advance(action.tick)
        if isinstance(event, m.Disconnected):
            self.clock.forget(event.worker)

    def _act(self, action: m.Action, payload: Any | None) -> bool:
        """Carry out one action; return whether it took the payload that came with the event."""
        match action:
            case m.Send(to=to, message=message):
                self._port.send(to, message, self.envelope(to, message))
            case m.Wake(at=at):
                self._alarm_at = at
            case m.Notice(text=text, level=level):
                log.log(logging.WARNING if level == "warning" else logging.INFO, "%s", text)
            case m.Finish():
                log.info("finished reason=%r complete=%s", action.reason, action.complete)
                self.finished = action
            case m.Tally():
                pass
            case m.Fold() | m.Apply() | g.Take() | g.Adopt() | g.Gather() | g.Accept():
                self._port.act(action, payload)
                return True
            case _:
                self._port.act(action, None)
        return False

    def envelope(self, to: str, message: m.Message) -> bytes:
        """Return the message as bytes, with what changed on our clock since the last one to `to`."""
        return _ENCODER.encode(Envelope(self.clock.delta(to), message))
