"""A gossip peer's machine: local steps, an exchange with the round's partners, mixing; no syncer (GASLoC).

    connecting ─▶ preparing ─▶ cloning ─▶ ready ─▶ running ─▶ concluding ─▶ finished
                        └─ own state will do ─┘  ▲    │
                                                 └────┘ a round: steps ─▶ offering ─▶ exchanging ─▶ mixing

At a round's start it says `Meet` to the partners that the topology names for (seed, epoch, round, view); both
must say the same, or both skip. After H_i steps it offers its model, sends it to those whose handshake
matched, waits for theirs up to the timeout, and mixes what is there. A model that comes later is applied in
delta form at the next step boundary, so that the mean over peers stays where it was. A peer that took fewer
steps because its link is slow waits for nobody once its own model has arrived.

Invariants: never more than one round under way; the weights change only by steps, `Mix`, `Correct`, `Adopt`
and `Accept`; nothing is waited for longer than the timeout; a view is used from the round it names.
"""

import hashlib
from dataclasses import dataclass, field, replace

from msgspec import ValidationError

from . import gossip as g
from . import messages as m
from .conclusion import Conclusion
from .exchange import (
    Exchange,
    Identity,
    Others,
    Pace,
    adapted_steps,
    meeting,
    mismatch,
    target_s,
    timeout_s,
)
from .topology import RoundKey, Row, row_of, view_digest

LATE_ROUNDS = 4  # how many rounds late a model may be
CLONE_S_MAX = 60.0  # for a donor to answer before another is asked for


def schema_digest(schema: tuple[m.TensorSpec, ...]) -> str:
    """Return 16 hexadecimal digits that two peers share when their models have the same tensors."""
    state = hashlib.blake2b(digest_size=8)
    for spec in schema:
        state.update(repr((spec.name, spec.shape, spec.kind)).encode())
    return state.hexdigest()


