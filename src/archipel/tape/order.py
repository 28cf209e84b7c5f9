"""All tapes of a run as one sequence that respects happens-before (appendix E: clocks on FIFO channels).

A record comes after the one before it on its own tape; a `Received` after the record that sent the message;
and, where tapes carry clocks, after the record at which the other worker reached the component that became
known. Among the records that may come next the earliest `t` is taken, then the first worker name: same tapes,
same order, however much the hosts' clocks differ.

Messages carry no number, so a received one is matched with the first equal one sent on its channel that is
later than the last match there: channels are first in, first out, and what a cut channel lost is skipped.
Payloads travel apart from what is small, and those of two fragments may overtake each other: between two
workers there is one channel for messages without a payload and one for each fragment, of peers one for each
kind of payload. A message that no tape sent (its tape is missing or torn) waits only until nothing else may
come.

A syncer that is started again writes another tape, and nothing of it comes before the end of the one before:
one run has one syncer at a time. Of a learner's name two processes may overlap, while one is turned away.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from ..errors import TapeError
from ..protocol.gossip import RENDEZVOUS, Final, Mean, Model, State
from ..protocol.messages import SYNCER, Message, Push, Received, Send, StepCompleted, Tally, Update
from .record import Record, encode
from .tape import TapeFile, read, workers

SMALL = -1  # the channel of messages without a payload
GOSSIP: dict[type[Message], int] = {
    Model: -2,
    State: -3,
    Final: -4,
    Mean: -5,
}  # and those of a peer's payloads


class Ordered(NamedTuple):
    """A record in its place. `last`: nothing follows it on its tape."""

    worker: str
    record: Record
    incarnation: str
    last: bool


class _Link(NamedTuple):
    """A message between a worker and this lane: the other's name, the channel, the message's hash."""

    worker: str
    channel: int
    message: int


class _Item(NamedTuple):
    record: Record
    cause: _Link | None
    sends: tuple[_Link, ...]


@dataclass(eq=False)
class _Lane:
    """One tape: what was read of it and not yet given out, and what it has sent so far."""

    tape: TapeFile
    records: Iterator[Record]
    before: "_Lane | None" = None  # the tape of the same syncer's process before
    ahead: deque[_Item] = field(default_factory=deque)
    sends_ahead: Counter[_Link] = field(default_factory=Counter)
    sent: dict[_Link, deque[int]] = field(default_factory=dict)  # given out and not yet received
    sent_count: int = 0
    matched: dict[tuple[int, int], int] = field(default_factory=dict)  # (sender, channel) -> the last match

    @property
    def worker(self) -> str:
        """Whose tape it is."""
        return self.tape.worker

    def load(self) -> bool:
        """Read one record more; return False at the end."""
        record = next(self.records, None)
        if record is None:
            return False
        event = record.event
        cause = _link(event.sender, event.message) if isinstance(event, Received) else None
        sends = tuple(_link(a.to, a.message) for a in record.actions if isinstance(a, Send))
        self.ahead.append(_Item(record, cause, sends))
        self.sends_ahead.update(sends)
        return True

    def will_send(self, link: _Link) -> bool:
        """Return whether the tape still has this message to send, reading on as far as it takes."""
        while not self.sends_ahead[link] and self.load():
            pass
        return self.sends_ahead[link] > 0


def _link(worker: str, message: Message) -> _Link:
    channel = GOSSIP.get(type(message), SMALL)
    if isinstance(message, Push | Update):
        channel = message.fragment
    return _Link(worker, channel, xxhash.xxh3_64_intdigest(encode(message)))


def _own_component(worker: str, record: Record) -> int:
    """Return what the record makes of its worker's own clock component, -1 if it leaves it.

    A host says it outright or, as one that counts steps and ticks does, by what happened.
    """
    ticks = [action.tick for action in record.actions if isinstance(action, Tally)]
    steps = [record.event.step] if isinstance(record.event, StepCompleted) else []
    return max([*ticks, *steps, (record.clock or {}).get(worker, -1)])


class _Merger:
    def __init__(self, lanes: list[_Lane]) -> None:
        self.lanes = lanes
        self.names = {lane.worker for lane in lanes}
        self.reached: dict[str, int] = {}  # own clock component of each worker, as given out so far

    def __iter__(self) -> Iterator[Ordered]:
        for lane in self.lanes:
            lane.load()
        while heads := [
            lane for lane in self.lanes if lane.ahead and not (lane.before and lane.before.ahead)
        ]:
            heads.sort(key=lambda lane: (lane.ahead[0].record.t, lane.worker))  # stable: then by start
            lane = next((lane for lane in heads if self._may_come(lane)), None) or self._unblocked(heads)
            record = self._give_out(lane)
            if not lane.ahead:
                lane.load()
            yield Ordered(lane.worker, record, lane.tape.incarnation, not lane.ahead)

    def _may_come(self, lane: _Lane) -> bool:
        return self._message_given(lane) and self._clocks_reached(lane)

    def _message_given(self, lane: _Lane) -> bool:
        cause = lane.ahead[0].cause
        senders = [other for other in self.lanes if cause and other.worker == cause.worker]
        return not senders or any(self._match(lane, sender) >= 0 for sender in senders)

    def _match(self, lane: _Lane, sender: _Lane) -> int:
        """Return the place on the sender's tape of the message the lane's next record received, or -1."""
        cause = lane.ahead[0].cause
        assert cause is not None
        last = lane.matched.get((id(sender), cause.channel), -1)
        places = sender.sent.get(cause._replace(worker=lane.worker), ())
        return next((place for place in places if place > last), -1)

    def _clocks_reached(self, lane: _Lane) -> bool:
        news = lane.ahead[0].record.clock or {}
        others = self.names - {lane.worker}
        return all(self.reached.get(worker, -1) >= step for worker, step in news.items() if worker in others)

    def _unblocked(self, heads: list[_Lane]) -> _Lane:
        """Choose where every next record waits: first for a message no tape sends, then for a clock alone."""
        for lane in heads:
            cause = lane.ahead[0].cause
            if cause and not self._message_given(lane):
                link = cause._replace(worker=lane.worker)
                if not any(other.will_send(link) for other in self.lanes if other.worker == cause.worker):
                    return lane
        for lane in heads:
            if self._message_given(lane):
                return lane
        places = ", ".join(f"{lane.worker} i={lane.ahead[0].record.i}" for lane in heads)
        raise TapeError(
            f"no order of the tapes puts every send before its receipt; all of these wait for each other: "
            f"{places}; the tapes are not of one run"
        )

    def _give_out(self, lane: _Lane) -> Record:
        item = lane.ahead[0]
        if item.cause:
            self._settle(lane, item.cause)
        lane.ahead.popleft()
        lane.sends_ahead.subtract(item.sends)
        for link in item.sends:
            if not lane.sends_ahead[link]:
                del lane.sends_ahead[link]
            lane.sent.setdefault(link, deque()).append(lane.sent_count)
            lane.sent_count += 1
        own = _own_component(lane.worker, item.record)
        self.reached[lane.worker] = max(own, self.reached.get(lane.worker, own))
        return item.record

    def _settle(self, lane: _Lane, cause: _Link) -> None:
        """Take the matched message off its channel."""
        for sender in self.lanes:
            place = self._match(lane, sender) if sender.worker == cause.worker else -1
            if place >= 0:
                lane.matched[id(sender), cause.channel] = place
                link = cause._replace(worker=lane.worker)
                sender.sent[link].remove(place)
                if not sender.sent[link]:
                    del sender.sent[link]
                return


def ordered(run_dir: str | Path) -> Iterator[Ordered]:
    """Yield the records of all tapes of a run, causes before effects.

    Memory: what is in flight, except that a message no tape sent makes the rest of its sender's tape be read
    ahead. Raises TapeError for damaged tapes and for tapes that contradict each other.
    """
    lanes: list[_Lane] = []
    for tape in workers(run_dir):
        alone = tape.worker in (SYNCER, RENDEZVOUS)
        before = [lane for lane in lanes if alone and lane.worker == tape.worker]
        lanes.append(_Lane(tape, iter(read(tape.path)), before[-1] if before else None))
    return iter(_Merger(lanes))


def merge(run_dir: str | Path) -> Iterator[tuple[str, Record]]:
    """Yield (worker, record) in that order."""
    return ((item.worker, item.record) for item in ordered(run_dir))
