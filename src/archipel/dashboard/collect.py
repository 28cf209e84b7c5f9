"""From the syncer's tape to what people watch: learners, rounds, pauses, tokens.

A `Series` is fed records as they come and keeps what a view needs, in memory that does not grow with the run.
It knows only what is on the tape; the ledger's tokens by fate and a host's byte counts are set from outside,
or read from `key=value` words of notices. Events and actions it does not know are passed over. A worker
counts from the `Welcome` it was sent, so that whoever was refused leaves no trace here.
"""

import math
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from msgspec import Struct

from ..protocol import messages as m
from ..protocol.messages import SYNCER
from ..protocol.syncer import SyncerMachine
from ..tape.record import Header, Record
from ..tape.replay import machine_of

STILL_STEPPING = 3.0  # no step for so many medians: not stepping (specification, section 3)
QUIET_S_MIN = 1.0  # a view that flickers at steps of milliseconds says nothing
RATE_WINDOW_S = 30.0
RECENT = 256  # rounds, notices and step times that are kept for showing
STEP_TIMES = 65_536  # step times that a pause's median is taken from, the newest

_WORD = re.compile(r"""([A-Za-z_][\w.]*)=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\S*)""")


@dataclass
class Learner:
    """What is known of one worker name. Tokens and steps are those of data, not counted once per fragment."""

    name: str
    role: str = "learner"
    state: str = "joining"  # joining | live | left | gone
    incarnation: str = ""
    shard: int = -1
    steps: int = 0  # of this incarnation
    tokens: int = 0  # of this incarnation
    tokens_before: int = 0  # of the incarnations before
    step_s: float | None = None
    stepped_at: float | None = None
    merged: int = 0  # tokens in merged pushes, summed over fragments
    rounds: int = 0  # rounds it took part in
    rounds_before: int = 0  # of those, with incarnations before this one
    last_round: "Round | None" = None
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def tokens_total(self) -> int:
        """Tokens of all incarnations."""
        return self.tokens_before + self.tokens

    @property
    def tokens_per_s(self) -> float | None:
        """Moving average over the newest reports of this incarnation, None before there are two."""
        if len(self.recent) < 2:
            return None
        (since, first), (until, last) = self.recent[0], self.recent[-1]
        return (last - first) / (until - since) if until > since else None


@dataclass
class Round:
    """One merge of one fragment. `weights`, `tokens`: of those whose push was folded, in that order."""

    fragment: int
    tick: int
    started_at: float
    version: int = 0
    merged_at: float = 0.0
    tally: m.Tally | None = None
    weights: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)


class Line(Struct, frozen=True):
    """One line for the people who watch."""

    t: float
    worker: str
    text: str
    level: str = "info"


class Pause(Struct, frozen=True):
    """The longest gap between two closed rounds throughout which at least K learners were live."""

    longest_pause_s: float  # 0 when no gap counts
    at_s: float  # when it began, on the tape's clock
    step_s: float | None  # median step time over all the time in which K were live
    pause_step_s: float | None  # median step time within the longest gap
    rounds: int  # closed in all


class PauseMeter:
    """Measures a `Pause` record by record. A learner is live from its first report after a welcome.

    learners: gaps count from when so many have been live.
    """

    def __init__(self, quorum: int, *, learners: int = 0) -> None:
        self.quorum, self.learners = quorum, learners
        self._seen: set[str] = set()
        self.live: set[str] = set()
        self._members: set[str] = set()
        self._counts = False  # whether the gap that is open has had K live learners so far
        self._since: float | None = None
        self._rounds = 0
        self._longest: tuple[float, float, float | None] = (0.0, 0.0, None)
        self._steps: deque[float] = deque(maxlen=STEP_TIMES)
        self._gap_steps: deque[float] = deque(maxlen=STEP_TIMES)

    def take(self, record: Record) -> None:
        """Take the next record of the syncer's tape. Record 0 starts another tape: no gap reaches across."""
        if record.i == 0:
            self.live.clear()
            self._members.clear()
            self._since = None
        match record.event:
            case m.Received(sender=sender, message=m.Progress(step_s=step_s)) if sender in self._members:
                self._stepped(sender, step_s)
            case m.Received(sender=sender, message=m.Leave()):
                self._lost(sender)
            case m.Disconnected(worker=worker):
                self._lost(worker)
            case m.Merged():
                self._merged(record.t)
            case _:
                pass
        for action in record.actions:
            match action:
                case m.Close(worker=worker):
                    self._lost(worker)
                case m.Send(to=worker, message=m.Welcome()):
                    self._lost(worker)
                    self._members.add(worker)
                case _:
                    pass

    def _stepped(self, worker: str, step_s: float) -> None:
        self.live.add(worker)
        self._seen.add(worker)
        if len(self.live) >= self.quorum:
            self._steps.append(step_s)
            self._gap_steps.append(step_s)

    def _lost(self, worker: str) -> None:
        self.live.discard(worker)
        self._members.discard(worker)
        if len(self.live) < self.quorum:
            self._counts = False

    def _merged(self, now: float) -> None:
        self._rounds += 1
        if self._counts and self._since is not None and now - self._since > self._longest[0]:
            self._longest = now - self._since, self._since, _median(self._gap_steps)
        all_there = len(self._seen) >= self.learners
        self._since, self._counts = now, all_there and len(self.live) >= self.quorum
        self._gap_steps.clear()

    @property
    def result(self) -> Pause:
        """What was measured up to now."""
        pause_s, at_s, pause_step_s = self._longest
        return Pause(pause_s, at_s, _median(self._steps), pause_step_s, self._rounds)


