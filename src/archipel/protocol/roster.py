"""A gossip run whose members stand in a list, with no rendezvous: each peer answers itself for one.

    gathering ─(whose weights it begins with is clear)─▶ whole ─(all are, or start_s_max)─▶ running
        ─(last round settled)─▶ ended ─(the mean is made, or made without us)─▶ over

The view is the list, from the first round on and for ever; whoever is away costs its partners a skipped
round. Members say to each other where they stand, whenever that changes and on every new connection. From
what it has heard, each decides whom to clone, when to begin, and at the end who makes the mean: the first
name among those present.

A list cannot tell a peer that died from one that is cut off. Two groups that do not reach each other each end
with a mean of their own; a rendezvous prevents that.

Invariants: list and settings are the same for all, or there is no exchange; nobody concludes while
a connected member is on its way to the end; no two attempts of one process at a mean have one number.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from . import gossip as g
from . import messages as m
from .topology import view_digest

EPOCH = 1  # of a membership that never changes
LOCAL = (("run", "out"), ("data", "path"), ("data", "cache"), ("data", "batch"), ("optimizer", "accumulate"))


def agreed_digest(names: list[str], settings: dict[str, Any]) -> str:
    """Return 16 hexadecimal digits of the list and of all settings but those a host may choose by itself."""
    plain = {
        section: {key: value for key, value in options.items() if (section, key) not in LOCAL}
        if isinstance(options, dict)
        else options
        for section, options in settings.items()
    }
    text = msgspec.json.encode([view_digest(names), plain], order="deterministic")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


@dataclass
class Away:
    """A member without a connection. `left`: it said goodbye."""

    since: float
    left: bool = False


@dataclass
class Roster:
    """The members of a run, by name, as one of them sees them. `settings`: the run's, the same for all."""

    name: str
    members: tuple[g.Address, ...]
    settings: dict[str, Any]
    phase: g.Phase = "gathering"
    round: int = -1  # of the state we have: a checkpoint's, or where we are
    root: str = ""  # whose weights we begin with
    writer: str = ""  # of the end under way
    digest: str = ""  # of what all must have in common
    strangers: dict[str, None] = field(default_factory=dict)  # connected, of another run, list or settings
    here: dict[str, g.Standing | None] = field(default_factory=dict)  # connected; None: has not spoken yet
    away: dict[str, Away] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)  # newest round a member was heard in
    asked: g.Enrol | None = None  # our peer waits to be admitted
    conclude: g.Conclude | None = None
    made: bool = False  # the mean of this end is there
    over: bool = False  # somebody has said so
    attempts: int = 0
    started_at: float = -1.0
    alarm_at: float = math.inf  # when time alone changes something here
    peer_alarm_at: float = math.inf  # and when at our peer
    rings_at: float = math.inf  # the host's one alarm

    @property
    def options(self) -> g.GossipOptions:
        """The run's."""
        return g.gossip_of(self.settings)

    @property
    def run(self) -> str:
        """The run's name."""
        return str(self.settings.get("run", {}).get("name", ""))

    @property
    def names(self) -> list[str]:
        """All members, sorted."""
        return sorted(one.name for one in self.members)

    @property
    def others(self) -> list[str]:
        """All members but this one."""
        return [name for name in self.names if name != self.name]

    def start(self, now: float) -> list[m.Action]:
        """The process begins: reach everybody."""
        self.started_at, self.digest = now, agreed_digest(self.names, self.settings)
        self.away = {name: Away(now) for name in self.others}
        return [g.Know(tuple(one for one in self.members if one.name != self.name))]

    def drive(
        self, now: float, event: m.Event, react: Callable[[float, m.Event], list[m.Action]]
    ) -> list[m.Action]:
        """Return what our peer, which reacts so, does about an event when it is told what this list says."""
        actions: list[m.Action] = []
        events: deque[m.Event] = deque()
        if self.started_at < 0:
            actions += self.start(now)
            events.append(m.Connected(g.RENDEZVOUS))
        actions += self.hear(now, event)
        if not isinstance(event, m.Woke):
            strange = isinstance(event, m.Received) and event.sender in self.strangers
            events.extend(() if strange else (event,))
        elif now >= self.rings_at:
            self.rings_at = math.inf
            if now >= self.peer_alarm_at:
                self.peer_alarm_at = math.inf
                events.append(event)
        finish: list[m.Action] = []
        looked = False
        while events or not looked:
            looked = False
            for action in react(now, events.popleft()) if events else ():
                match action:
                    case m.Send(to=g.RENDEZVOUS, message=message):
                        said, words = self.told(message)
                        actions += [action, *said]
                        events.extend(m.Received(g.RENDEZVOUS, word) for word in words)
                    case m.Wake(at=at):
                        self.peer_alarm_at = at
                    case m.Finish():
                        finish.append(action)
                    case g.Know():
                        pass  # of a few; all are kept
                    case _:
                        self.made = self.made or isinstance(action, g.Accept)
                        actions.append(action)
            if not events:
                said, words = self.look(now)
                looked = True
                actions += said
                events.extend(m.Received(g.RENDEZVOUS, word) for word in words)
        return [*actions, *self._alarm(), *finish]

    def _alarm(self) -> list[m.Action]:
        at = min(self.alarm_at, self.peer_alarm_at)
        if at in (self.rings_at, math.inf):
            return []
        self.rings_at = at
        return [m.Wake(at)]

    # ---- what happens ----

    def hear(self, now: float, event: m.Event) -> list[m.Action]:
        """Take in what happened to our peer, before it does. Returns what to say to others."""
        match event:
            case m.Connected(worker=worker) if worker in self.others:
                self.here[worker] = None
                self.away.pop(worker, None)
                self.strangers.pop(worker, None)
                return [m.Send(worker, self._standing())]
            case m.Disconnected(worker=worker) if worker in self.here:
                last = self.here.pop(worker)
                self.away[worker] = Away(now, last is not None and last.phase in ("over", "left"))
            case m.Received(sender=sender, message=g.Standing() as standing) if sender in self.here:
                return self._heard(sender, standing)
            case m.Received(sender=sender, message=g.Meet(round=number)):
                self.rounds[sender] = number
            case m.Received(sender=sender, message=g.Conclude() as conclude) if sender == conclude.writer:
                self.conclude = conclude
                return self._say(writer=conclude.writer)
        return []

    def _heard(self, sender: str, standing: g.Standing) -> list[m.Action]:
        ours = (self.run, self.digest)
        if (standing.run, standing.agreed) != ours:
            text = (
                f"{sender} is of run {standing.run!r} with list and settings {standing.agreed}, we of "
                f"{ours[0]!r} with {ours[1]}: no exchange with it; give all members the same file and data"
            )
            self.strangers[sender] = None
            return [m.Notice(text, "warning")]
        self.here[sender] = standing
        self.over = self.over or standing.phase == "over"
        if self.conclude is not None and self._breaks_off(self.conclude, sender, standing):
            self.conclude = None
            return self._say(writer="")
        self.rounds[sender] = max(self.rounds.get(sender, -1), standing.round)
        return []

    def _breaks_off(self, conclude: g.Conclude, sender: str, standing: g.Standing) -> bool:
        """Whether nothing will come of an attempt at the mean: its writer makes none any more, or we do, and
        a member has died on the way, and knows nothing of it."""
        if conclude.writer == sender:
            return standing.writer != sender
        ours = conclude.writer == self.name and not self.made
        return ours and sender in conclude.members and standing.phase == "gathering"

    def told(self, message: m.Message) -> tuple[list[m.Action], list[m.AnyMessage]]:
        """Take what our peer says to the rendezvous. Returns what to say to others, and the answers to it."""
        match message:
            case g.Enrol():
                self.asked = message
                self.phase, self.root = "gathering", ""
                self.round = message.round
                return self._say(), []
            case g.Ready(round=number):
                self.phase, self.round = "whole", number
                return self._say(), []
            case g.AtEnd(round=number):
                self.phase, self.round = "ended", number
                return self._say(), []
            case g.Concluded():
                self.made = True
                return self._say(), [g.Got(self.options.rounds)]
            case m.Leave():
                self.phase = "over" if self.made or self.over else "left"
                return self._say(), []
            case g.Report(round=number, fate=fate) if fate != "late":
                self.round = number + 1
        return [], []

    def look(self, now: float) -> tuple[list[m.Action], list[m.AnyMessage]]:
        """Decide what can be decided by now: what to say to others, and the word to our peer."""
        self.alarm_at = math.inf
        actions: list[m.Action] = []
        words: list[m.AnyMessage] = []
        if self.asked is not None and self.phase == "gathering":
            actions, words = self._admit(now, self.asked)
        elif self.phase == "whole":
            actions, words = self._begin(now)
        elif self.phase == "ended" and not self.made:
            actions, words = self._end(now)
        elif self.phase == "running" and self.over:
            words = self._done()
        return actions, words

    def _done(self) -> list[m.AnyMessage]:
        self.phase, self.asked = "left", None
        return [m.Done(0, "the run is over")]

    # ---- the beginning ----

    def _admit(self, now: float, enrol: g.Enrol) -> tuple[list[m.Action], list[m.AnyMessage]]:
        """Say whose state to start from, once that is clear."""
        if self.over:
            return [], self._done()
        donor = max(self._heard_of("running", "ended"), key=self._newest, default="")
        if not donor and not self._gathered(now):
            return [], []
        if not donor and self.others and not any(self.here.values()) and max(enrol.shard, enrol.round) >= 0:
            return self._wait_for_one(now), []
        self.root = donor or self._common_root()
        self.asked = None
        shard = self.names.index(self.name)
        admitted = g.Admitted(
            run=self.run,
            settings=self.settings,
            shard=shard,
            position=max(enrol.position, 0) if enrol.shard == shard else 0,
            donor="" if self.root == self.name else self.root,
            donor_address=next(one.address for one in self.members if one.name == self.root),
        )
        return self._say(), [admitted]

    def _gathered(self, now: float) -> bool:
        """Whether all are here, or were waited for long enough."""
        return all(self.here.get(name) is not None for name in self.others) or self._waited(now)

    def _wait_for_one(self, now: float) -> list[m.Action]:
        """We were in the run before, and nobody else is there: it is over, or all are coming back."""
        self.alarm_at = min(self.alarm_at, now + self.options.start_s_max)
        text = (
            "nobody of the list is there: waiting; start them, or leave them out of [members] to go on alone"
        )
        return [m.Notice(text, "warning")]

    def _common_root(self) -> str:
        """Return the member whose weights the run begins with: the newest checkpoint, then the first name."""
        heard = {name: standing for name, standing in sorted(self.here.items()) if standing is not None}
        rounds = {name: standing.round for name, standing in heard.items()}
        if whole := {name: rounds[name] for name in self._heard_of("whole")}:
            return min(whole, key=lambda name: (-whole[name], name))
        rounds[self.name] = self.round
        decided = [standing.root for standing in heard.values() if standing.root in rounds]
        return decided[0] if decided else min(rounds, key=lambda name: (-rounds[name], name))

    def _begin(self, now: float) -> tuple[list[m.Action], list[m.AnyMessage]]:
        """Let our peer run, with the others or into their run."""
        under_way = self._heard_of("running", "ended")
        whole = [*under_way, *self._heard_of("whole")]
        if not under_way and len(whole) < len(self.others) and not self._waited(now):
            return [], []
        self.phase = "running"
        begins = max((self._newest(name) for name in under_way), default=0)
        self.round = max(self.round, min(begins, self.options.rounds))
        members = tuple(sorted(self.members, key=lambda one: one.name))
        return [*self._missed(), *self._say()], [g.View(EPOCH, self.round, members)]

    def _missed(self) -> list[m.Action]:
        absent = [name for name in self.others if self.here.get(name) is None]
        if not absent:
            return []
        names = ",".join(absent)
        text = (
            f"begins round={self.round} without {names}: not heard of; a run that is over is not known here"
        )
        return [m.Notice(text, "warning")]

    def _waited(self, now: float) -> bool:
        """Whether the start is as far behind as others are waited for; the alarm rings when it is."""
        patient_until = self.started_at + self.options.start_s_max
        if now < patient_until:
            self.alarm_at = min(self.alarm_at, patient_until)
        return now >= patient_until

    # ---- the end ----

    def _end(self, now: float) -> tuple[list[m.Action], list[m.AnyMessage]]:
        """Conclude, if all who are here are at the end, nobody else does, and we are the first of them."""
        concluding = self.conclude is not None and self._present(self.conclude.writer, now)
        ours = self.conclude is not None and self.conclude.writer == self.name
        if self.over and (not concluding or ours or self._not_a_member()):
            return [], self._done()
        if concluding and not ours:
            return [], []
        if self._awaited(now):
            return [], []
        ended = sorted([self.name, *self._heard_of("ended")])
        others_writers = [s.writer for s in self.here.values() if s is not None and s.writer in self.here]
        if ended[0] != self.name or others_writers:
            return [], []
        if ours and self.conclude is not None and set(self.conclude.members) <= set(ended):
            return [], []
        self.attempts += 1
        number = self.attempts * len(self.names) + self.names.index(self.name)
        self.conclude = g.Conclude(self.name, tuple(ended), number)
        return self._say(writer=self.name), [self.conclude]

    def _awaited(self, now: float) -> bool:
        """Whether somebody may still come to the end with us: connected, or not long enough away."""
        for name in self.others:
            if name in self.strangers:
                continue  # nothing is exchanged with it, the mean neither
            if name in self.here:
                standing = self.here[name]
                if standing is None or standing.phase not in ("ended", "over", "left"):
                    return True
            elif self._present(name, now):
                return True
        return False

    def _present(self, name: str, now: float) -> bool:
        """Whether a member counts: connected, or away for less than the lease, which the alarm then ends."""
        if name == self.name or name in self.here:
            return True
        away = self.away[name]
        if away.left or now >= away.since + self.options.lease_s:
            return False
        self.alarm_at = min(self.alarm_at, away.since + self.options.lease_s)
        return True

    def _not_a_member(self) -> bool:
        return self.conclude is not None and self.name not in self.conclude.members

    # ---- saying ----

    def _heard_of(self, *phases: str) -> list[str]:
        return sorted(
            n for n, standing in self.here.items() if standing is not None and standing.phase in phases
        )

    def _newest(self, name: str) -> int:
        return self.rounds.get(name, -1)

    def _standing(self) -> g.Standing:
        return g.Standing(self.run, self.digest, self.phase, self.round, self.root, self.writer)

    def _say(self, *, writer: str | None = None) -> list[m.Action]:
        """Return the word to all who are connected."""
        self.writer = self.writer if writer is None else writer
        return [m.Send(name, self._standing()) for name in self.here]
