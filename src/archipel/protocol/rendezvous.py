"""The rendezvous of a gossip run: who is a member since which round; no weights, no part in any exchange.

    gathering ─(all planned peers ready, or start_s_max)─▶ running ─(all live peers at the end)─▶ concluding
        ─▶ finished, when the mean is made and all have left

Peers enrol, clone a state if the run is under way, say that they are ready, and from then on report each
settled round. Every change of membership makes a new epoch with a view that holds from a round nobody has
begun, so that peers change over together; where they do not, their handshakes differ and cost a round. The
rendezvous may die: peers go on with the view they have, and enrol again when it is back.

Invariants: epochs grow; a view is sorted by name; a peer is in the view only while its state is whole; every
token has one fate (GOSSIP_FATES), summed over incarnations.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from . import gossip as g
from . import messages as m
from .enrolled import Consensus, Entry, RendezvousState
from .ledger import Ledger
from .membership import COUNT_MAX, choose_shard, hand_over

LEAVE_S_MAX = 10.0  # for peers to say goodbye once they were told that the run is over
STUCK_ROUNDS = 4  # a peer that takes so many times the longest round, while others are at the end, is stuck
STUCK_STARTS = 10.0  # times start_s_max, of which no round is known yet
SAVE_REPORTS = 64  # reports between two checkpoints of the rendezvous


@dataclass
class RendezvousMachine:
    """One rendezvous. `shards`: into how many parts the data is cut."""

    run: str
    options: g.GossipOptions
    settings: dict[str, Any]
    shards: int
    state: str = "gathering"
    epoch: int = 0
    schema: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)
    early: dict[str, g.Enrol] = field(default_factory=dict)  # new peers that came before those of the run
    back_until: float = -1.0  # for peers of the run to come back to a rendezvous that was restored
    whole_until: float = -math.inf  # for a peer with a state to come back, when none is connected
    taken: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    bases: dict[str, int] = field(default_factory=dict)  # of entries, where they are not 0
    ledger: Ledger = field(default_factory=lambda: Ledger(1, kind="gossip"))
    view: g.View | None = None
    consensus: Consensus = field(default_factory=Consensus)
    concluding: g.Conclude | None = None
    concluded: g.Concluded | None = None
    writer: str = ""  # who made the mean, and gives it to the others
    first_ready_at: float | None = None
    over_at: float | None = None
    stopping: str = ""
    reports: int = 0
    attempts: int = 0
    closed_round: int = -1

    def snapshot(self) -> RendezvousState:
        """Return what a checkpoint holds."""
        return RendezvousState(
            self.epoch,
            self.taken,
            self.positions,
            self.ledger,
            self.schema,
            self.concluded,
            self.attempts,
            {name: base for name, base in self.bases.items() if base},
        )

    def restore(self, state: RendezvousState) -> None:
        """Go on from a checkpoint; call it before any event.

        Peers that are under way say so as they enrol. A group that comes back from checkpoints gathers first,
        so that none of them runs ahead alone.
        """
        self.epoch, self.taken, self.positions = state.epoch, state.taken, state.positions
        self.ledger, self.schema, self.concluded = state.ledger, state.schema, state.concluded
        self.attempts, self.bases = state.attempts, dict(state.bases)

    def handle(self, now: float, event: m.Event) -> list[m.Action]:
        """Return what to do about the event. Nothing happens any more once the machine has finished."""
        if self.state == "finished":
            return []
        if self.epoch > 0 and not self.entries and self.back_until < 0:  # restored, and just begun
            self.back_until = now + self.options.start_s_max
        return [*self._react(now, event), *self._admit_early(now), *self._over(now)]

    def _react(self, now: float, event: m.Event) -> list[m.Action]:
        match event:
            case m.Received(sender=sender, message=message):
                return self._receive(now, sender, message)
            case m.Disconnected(worker=worker):
                return self._lost(now, worker)
            case m.Woke():
                return self._woke(now)
            case m.StopRequested(reason=reason):
                return self._stop(now, reason)
            case _:
                return []

    def _receive(self, now: float, sender: str, message: m.Message) -> list[m.Action]:
        if isinstance(message, g.Enrol):
            return self._enrol(now, sender, message)
        entry = self.entries.get(sender)
        if entry is None or entry.left:
            return []
        match message:
            case g.Ready():
                return self._ready(now, entry, message)
            case g.Report():
                return self._report(now, entry, message)
            case g.AtEnd(round=number, tokens=tokens):
                entry.round, entry.at_end, entry.settled_at = number, True, now
                self._count(entry, tokens)
                if self.concluding is not None and self.concluding.writer == sender:
                    return [m.Send(sender, self.concluding)]  # said before, over a channel that broke
                return [*self._conclude(now), *self._alarm(now)]
            case g.Concluded():
                return self._made(now, sender, message)
            case m.Leave(tokens=tokens):
                return self._left(now, entry, tokens)
            case _:
                return []

    # ---- members ----

    def _enrol(self, now: float, name: str, enrol: g.Enrol) -> list[m.Action]:
        if refusal := self._refusal(enrol):
            return self._refuse(name, refusal)
        if self.concluded is not None or self.stopping:
            return [m.Send(name, m.Done(0, self.stopping or "the run is over"))]
        if self._too_early(now, enrol):
            self.early[name] = enrol
            text = f"waits peer={name}: it has no state, and of those that have one none is ready yet"
            return [m.Notice(text), *self._alarm(now)]
        shard = choose_shard(name, enrol.shard, self.taken, self.shards, self._away(now))
        if shard is None:
            return self._refuse(
                name, f"all data.shards={self.shards} are in use by live peers: raise data.shards"
            )
        known = self.entries.get(name)
        again = known is not None and known.incarnation == enrol.incarnation and not known.left
        actions: list[m.Action] = []
        if again and known is not None:
            known.connected, entry = True, known
            entry.address = enrol.address
        else:
            was_paired = known is not None and known.paired
            entry = self.entries[name] = self._open(now, name, shard, enrol)
            actions = self._without(now, entry) if was_paired else []
        entry.round, entry.kept = max(entry.round, enrol.round), enrol.kept
        self._count(entry, enrol.tokens)
        if enrol.round > 0 and not enrol.kept and self.state == "gathering":
            self.state = "running"  # we are new, the run is not
        donor = self._donor(entry, enrol)
        entry.donor = donor.name if donor else ""
        actions += self._anew(entry, enrol)
        admitted = g.Admitted(
            run=self.run,
            settings=self.settings,
            shard=shard,
            position=entry.start + entry.tokens,
            donor=entry.donor,
            donor_address=donor.address if donor else "",
        )
        notice = m.Notice(f"enrolled peer={name} shard={shard} donor={admitted.donor!r}")
        guest = [m.Send(donor.name, g.Guest(name, enrol.address))] if donor else []
        actions += [notice, *guest, m.Send(name, admitted)]
        if enrol.round >= 0 and not enrol.kept and enrol.schema and not entry.ready:
            actions += self._ready(now, entry, g.Ready(enrol.round, enrol.schema))
        elif again and self.view is not None:
            actions.append(m.Send(name, self.view))
        return actions

    def _too_early(self, now: float, enrol: g.Enrol) -> bool:
        """Whether a peer that has no state would begin a run anew that is under way elsewhere."""
        live = [entry for entry in self.entries.values() if entry.live]
        if self.state == "gathering":
            coming = now < self.back_until or any(entry.kept for entry in live)
            return enrol.round < 0 and coming and not any(entry.ready for entry in live)
        if enrol.round >= 0 and not enrol.kept:
            return False  # it has one
        coming = now < max(self.whole_until, self.back_until) or any(entry.ready for entry in live)
        return coming and not any(entry.ready and entry.connected for entry in live)

    def _anew(self, entry: Entry, enrol: g.Enrol) -> list[m.Action]:
        """Say it when a run that is under way goes on with weights that are none of its own."""
        if self.state == "gathering" or enrol.round >= 0 or entry.donor:
            return []
        text = (
            f"no peer with a state has come back: the run goes on with the first weights of {entry.name}; "
            "with gossip.checkpoint_rounds and --resume a group that died comes back as it was"
        )
        return [m.Notice(text, "warning")]

    def _admit_early(self, now: float) -> list[m.Action]:
        admitted = [name for name, enrol in self.early.items() if not self._too_early(now, enrol)]
        return [act for name in admitted for act in self._enrol(now, name, self.early.pop(name))]

    def _refusal(self, enrol: g.Enrol) -> str:
        if enrol.protocol != m.PROTOCOL_VERSION:
            return (
                f"protocol version {enrol.protocol}, the run speaks {m.PROTOCOL_VERSION}: "
                "install the same archipel release on both sides"
            )
        if enrol.run and enrol.run != self.run:
            return (
                f"run {enrol.run!r}, this rendezvous serves {self.run!r}: check the address or the run's name"
            )
        if not all(0 <= number < COUNT_MAX for number in (enrol.round + 1, enrol.tokens, enrol.position + 1)):
            return f"impossible counts round={enrol.round} tokens={enrol.tokens}: restart the peer"
        return self._other_model(enrol.schema) if enrol.schema else ""

    def _other_model(self, schema: str) -> str:
        if not self.schema or schema == self.schema:
            return ""
        return f"the model differs (digest {schema}, the run's {self.schema}): build the run's model"

    def _refuse(self, name: str, reason: str) -> list[m.Action]:
        notice = m.Notice(f"refused peer={name} reason={reason!r}", "warning")
        return [notice, m.Send(name, m.Refused(reason, final=True))]

    def _away(self, now: float) -> list[str]:
        """Return whose shards may go to a newcomer when none is free, the one gone longest first."""
        if self._awaits(now):
            return []
        gone = [n for n in self.taken if (entry := self.entries.get(n)) is None or entry.left]
        lost_at = {name: entry.lost_at for name, entry in self.entries.items()}
        return sorted(gone, key=lambda name: lost_at.get(name, -math.inf))

    def _open(self, now: float, name: str, shard: int, enrol: g.Enrol) -> Entry:
        """Give the incarnation its account, or go on with the one it has."""
        former = hand_over(name, shard, self.taken, self.positions)
        new = bool(former) or (self.epoch == 0 and name not in self.positions and enrol.round < 0)
        known, before = self.positions.get(name, 0), self.entries.get(name)
        account = self.ledger.accounts.get(name)
        entry = Entry(name, enrol.incarnation, enrol.address, known, settled_at=now)
        if account is not None and account.incarnation == enrol.incarnation:
            if account.open:  # we were away
                entry.base = self.bases.get(name, 0)
                entry.tokens = entry.base + account.current
            else:  # it was, and was given up
                same = before is not None and before.incarnation == enrol.incarnation
                entry.tokens = entry.base = before.tokens if same and before is not None else enrol.tokens
                self.ledger.begin(name, enrol.incarnation)
                self.ledger.tail(name, 0)
            self.bases[name] = entry.base
            entry.start = known - entry.tokens
            return entry
        self.bases.pop(name, None)
        # A journal of an older run says nothing of this one, nor does one from before another had the shard.
        drawn = enrol.position if enrol.shard == shard and not new else -1
        self.ledger.begin(name, enrol.incarnation)
        if drawn > known:
            self.ledger.tail(name, drawn - known)
        entry.start = self.positions[name] = max(known, drawn)
        return entry

    def _count(self, entry: Entry, tokens: int) -> None:
        if 0 <= tokens < COUNT_MAX and tokens > entry.tokens:
            self.positions[entry.name] += tokens - entry.tokens
            entry.tokens = tokens
            self.ledger.reported(entry.name, tokens - entry.base)

    def _donor(self, entry: Entry, enrol: g.Enrol) -> Entry | None:
        """Return whose state the peer must clone; None if its own will do."""
        if enrol.round >= 0 and not enrol.kept:
            return None
        others = [other for other in self.entries.values() if other.live and other is not entry]
        whole = [other for other in others if other.ready and other.connected]
        if whole:
            best = max(whole, key=lambda other: (other.round, other.name))
            stale = self.state != "gathering" or enrol.round < best.round
            return best if stale else None
        if enrol.round >= 0 and self.state == "gathering":
            return None
        # One that waits for another's state has none to give.
        roots = (other for other in others if other.connected and not other.kept and not other.donor)
        return next(roots, None)

    def _ready(self, now: float, entry: Entry, ready: g.Ready) -> list[m.Action]:
        if refusal := self._other_model(ready.schema):
            entry.left = True
            return self._refuse(entry.name, refusal)
        self.schema = self.schema or ready.schema
        entry.round = max(entry.round, ready.round)
        if self.state == "concluding":
            entry.waiting = True
            return []
        entry.ready, entry.settled_at = True, now
        if self.state != "gathering":
            return [*self._change(now), *self._alarm(now)]
        if sum(other.paired for other in self.entries.values()) >= self.options.peers:
            return self._start(now)
        if self.first_ready_at is None:
            self.first_ready_at = now
        return self._start_if_due(now)

    def _start_if_due(self, now: float) -> list[m.Action]:
        """Begin without planned peers that have not come in time."""
        due = self.state == "gathering" and now >= self._start_at()
        return [*(self._start(now) if due else []), *self._alarm(now)]

    def _start_at(self) -> float:
        return math.inf if self.first_ready_at is None else self.first_ready_at + self.options.start_s_max

    def _start(self, now: float) -> list[m.Action]:
        self.state = "running"
        return self._change(now, first=True)

    def _awaits(self, now: float) -> bool:
        """Whether members of before our restart may still enrol: nothing is decided without them."""
        here = self.entries
        return now < self.back_until and any(
            account.open and name not in here for name, account in self.ledger.accounts.items()
        )

    def _change(self, now: float, *, first: bool = False) -> list[m.Action]:
        """Make a new epoch; return the word to all members."""
        if self.state != "running" or self._awaits(now):
            return []
        members = sorted((entry for entry in self.entries.values() if entry.paired), key=lambda e: e.name)
        if not members:
            return []
        self.epoch += 1
        newest = max(entry.round for entry in members)
        # A peer at `newest` may have begun the round after it by the time it hears of this.
        begins = newest if first or len(members) == 1 else newest + 2
        addresses = tuple(g.Address(entry.name, entry.address) for entry in members)
        self.view = g.View(self.epoch, begins, addresses)
        names = ",".join(entry.name for entry in members)
        notice = m.Notice(f"epoch={self.epoch} round={begins} peers={names}")
        return [notice, *(m.Send(entry.name, self.view) for entry in members), m.Save(newest)]

    def _lost(self, now: float, worker: str) -> list[m.Action]:
        self.early.pop(worker, None)
        entry = self.entries.get(worker)
        if entry is None or entry.left:
            return []
        entry.connected, entry.lost_at = False, now
        if entry.ready:
            self.whole_until = now + self.options.start_s_max
        return self._alarm(now)

    def _left(self, now: float, entry: Entry, tokens: int) -> list[m.Action]:
        self._count(entry, tokens)
        entry.left = True
        self.ledger.left(entry.name, entry.tokens - entry.base, [])
        return [m.Notice(f"left peer={entry.name}"), *self._without(now, entry)]

    def _without(self, now: float, entry: Entry) -> list[m.Action]:
        """Return what a member's end calls for."""
        if self.concluded is not None:
            return []
        if self.concluding is not None and entry.name not in self.concluding.members:
            return []
        if self.concluding is not None:
            self.concluding, self.state = None, "running"
            for other in self.entries.values():
                other.ready = other.ready or other.waiting
        return [*self._change(now), *self._conclude(now)]

    # ---- rounds ----

    def _report(self, now: float, entry: Entry, report: g.Report) -> list[m.Action]:
        if not 0 <= report.round < COUNT_MAX:
            return []
        if report.fate != "late":
            self._count(entry, report.tokens)
        total = entry.tokens - entry.base
        self.ledger.settle_round(entry.name, report.round, total, report.fate, entry.skipped)
        if report.fate == "late":
            return []
        entry.round_s, entry.settled_at = now - entry.settled_at, now
        entry.round = max(entry.round, report.round + 1)
        self.consensus.take(report, sum(other.paired for other in self.entries.values()))
        self.reports += 1
        saved = [m.Save(report.round)] if self.reports % SAVE_REPORTS == 0 else []
        return [*self._close_rounds(), *saved]

    def _close_rounds(self) -> list[m.Action]:
        slowest = min((e.round for e in self.entries.values() if e.paired), default=0) - 1
        if slowest <= self.closed_round:
            return []
        self.closed_round = slowest
        error = self.consensus.close(slowest)
        if error is None or self.consensus.rising < self.options.alarm_rounds:
            return []
        rising, self.consensus.rising = self.consensus.rising, 0
        text = (
            f"consensus error {error:.4f} of the model's norm has risen for {rising} rounds: the peers drift "
            f"apart; lower gossip.outer_momentum={self.options.momentum} or gossip.alpha={self.options.alpha}"
        )
        return [m.Notice(text, "warning")]

    # ---- the end ----

    def _conclude(self, now: float) -> list[m.Action]:
        """Name a writer once every live member is at the end."""
        if self._awaits(now):
            return []
        members = sorted(entry.name for entry in self.entries.values() if entry.paired)
        ended = [name for name in members if self.entries[name].at_end]
        if not members or ended != members or self.concluded is not None or self.concluding is not None:
            return []
        self.state, self.attempts = "concluding", self.attempts + 1
        self.concluding = g.Conclude(members[0], tuple(members), self.attempts)
        return [m.Send(members[0], self.concluding), m.Save(self.options.rounds)]

    def _made(self, now: float, writer: str, concluded: g.Concluded) -> list[m.Action]:
        """The mean is made. The first one said is the run's; one made for an older attempt is a mean too."""
        got = m.Send(writer, g.Got(self.options.rounds))
        if self.concluded is not None:
            return [got]
        self.concluded, self.writer = concluded, writer
        members = self.concluding.members if self.concluding is not None else (writer,)
        rest = [name for name, entry in self.entries.items() if entry.live and name not in members]
        done = [m.Send(name, m.Done(0, "the run is over")) for name in rest]
        return [m.Save(self.options.rounds), got, *done, *self._alarm(now)]

    def _stuck(self, now: float) -> list[Entry]:
        """Return who has not got on for several rounds' time, while others wait at the end."""
        paired = [entry for entry in self.entries.values() if entry.paired]
        if self.state != "running" or not any(entry.at_end for entry in paired):
            return []
        return [entry for entry in paired if not entry.at_end and now >= self._patient_until(entry)]

    def _patient_until(self, entry: Entry) -> float:
        paired = [other for other in self.entries.values() if other.paired]
        waiting_since = min((other.settled_at for other in paired if other.at_end), default=math.inf)
        usual_s = STUCK_ROUNDS * max(other.round_s for other in paired)
        least_s = self.options.start_s_max * (1.0 if entry.round_s else STUCK_STARTS)
        return max(waiting_since, entry.settled_at) + max(least_s, usual_s)

    def _stop(self, now: float, reason: str) -> list[m.Action]:
        self.stopping, self.over_at = reason or "stopped", now + LEAVE_S_MAX
        live = [entry.name for entry in self.entries.values() if entry.live]
        return [*(m.Send(name, m.Done(0, self.stopping)) for name in live), *self._alarm(now)]

    def _woke(self, now: float) -> list[m.Action]:
        actions: list[m.Action] = []
        for entry in self.entries.values():
            if entry.live and not entry.connected and now >= entry.lost_at + self.options.lease_s:
                entry.left = entry.lost = True
                self.ledger.lose(entry.name)
                actions += [m.Notice(f"lost peer={entry.name}", "warning"), *self._without(now, entry)]
        for entry in self._stuck(now):
            entry.left = True
            self.ledger.lose(entry.name)
            stuck = f"connected, but stuck in round={entry.round}, others at the end: restart it"
            text = f"gave up peer={entry.name}: {stuck}"
            actions += [m.Notice(text, "warning"), *self._without(now, entry)]
        if 0 <= self.back_until <= now and self.state == "running" and not self.concluded:
            self.back_until = -math.inf  # who is not back is gone
            actions += [*self._change(now), *self._conclude(now)]
        return [*actions, *self._start_if_due(now)]

    def _alarm(self, now: float) -> list[m.Action]:
        """Set the one alarm to the next moment at which time alone changes something."""
        lease_s, entries = self.options.lease_s, self.entries.values()
        moments = [entry.lost_at + lease_s for entry in entries if entry.live and not entry.connected]
        if self.over_at is not None:
            moments.append(self.over_at)
        if self.state == "gathering":
            moments.append(self._start_at())
        if self.early or self._awaits(now):
            moments += [self.back_until, self.whole_until if self.early else math.inf]
        if self.state == "running" and any(entry.paired and entry.at_end for entry in entries):
            moments += [self._patient_until(e) for e in entries if e.paired and not e.at_end]
        later = [at for at in moments if now < at < math.inf]
        return [m.Wake(min(later))] if later else []

    def _over(self, now: float) -> list[m.Action]:
        if self.over_at is None and self.concluded is not None:
            writer = self.entries.get(self.writer)
            if writer is not None and writer.live:
                return []  # it gives the mean to the others, and leaves when they have it
            self.over_at = now + LEAVE_S_MAX
            live = [name for name, entry in self.entries.items() if entry.live]
            return [*(m.Send(name, m.Done(0, "the run is over")) for name in live), *self._alarm(now)]
        if self.over_at is None:
            return []
        present = [entry.name for entry in self.entries.values() if entry.live]
        recent_s = self.options.lease_s + max(self.options.start_s_max, LEAVE_S_MAX)
        missed = any(one.lost and now < one.lost_at + recent_s for one in self.entries.values())
        if (present or missed) and now < self.over_at:
            return []  # one that was lost a moment ago may be back, and does not know that the run is over
        self.ledger.end(present)
        self.state = "finished"
        complete = self.concluded is not None
        return [m.Save(self.options.rounds), m.Finish(self.stopping or "the run is over", complete)]