def longest_pause(records: Iterable[Record], quorum: int, *, learners: int = 0) -> Pause:
    """Return the longest pause on a syncer's tape (or on several, one after another) for quorum K.

    learners: only of the time since so many have been live.
    """
    meter = PauseMeter(quorum, learners=learners)
    for record in records:
        meter.take(record)
    return meter.result


def words(text: str) -> tuple[str, dict[str, str]]:
    """Split a notice into what stands before its first `key=value` word, and those words, quotes removed.

    >>> words("gone worker=a reason='no route' tick=7")
    ('gone', {'worker': 'a', 'reason': 'no route', 'tick': '7'})
    """
    found = list(_WORD.finditer(text))
    subject = text[: found[0].start()].strip() if found else text
    return subject, {each[1]: each[2][1:-1] if each[2][:1] in ("'", '"') else each[2] for each in found}


def _median(values: Iterable[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class Series:
    """A run as its syncer's tape tells it. `take` records in order; read the fields whenever you like."""

    def __init__(self, quorum: int = 1) -> None:
        self.meter = PauseMeter(quorum)
        self.now = 0.0  # newest moment heard of
        self.started_at: float | None = None
        self.learners: dict[str, Learner] = {}
        self.tick = 0
        self.fragments = 0
        self.rounds = 0  # closed
        self.abandoned = 0
        self.rejected = 0
        self.kills = 0  # learners whose channel ended without goodbye, unless that very process came back
        self.recent: deque[Round] = deque(maxlen=RECENT)
        self.tally: m.Tally | None = None  # of the newest closed tick
        self.lines: deque[Line] = deque(maxlen=RECENT)
        self.line_count = 0  # all lines there ever were
        self.finished: m.Finish | None = None
        self.ending = False
        self._mirror: SyncerMachine | None = None
        self._fates: dict[str, Any] = {}
        self._push_bytes: list[int] = []
        self._update_bytes: list[int] = []
        self.bytes_sent: int | None = None
        self.bytes_received: int | None = None
        self.val_loss_first: float | None = None
        self.val_loss: float | None = None
        self._asking: m.Join | None = None  # the join that a welcome in the same record answers
        self._flying: dict[int, Round] = {}
        self._pushes: dict[tuple[int, str], m.Push] = {}
        self._folds: dict[tuple[int, str], tuple[float, int]] = {}

    def mirror(self, header: Header) -> None:
        """Keep the syncer's ledger too, by letting its machine decide again; before the tape's first
        record."""
        if header.worker == SYNCER and "machine" in header.settings:
            machine = machine_of(header)
            self._mirror = machine if isinstance(machine, SyncerMachine) else None
            self._push_bytes = header.environment.get("push_bytes", [])
            self._update_bytes = header.environment.get("update_bytes", [])

    @property
    def machine(self) -> SyncerMachine | None:
        """The syncer's machine as of the newest record, where `mirror` was asked for."""
        return self._mirror

    @property
    def fates(self) -> dict[str, Any]:
        """The ledger's table as of the newest record: tokens by fate; empty without a mirror."""
        return self._mirror.ledger.table() if self._mirror is not None else self._fates

    @fates.setter
    def fates(self, table: dict[str, Any]) -> None:
        self._fates = table

    def take(self, record: Record, worker: str = SYNCER) -> None:
        """Take the next record of a worker's tape; of others than the syncer only what they say counts."""
        if worker == SYNCER or self.started_at is None:
            self.now = max(self.now, record.t)
        if worker == SYNCER:
            self.started_at = record.t if self.started_at is None else self.started_at
            if record.i == 0:
                self._restart()
            self.meter.take(record)
            if self._mirror is not None:
                self._mirror.handle(record.t, record.event)
                self._count_bytes(record)
            self._asking = None
            self._event(record.t, record.event)
        elif isinstance(record.event, m.StepCompleted):
            self._own_step(record.t, worker, record.event)
        for action in record.actions:
            if isinstance(action, m.Notice):
                self._notice(record.t, worker, action)
            elif worker == SYNCER:
                self._action(record.t, action)

    def take_all(self, records: Iterable[Record], worker: str = SYNCER) -> None:
        """Take several records of one worker's tape."""
        for record in records:
            self.take(record, worker)

    @property
    def live(self) -> list[Learner]:
        """Learners that are live, stepping or not, in the order they came."""
        return [each for each in self.learners.values() if each.state == "live" and each.role == "learner"]

    @property
    def pause(self) -> Pause:
        """The longest pause so far."""
        return self.meter.result

    def state(self, learner: Learner) -> str:
        """Return joining, live, not stepping, left or gone, as of the newest record."""
        times = [each.step_s for each in self.live if each.step_s is not None]
        if learner.state != "live" or not times or learner.stepped_at is None:
            return learner.state
        patience_s = max(STILL_STEPPING * (_median(times) or 0.0), QUIET_S_MIN)
        return "not stepping" if self.now - learner.stepped_at > patience_s else "live"

    def merged_share(self, learner: Learner) -> float | None:
        """Return the share of its tokens that were merged: by the ledger if there is one, else by pushes."""
        fates = self.fates.get("per_learner", {}).get(learner.name)
        if fates:
            return fates["merged"] / fates["consumed"] if fates["consumed"] else None
        consumed = learner.tokens_total * self.fragments
        return learner.merged / consumed if consumed else None

    def _count_bytes(self, record: Record) -> None:
        """Payload bytes, as their fragments' sizes tell."""
        match record.event:
            case m.Received(message=m.Push(fragment=fragment, full=False)) if fragment < len(
                self._push_bytes
            ):
                self.bytes_received = (self.bytes_received or 0) + self._push_bytes[fragment]
            case _:
                pass
        for action in record.actions:
            match action:
                case m.Send(message=m.Update(fragment=fragment)) if fragment < len(self._update_bytes):
                    self.bytes_sent = (self.bytes_sent or 0) + self._update_bytes[fragment]
                case _:
                    pass

    def _restart(self) -> None:
        """Another syncer process: what was in flight is gone, members must join again."""
        self._flying.clear()
        self._pushes.clear()
        self._folds.clear()
        self.finished, self.ending = None, False
        for learner in self.learners.values():
            learner.state = "joining" if learner.state == "live" else learner.state

    def _event(self, now: float, event: m.Event) -> None:
        match event:
            case m.Received(sender=sender, message=message):
                self._message(now, sender, message)
            case m.Disconnected(worker=worker):
                self._disconnected(worker)
            case m.Folded(fragment=fragment, worker=worker):
                self._folded(fragment, worker)
            case m.Rejected(fragment=fragment, worker=worker):
                self.rejected += 1
                self._folds.pop((fragment, worker), None)
            case m.Merged():
                self._merged(now, event)
            case m.StopRequested():
                self.ending = True
            case _:
                pass

    def _message(self, now: float, sender: str, message: m.Message) -> None:
        match message:
            case m.Join():
                self._asking = message
            case m.Progress() if sender in self.learners:
                self._progress(now, self.learners[sender], message)
            case m.Push() if message.fragment in self._flying:
                self._pushes[message.fragment, sender] = message
            case m.Leave() if sender in self.learners:
                learner = self.learners[sender]
                learner.state, learner.tokens = "left", max(learner.tokens, message.tokens)
            case _:
                pass

    def _join(self, name: str, shard: int) -> None:
        join = self._asking
        if join is None:
            return
        learner = self.learners.setdefault(name, Learner(name))
        same = learner.incarnation == join.incarnation
        if same and learner.state == "gone":
            self.kills -= 1
        if not same and learner.state == "live":
            self._disconnected(name)
        if not same:
            learner.tokens_before += learner.tokens
            learner.rounds_before = learner.rounds
            learner.steps, learner.tokens, learner.step_s = join.step, join.tokens, None
        learner.role, learner.incarnation, learner.shard = join.role, join.incarnation, shard
        learner.state = "joining"
        learner.recent.clear()

    def _progress(self, now: float, learner: Learner, progress: m.Progress) -> None:
        if progress.step <= learner.steps or progress.tokens < learner.tokens:
            return
        learner.state, learner.stepped_at = "live", now
        learner.steps, learner.tokens = progress.step, progress.tokens
        learner.step_s = progress.step_s
        self._rate(now, learner)

    def _rate(self, now: float, learner: Learner) -> None:
        learner.recent.append((now, learner.tokens_total))
        while len(learner.recent) > 2 and now - learner.recent[0][0] > RATE_WINDOW_S:
            learner.recent.popleft()

    def _own_step(self, now: float, name: str, step: m.StepCompleted) -> None:
        """A learner's own tape stands in for reports where no syncer's tape is at hand."""
        if self.started_at is not None:
            return
        learner = self.learners.setdefault(name, Learner(name))
        learner.state, learner.stepped_at = "live", now
        learner.steps, learner.step_s = step.step, step.step_s
        learner.tokens += step.tokens
        self._rate(now, learner)

    def _disconnected(self, name: str) -> None:
        learner = self.learners.get(name)
        if learner is None or learner.state in ("left", "gone"):
            return
        learner.state = "gone"
        if learner.role == "learner" and not self.ending:
            self.kills += 1

    def _folded(self, fragment: int, worker: str) -> None:
        weight, tokens = self._folds.pop((fragment, worker), (0.0, 0))
        flying = self._flying.get(fragment)
        if flying is not None:
            flying.weights[worker], flying.tokens[worker] = weight, tokens

    def _merged(self, now: float, merged: m.Merged) -> None:
        self.rounds += 1
        closed = self._flying.pop(merged.fragment, None) or Round(merged.fragment, self.tick, now)
        closed.version, closed.merged_at = merged.version, now
        self.recent.append(closed)
        for name, tokens in closed.tokens.items():
            learner = self.learners.setdefault(name, Learner(name))
            learner.merged += tokens
            learner.rounds += 1
            learner.last_round = closed

    def _action(self, now: float, action: m.Action) -> None:
        match action:
            case m.Send(to=to, message=m.Pull(fragment=fragment, tick=tick)):
                flying = self._flying.get(fragment)
                if flying is None or flying.tick != tick:
                    tally = self.tally if self.tally and self.tally.tick == tick else None
                    self._flying[fragment] = Round(fragment, tick, now, tally=tally)
            case m.Send(to=to, message=m.Welcome() as welcome):
                self.fragments = len(welcome.versions)
                self._join(to, welcome.shard)
            case m.Close(worker=worker):
                self._disconnected(worker)
            case m.Send(message=m.Done()):
                self.ending = True
            case m.Fold(fragment=fragment, worker=worker, weight=weight):
                push = self._pushes.pop((fragment, worker), None)
                self._folds[fragment, worker] = weight, push.tokens if push else 0
            case m.Discard(fragment=fragment):
                self.abandoned += 1
                self._flying.pop(fragment, None)
            case m.Tally(tick=tick):
                self.tick, self.tally = tick, action
            case m.Finish():
                self.finished, self.ending = action, True
                self._say(Line(now, SYNCER, f"finished reason={action.reason!r} complete={action.complete}"))
            case _:
                pass

    def _notice(self, now: float, worker: str, notice: m.Notice) -> None:
        self._say(Line(now, worker, notice.text, notice.level))
        _, said = words(notice.text)
        loss = _number(said.get("val_loss", ""))
        if loss is not None:
            self.val_loss = loss
            self.val_loss_first = loss if self.val_loss_first is None else self.val_loss_first
        for key in ("bytes_sent", "bytes_received"):
            if worker == SYNCER and said.get(key, "").isdecimal():
                setattr(self, key, int(said[key]))

    def _say(self, line: Line) -> None:
        self.lines.append(line)
        self.line_count += 1