@dataclass
class PeerMachine:
    """One peer. `kept`: the round of the checkpoint its compute port starts from, -1 without one."""

    name: str
    incarnation: str
    run: str = ""
    address: str = ""
    shard: int = -1
    position: int = -1
    kept: int = -1
    role: str = "peer"
    state: str = "connecting"
    phase: str = ""  # of a round: steps, offering, exchanging, mixing
    options: g.GossipOptions = field(default_factory=g.GossipOptions)
    seed: int = 0
    schema: str = ""
    donor: str = ""
    round: int = -1  # -1: no state yet
    step: int = 0
    steps_done: int = 0  # of the round under way
    tokens: int = 0
    views: list[g.View] = field(default_factory=list)
    exchange: Exchange | None = None
    past: dict[int, Exchange] = field(default_factory=dict)
    links: dict[str, bool] = field(default_factory=dict)  # worker -> connected; missing: never was
    early: dict[str, g.Meet] = field(default_factory=dict)
    others: dict[str, Others] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    clones: dict[str, None] = field(default_factory=dict)  # whom we owe a state
    overdue: list[tuple[int, str]] = field(default_factory=list)  # late models to apply after mixing
    pace: Pace = field(default_factory=Pace)
    conclusion: Conclusion = field(default_factory=Conclusion)
    settled: int = 0  # rounds settled by this incarnation
    alarm_at: float = -1.0

    @property
    def schedule_tick(self) -> int:
        """The tick a step's learning rate follows: H a round, whatever this peer's own H_i."""
        full = self.options.local_steps
        own = self.exchange.local_steps if self.exchange is not None else full
        return max(self.round, 0) * full + self.steps_done * full // own

    def handle(self, now: float, event: m.Event) -> list[m.Action]:
        """Return what to do about the event. Nothing happens any more once the machine has finished."""
        return [] if self.state == "finished" else self._react(now, event)

    def _react(self, now: float, event: m.Event) -> list[m.Action]:
        match event:
            case m.StepCompleted():
                return self._step(event)
            case m.Received(sender=sender, message=message):
                return self._receive(now, sender, message)
            case g.Offered():
                return self._offered(now)
            case g.Mixed():
                return self._mixed(now, event)
            case g.Corrected(round=number, worker=worker):
                return [
                    m.Notice(f"late model applied round={number} from={worker}"),
                    *self._report_late(number),
                ]
            case m.Connected(worker=worker):
                return self._connected(worker)
            case m.Disconnected(worker=worker, reason=reason):
                return self._disconnected(now, worker, reason)
            case m.Woke():
                return self._woke(now)
            case m.StopRequested(reason=reason):
                return self._leave(reason, complete=False)
            case _:
                return self._react_rarely(now, event)

    def _react_rarely(self, now: float, event: m.Event) -> list[m.Action]:
        match event:
            case m.Prepared(schema=schema):
                return self._prepared(now, schema)
            case g.Captured(round=number, worker=worker):
                return [m.Send(worker, g.State(number, self._epoch()))]
            case g.Adopted(round=number, reason=reason):
                return self._adopted(number, reason)
            case g.Submitted(attempt=attempt, loss=loss):
                return self.conclusion.submitted(attempt, loss)
            case g.Gathered(attempt=attempt):
                return self.conclusion.gathered(attempt)
            case g.Averaged():
                return self._conclusion(self.conclusion.averaged(event))
            case _:
                return []

    def _receive(self, now: float, sender: str, message: m.Message) -> list[m.Action]:
        match message:
            case g.Meet():
                return self._meet(now, sender, message)
            case g.Model(round=number):
                return self._model(now, sender, number)
            case g.Got(round=number):
                return self._got(now, sender, number)
            case g.Decline():
                return self._declined(now, sender, message)
            case g.View() if sender == g.RENDEZVOUS:
                return self._view(now, message)
            case g.Admitted() if sender == g.RENDEZVOUS:
                return self._admitted(now, message)
            case m.Refused(reason=reason, final=True) if sender == g.RENDEZVOUS:
                self.state = "finished"
                return [m.Finish(reason, complete=False)]
            case m.Done(reason=reason) if sender == g.RENDEZVOUS:
                return [m.Stop(reason)]
            case g.Clone():
                self.clones[sender] = None
                return self._captures() if self.state == "ready" else []
            case g.State(round=number) if sender == self.donor and self.state == "cloning":
                return [g.Adopt(number)]
            case g.Conclude() if self.state == "concluding" and sender in (g.RENDEZVOUS, message.writer):
                return self.conclusion.begin(self.name, message)
            case g.Final():
                return self.conclusion.final(sender, message)
            case g.Mean(digest=digest):
                return self._conclusion(self.conclusion.mean(sender, digest, self.options.rounds))
            case _:
                return []

    # ---- coming in ----

    def _connected(self, worker: str) -> list[m.Action]:
        self.links[worker] = True
        if worker == g.RENDEZVOUS:
            return [self._enrol()]
        if worker == self.donor and self.state == "cloning":
            return [m.Send(worker, g.Clone(self.incarnation))]
        exchange = self.exchange
        if exchange is not None and worker in exchange.partners and worker not in exchange.failed:
            return [self._meeting(exchange, worker)]
        return []

    def _enrol(self) -> m.Action:
        has_state = self.round >= 0
        return m.Send(
            g.RENDEZVOUS,
            g.Enrol(
                run=self.run,
                incarnation=self.incarnation,
                address=self.address,
                round=self.round if has_state else self.kept,
                schema=self.schema,
                tokens=self.tokens,
                shard=self.shard,
                position=self.position,
                kept=not has_state and self.kept >= 0,
            ),
        )

    def _admitted(self, now: float, admitted: g.Admitted) -> list[m.Action]:
        if self.run and admitted.run != self.run:
            self.state = "finished"
            return [m.Finish(f"run {admitted.run!r} is served there, not {self.run!r}", complete=False)]
        self.donor = admitted.donor
        if self.state == "cloning":
            return self._ask_donor(now, admitted)
        if self.state != "connecting":
            return []
        try:
            self.options = g.gossip_of(admitted.settings)
        except (ValidationError, KeyError) as error:
            self.state = "finished"
            return [m.Finish(f"the rendezvous' settings are not a gossip run's: {error}", complete=False)]
        self.state, self.run = "preparing", admitted.run
        self.seed = int(admitted.settings.get("run", {}).get("seed", 0))
        self.shard, self.position = admitted.shard, admitted.position
        know = self._know_donor(admitted)
        return [*know, m.Prepare(admitted.settings, admitted.shard, admitted.position)]

    def _know_donor(self, admitted: g.Admitted) -> list[m.Action]:
        if not admitted.donor:
            return []
        return [g.Know((g.Address(admitted.donor, admitted.donor_address),))]

    def _ask_donor(self, now: float, admitted: g.Admitted) -> list[m.Action]:
        actions = [*self._know_donor(admitted), *self._alarm(now + CLONE_S_MAX)]
        if not admitted.donor:  # everybody else is gone: what we have is all there is
            self.round = max(self.kept, 0)
            return self._ready()
        if self.links.get(self.donor):
            actions.append(m.Send(self.donor, g.Clone(self.incarnation)))
        return actions

    def _prepared(self, now: float, schema: tuple[m.TensorSpec, ...]) -> list[m.Action]:
        self.schema = schema_digest(schema)
        if not self.donor:
            self.round = max(self.kept, 0)
            return self._ready()
        self.state = "cloning"
        ask = m.Send(self.donor, g.Clone(self.incarnation))
        return [*([ask] if self.links.get(self.donor) else []), *self._alarm(now + CLONE_S_MAX)]

    def _adopted(self, number: int, reason: str) -> list[m.Action]:
        if reason:
            self.state = "finished"
            return [m.Finish(f"the state of {self.donor} does not fit this model: {reason}", complete=False)]
        self.round = number
        return self._ready()

    def _ready(self) -> list[m.Action]:
        self.state = "ready"
        return [*self._captures(), m.Send(g.RENDEZVOUS, g.Ready(self.round, self.schema))]

    def _view(self, now: float, view: g.View) -> list[m.Action]:
        if self.views and view.epoch < self.views[-1].epoch:
            self.views.clear()  # a rendezvous that starts anew counts its epochs anew
        self.views.append(view)
        know = g.Know(tuple(one for one in view.members if one.name != self.name))
        if self.state == "ready" and any(one.name == self.name for one in view.members):
            self.state = "running"
            self.round = max(self.round, min(view.round, self.options.rounds))
            return [know, *self._begin(now)]
        return [know]

    # ---- a round ----

    def _current_view(self) -> g.View:
        usable = [view for view in self.views if view.round <= self.round] or self.views[:1]
        self.views = self.views[self.views.index(usable[-1]) :]
        return usable[-1]

    def _epoch(self) -> int:
        return self.exchange.epoch if self.exchange is not None else 0

    def _begin(self, now: float) -> list[m.Action]:
        """Start the round `self.round`, or end."""
        captures = self._captures()
        self.steps_done = 0
        if self.round >= self.options.rounds:
            self.state, self.phase, self.exchange = "concluding", "", None
            return [*captures, m.Send(g.RENDEZVOUS, g.AtEnd(self.round, self.tokens))]
        view = self._current_view()
        names = [one.name for one in view.members]
        key = RoundKey(self.seed, view.epoch, self.round)
        row = Row(self.name, 1.0)
        if self.name in names:
            row = row_of(self.name, self.options.scheme, names, key, alpha=self.options.alpha)
        steps = adapted_steps(self.options, self.pace, target_s(self.options, self._paces()))
        exchange = self.exchange = Exchange(
            self.round, self.settled, view.epoch, view_digest(names), row, now, steps
        )
        self.phase = "steps"
        meets = [self._meeting(exchange, name) for name in exchange.partners if self.links.get(name)]
        for name in [name for name, meet in self.early.items() if meet.round <= self.round]:
            meets += self._meet(now, name, self.early.pop(name))
        return [*captures, *meets, m.Resume()]

    def _paces(self) -> list[tuple[float, float]]:
        """Return (step_s, transfer_s) of this peer and of those in the view whose pace is known."""
        names = {one.name for one in self.views[-1].members} - {self.name} if self.views else set()
        known = [(own.step_s, own.transfer_s) for name, own in sorted(self.others.items()) if name in names]
        return [pace for pace in (*known, (self.pace.step_s, self.pace.transfer_s)) if all(pace)]

    def _meeting(self, exchange: Exchange, partner: str) -> m.Action:
        return m.Send(partner, meeting(exchange, self.identity, partner, self.pace))

    @property
    def identity(self) -> Identity:
        """What both partners of an exchange must have in common."""
        return Identity(self.name, self.run, self.schema, self.options.form)

    def _step(self, event: m.StepCompleted) -> list[m.Action]:
        self.step = event.step
        self.tokens += event.tokens
        self.pace.stepped(event.step_s)
        if self.phase != "steps" or self.exchange is None:
            return []
        self.steps_done += 1
        if self.steps_done < self.exchange.local_steps:
            return []
        self.phase = "offering"
        return [m.Hold(), g.Offer(self.round)]

    def _offered(self, now: float) -> list[m.Action]:
        exchange = self.exchange
        assert exchange is not None
        self.phase, exchange.offered_at = "exchanging", now
        for name in exchange.partners:
            gone = self.links.get(name) is False
            suspect = self.failures.get(name, 0) >= self.options.suspect_rounds
            if name not in exchange.met and (gone or suspect):
                self._fail(exchange, name, "gone" if gone else "suspect")
        return [*self._send_models(now, exchange), *self._settle(now)]

    def _send_models(self, now: float, exchange: Exchange) -> list[m.Action]:
        actions: list[m.Action] = []
        for name in exchange.row.listeners:
            if name in exchange.met and name not in exchange.sent and name not in exchange.failed:
                exchange.sent[name] = now
                actions.append(m.Send(name, g.Model(exchange.round)))
        return actions

    def _meet(self, now: float, sender: str, meet: g.Meet) -> list[m.Action]:
        self.others[sender] = Others(meet.round, meet.step_s, meet.transfer_s)
        exchange = self.exchange
        if meet.round > self.round or exchange is None or (meet.round == self.round and self.phase == ""):
            self.early[sender] = meet
            return []
        if meet.round < self.round or self.phase == "mixing":
            return [m.Send(sender, g.Decline(meet.round, self.round, "the round is over here"))]
        if reason := mismatch(exchange, self.identity, sender, meet):
            self._fail(exchange, sender, reason)
            notice = m.Notice(f"no exchange round={self.round} partner={sender} reason={reason!r}", "warning")
            return [notice, m.Send(sender, g.Decline(meet.round, self.round, reason)), *self._settle(now)]
        exchange.met[sender] = None
        return self._send_models(now, exchange) if self.phase == "exchanging" else []

    def _declined(self, now: float, sender: str, decline: g.Decline) -> list[m.Action]:
        known = self.others.get(sender, Others(decline.at))
        self.others[sender] = replace(known, round=max(known.round, decline.at))
        exchange = self.exchange
        if exchange is None or decline.round != exchange.round or self.phase == "mixing":
            return []
        self._fail(exchange, sender, decline.reason)
        return self._settle(now)

    def _model(self, now: float, sender: str, number: int) -> list[m.Action]:
        exchange = self.exchange
        if exchange is not None and number == exchange.round and sender in exchange.missing:
            take = [g.Take(number, sender), m.Send(sender, g.Got(number))]
            if self.phase == "mixing":
                self.overdue.append((number, sender))
                return take
            exchange.received[sender] = now
            exchange.failed.pop(sender, None)
            return [*take, *self._settle(now)]
        late = self.past.get(number)
        if late is None or not late.correctable(sender):
            return [m.Notice(f"model ignored round={number} from={sender}")]
        assert late.offered_at is not None
        self.pace.waited(now - late.offered_at)
        take = [g.Take(number, sender), m.Send(sender, g.Got(number))]
        if self.phase in ("steps", ""):
            return [*take, *self._correct(number, sender)]
        self.overdue.append((number, sender))
        return take

    def _correct(self, number: int, sender: str) -> list[m.Action]:
        late = self.past[number]
        if not late.correctable(sender):
            return []
        late.corrected[sender] = None
        self.failures[sender] = 0
        return [g.Correct(number, sender, late.weight(sender), self.settled - late.ordinal - 1)]

    def _got(self, now: float, sender: str, number: int) -> list[m.Action]:
        if self.state == "concluding" and number == self.options.rounds:
            return self._conclusion(self.conclusion.told(sender))
        exchange = self.exchange if self.exchange and self.exchange.round == number else self.past.get(number)
        if exchange is None or sender not in exchange.sent:
            return []
        exchange.got.setdefault(sender, now)
        if exchange.transfer_s is not None:
            self.pace.transfers.append(exchange.transfer_s)
        return self._settle(now)

    def _fail(self, exchange: Exchange, partner: str, reason: str) -> None:
        if (
            partner in exchange.partners
            and partner not in exchange.received
            and partner not in exchange.failed
        ):
            exchange.failed[partner] = reason
            self.failures[partner] = self.failures.get(partner, 0) + 1

    def _deadline(self, exchange: Exchange) -> float:
        assert exchange.offered_at is not None
        latest = exchange.offered_at + timeout_s(self.options, self.pace)
        if exchange.local_steps < self.options.local_steps and exchange.acknowledged:
            # Late by its link, not by choice: whoever it waits for now comes over the same link.
            usual = exchange.began_at + target_s(self.options, self._paces())
            return min(latest, max(usual, *exchange.got.values()))
        return latest

    def _settle(self, now: float) -> list[m.Action]:
        """Mix if there is nothing to wait for, or if it has been waited for long enough."""
        exchange = self.exchange
        if exchange is None or self.phase != "exchanging" or exchange.offered_at is None:
            return []
        awaited = exchange.awaited()
        if awaited and now < (deadline := self._deadline(exchange)):
            return self._alarm(deadline)
        for name in awaited:
            self._fail(exchange, name, "timeout")
        if exchange.received and not exchange.missing:
            self.pace.waited(max(exchange.received.values()) - exchange.offered_at)
        workers = tuple(name for name in exchange.row.partners if name in exchange.received)
        for name in workers:
            self.failures[name] = 0
        self.phase = "mixing"
        weights = tuple(exchange.weight(name) for name in workers)
        skipped = [m.Notice(f"skipped round={exchange.round} partners={exchange.failed}", "warning")]
        return [*(skipped if exchange.failed else []), g.Mix(exchange.round, workers, weights)]

    def _mixed(self, now: float, event: g.Mixed) -> list[m.Action]:
        exchange = self.exchange
        assert exchange is not None and event.round == exchange.round
        report = g.Report(
            round=exchange.round,
            tokens=self.tokens,
            fate=exchange.fate,
            local_steps=exchange.local_steps,
            step_s=self.pace.step_s,
            transfer_s=self.pace.transfer_s,
            wait_s=now - (exchange.offered_at or now),
            distance=event.distance,
            norm=event.norm,
        )
        self.past[exchange.round] = exchange
        while len(self.past) > LATE_ROUNDS:
            self.past.pop(next(iter(self.past)))
        self.round += 1
        self.settled += 1
        jumped = self._catch_up()
        overdue, self.overdue = self.overdue, []
        self.phase = "steps"
        corrections = [action for number, name in overdue for action in self._correct(number, name)]
        drop = g.Drop(next(iter(self.past)))
        return [m.Send(g.RENDEZVOUS, report), *corrections, drop, *jumped, *self._saved(), *self._begin(now)]

    def _saved(self) -> list[m.Action]:
        every = self.options.checkpoint_rounds
        due = every and (self.round % every == 0 or self.round >= self.options.rounds)
        return [m.Save(self.round)] if due else []

    def _catch_up(self) -> list[m.Action]:
        """Take the round the others are at, when they are further by two or more."""
        names = {one.name for one in self.views[-1].members} - {self.name}
        known = sorted(own.round for name, own in self.others.items() if name in names)
        if not known:
            return []
        median = min(known[(len(known) - 1) // 2], self.options.rounds)
        if median <= self.round + 1:
            return []
        notice = m.Notice(f"catching up from={self.round} to={median}", "warning")
        self.round = median
        return [notice]

    def _report_late(self, number: int) -> list[m.Action]:
        late = self.past.get(number)
        if late is None or late.fate != "skipped":
            return []
        report = g.Report(number, self.tokens, "late", late.local_steps, self.pace.step_s, 0.0, 0.0)
        return [m.Send(g.RENDEZVOUS, report)]

    def _captures(self) -> list[m.Action]:
        if self.round < 0:
            return []
        wanted, self.clones = [name for name in self.clones if self.links.get(name)], {}
        return [g.Capture(self.round, name) for name in wanted]

    # ---- clock and channels ----

    def _alarm(self, at: float) -> list[m.Action]:
        if at == self.alarm_at:
            return []
        self.alarm_at = at
        return [m.Wake(at)]

    def _woke(self, now: float) -> list[m.Action]:
        self.alarm_at = -1.0
        if self.state == "cloning":
            again = [m.Notice(f"no state from {self.donor} yet: asking again", "warning"), self._enrol()]
            return [*again, *self._alarm(now + CLONE_S_MAX)]
        return self._settle(now)

    def _disconnected(self, now: float, worker: str, reason: str) -> list[m.Action]:
        self.links[worker] = False
        self.early.pop(worker, None)
        self.clones.pop(worker, None)
        if self.state == "concluding":
            return self._conclusion(self.conclusion.told(worker))
        if self.state == "cloning" and worker == self.donor:
            return [self._enrol()]
        exchange = self.exchange
        if exchange is None or self.phase not in ("steps", "offering", "exchanging"):
            return []
        exchange.met.pop(worker, None)
        self._fail(exchange, worker, f"gone: {reason}")
        return self._settle(now)

    # ---- the end ----

    def _leave(self, reason: str, *, complete: bool) -> list[m.Action]:
        self.state = "finished"
        goodbye = m.Send(g.RENDEZVOUS, m.Leave(self.tokens, reason=reason))
        return [goodbye, m.Finish(reason or "the run is over", complete)]

    def _conclusion(self, actions: list[m.Action] | None) -> list[m.Action]:
        """Return what the end calls for; go, once nobody needs this peer any more."""
        over = self.conclusion.over
        return [*(actions or []), *(self._leave("", complete=True) if over else [])]
