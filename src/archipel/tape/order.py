"""All tapes of a run as one sequence that respects happens-before (appendix E: clocks on FIFO channels).

A record comes after the one before it on its own tape; a `Received` after the record that sent the message;
and, where tapes carry clocks, after the record at which the other worker reached the component that became
known. Among the records that may come next the earliest `t` is taken, then the first worker name: same tapes,
same order, however much the hosts' clocks differ.

Messages carry no number, so a received one is matched with the first equal one sent on its channel that is
later than the last match there: channels are first in, first out, and what a cut channel lost is skipped. A
message that no tape sent (its tape is missing or torn) waits only until nothing else may come.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from ..errors import TapeError
from ..protocol.messages import Message, Received, Send
from .record import Record, encode
from .tape import read, workers


class _Link(NamedTuple):
    """A message between a worker and this lane: the other worker's name and the message's hash."""

    worker: str
    message: int


class _Item(NamedTuple):
    record: Record
    cause: _Link | None
    sends: tuple[_Link, ...]


@dataclass(eq=False)
class _Lane:
    """One tape: what was read of it and not yet given out, and what it has sent so far."""

    worker: str
    records: Iterator[Record]
    ahead: deque[_Item] = field(default_factory=deque)
    sends_ahead: Counter[_Link] = field(default_factory=Counter)
    sent: dict[_Link, deque[int]] = field(default_factory=dict)  # given out and not yet received
    sent_count: int = 0
    matched: dict[int, int] = field(default_factory=dict)  # per sending lane, the last match

    def load(self) -> bool:
        """Read one record more; return False at the end."""
        record = next(self.records, None)
        if record is None:
            return False
        event = record.event
        cause = _Link(event.sender, _hash(event.message)) if isinstance(event, Received) else None
        sends = tuple(_Link(a.to, _hash(a.message)) for a in record.actions if isinstance(a, Send))
        self.ahead.append(_Item(record, cause, sends))
        self.sends_ahead.update(sends)
        return True

    def will_send(self, link: _Link) -> bool:
        """Return whether the tape still has this message to send, reading on as far as it takes."""
        while not self.sends_ahead[link] and self.load():
            pass
        return self.sends_ahead[link] > 0


def _hash(message: Message) -> int:
    return xxhash.xxh3_64_intdigest(encode(message))


class _Merger:
    def __init__(self, lanes: list[_Lane]) -> None:
        self.lanes = lanes
        self.names = {lane.worker for lane in lanes}
        self.reached: dict[str, int] = {}  # own clock component of each worker, as given out so far

    def __iter__(self) -> Iterator[tuple[str, Record]]:
        for lane in self.lanes:
            lane.load()
        while heads := [lane for lane in self.lanes if lane.ahead]:
            heads.sort(key=lambda lane: (lane.ahead[0].record.t, lane.worker))  # stable: then by start
            lane = next((lane for lane in heads if self._may_come(lane)), None) or self._unblocked(heads)
            record = self._give_out(lane)
            if not lane.ahead:
                lane.load()
            yield lane.worker, record

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
        last = lane.matched.get(id(sender), -1)
        places = sender.sent.get(_Link(lane.worker, cause.message), ())
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
                link = _Link(lane.worker, cause.message)
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
        own = (item.record.clock or {}).get(lane.worker)
        if own is not None:
            self.reached[lane.worker] = max(own, self.reached.get(lane.worker, own))
        return item.record

    def _settle(self, lane: _Lane, cause: _Link) -> None:
        """Take the matched message off its channel."""
        for sender in self.lanes:
            place = self._match(lane, sender) if sender.worker == cause.worker else -1
            if place >= 0:
                lane.matched[id(sender)] = place
                link = _Link(lane.worker, cause.message)
                sender.sent[link].remove(place)
                if not sender.sent[link]:
                    del sender.sent[link]
                return


def merge(run_dir: str | Path) -> Iterator[tuple[str, Record]]:
    """Yield (worker, record) over all tapes of a run, causes before effects.

    Memory: what is in flight, except that a message no tape sent makes the rest of its sender's tape be read
    ahead. Raises TapeError for damaged tapes and for tapes that contradict each other.
    """
    lanes = [_Lane(file.worker, iter(read(file.path))) for file in workers(run_dir)]
    return iter(_Merger(lanes))
