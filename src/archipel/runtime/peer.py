"""The courier's side of a gossip peer's compute port: actions to the trainer, payloads between it and others.

The trainer holds the tensors (GASLoC's mathematics is there) and the courier no number: what comes in over
the network is written straight into shared memory and lent to the trainer with the action that wants it; what
the trainer has made is lent to the courier until it is sent. No torch.

Invariants: memory is given only for a payload that the machine waits for, of the length it must have; a step
is answered by `Settled` once all it calls for has been said, for a peer may have to wait after any step.
"""

import math
from collections.abc import Callable
from typing import Any

from ..errors import PayloadError
from ..numerics import codec
from ..protocol import gossip as g
from ..protocol import messages as m
from ..protocol.peer import PeerMachine
from . import frames
from .lending import Bytes, Lender, borrow
from .shared import Channel

STRETCHES_KEPT = 2  # unused ones: a round's models that came in, with one or two partners
CODEC_BLOCK = 2  # neither codec has scales; a length is asked for with a block all the same
STATE_MODELS_MAX = 16  # a whole state: anchor, memory, and what an optimizer may hold for each element
STATE_BYTES_BESIDE = 1 << 20  # names and numbers in it

Key = tuple[str, int, str]  # of a payload: message kind, round or attempt, receiver if it is for one alone


class PeerCompute:
    """Answers the peer's machine. `said` takes events; `call` has work done by the machine's thread."""

    def __init__(
        self,
        channel: Channel,
        machine: PeerMachine,
        said: Callable[[m.Event], None],
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        self.numel = 0
        self._channel = channel
        self._machine = machine
        self._said = said
        self._call = call
        self._lender = Lender(STRETCHES_KEPT)
        self._made: dict[Key, Bytes] = {}  # what the trainer lent us to be sent

    # ---- from the trainer ----

    def receive(self, frame: frames.Frame) -> None:
        """Turn one of the trainer's frames into the event it is."""
        match frame:
            case frames.Ready():
                self.numel = sum(math.prod(spec.shape) for spec in frame.schema)
                self._said(m.Prepared(frame.schema, frame.environment))
            case frames.Stepped():
                self._said(m.StepCompleted(frame.step, frame.tokens, frame.step_s, (), frame.tick))
                self._tell(frames.Settled(frame.step))
            case frames.Answered(event=event, stretch=stretch):
                if stretch is not None:
                    self._made[_key_of(event)] = borrow(self._channel, stretch, self._unused)
                self._said(event)
            case frames.Free(slot=number):
                self._lender.free(number)
            case frames.Ended(reason=reason):
                self._said(m.StopRequested(reason))

    def _unused(self, number: int) -> None:
        """Nobody here sends this stretch any more; said on any thread."""
        self._call(lambda: self._tell(frames.Free(number)))

    # ---- to the trainer ----

    def act(self, action: m.Action, payload: Any | None) -> None:
        """Carry out what the machine wants of the trainer."""
        match action:
            case m.Prepare(settings=settings, shard=shard, position=position):
                self._tell(frames.Build("", settings, shard, position))
            case m.Hold():
                self._tell(frames.Pace(True))
            case m.Resume():
                self._tell(frames.Pace(False))
            case m.Stop(reason=reason):
                self._tell(frames.Halt(reason, True))
            case g.Mix(round=number):
                self._made.pop(("Model", number, ""), None)  # sent, or wanted by nobody any more
                self._ask(action, None)
            case g.Know():
                raise AssertionError("connections are the network's")
            case _:
                self._ask(action, payload)

    def _ask(self, action: Any, payload: Any | None) -> None:
        if payload is None:
            self._tell(frames.Asked(action))
            return
        stretch, descriptor = self._lender.lend(payload)
        self._tell(frames.Asked(action, stretch), [descriptor])

    def _tell(self, frame: frames.Frame, descriptors: list[int] | None = None) -> None:
        self._channel.send(frames.encode(frame), descriptors or ())

    # ---- to and from the network ----

    def payload(self, message: m.Message, to: str) -> Bytes | None:
        """Return the bytes that travel beside a message, None if nothing does."""
        match message:
            case g.Model(round=number):
                return self._made["Model", number, ""]
            case g.State(round=number):
                return self._made.pop(("State", number, to))
            case g.Final(attempt=attempt) | g.Mean(attempt=attempt):
                return self._made[type(message).__name__, attempt, ""]
            case _:
                return None

    def room(self, sender: str, message: m.Message, length: int) -> memoryview:
        """Return memory for the payload of a message that comes in. PayloadError if it may not."""
        expected = self._expected(sender, message)
        whole = isinstance(message, g.State)
        if not expected:
            raise PayloadError(f"a payload of {length} bytes nobody waits for")
        if not 0 < length <= expected or (length != expected and not whole):
            raise PayloadError(
                f"{type(message).__name__} of {length} bytes, {expected} expected ({self.numel} elements): "
                "the sender's model or gossip.codec differ from the run's"
            )
        return memoryview(self._lender.take(length, once=not isinstance(message, g.Model)))

    def _expected(self, sender: str, message: m.Message) -> int:
        """Return how long a payload must be (a state: may be); 0: it is not waited for."""
        machine, conclude = self._machine, self._machine.conclusion.conclude
        match message:
            case g.Model(round=number):
                exchange = machine.exchange
                late = machine.rounds.past.get(number)
                now = exchange is not None and exchange.round == number and sender in exchange.missing
                if not now and (late is None or not late.correctable(sender)):
                    return 0
                return codec.encoded_bytes(machine.options.codec, self.numel, CODEC_BLOCK)
            case g.State():
                wanted = machine.state == "cloning" and sender == machine.donor
                return wanted * (4 * self.numel * STATE_MODELS_MAX + STATE_BYTES_BESIDE)
            case g.Final():
                return (machine.conclusion.writing and sender in conclude.members) * 4 * self.numel  # type: ignore[union-attr]
            case g.Mean():
                return (conclude is not None and sender == conclude.writer) * 4 * self.numel
            case _:
                return 0

    def close(self) -> None:
        """Let go of the shared memory."""
        self._made.clear()
        self._lender.close()


def _key_of(event: g.GossipEvent) -> Key:
    """Return under what the payload that comes with an answer is asked for."""
    match event:
        case g.Offered(round=number):
            return "Model", number, ""
        case g.Captured(round=number, worker=worker):
            return "State", number, worker
        case g.Submitted(attempt=attempt):
            return "Final", attempt, ""
        case g.Averaged(attempt=attempt):
            return "Mean", attempt, ""
        case _:
            raise AssertionError(f"{type(event).__name__} has no payload")
