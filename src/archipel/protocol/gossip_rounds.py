"""A peer's rounds: local steps, handshakes, offers, models in and out, mixing (GASLoC, sections 2-5).

    steps ─(H_i done)─▶ offering ─▶ exchanging ─(all here, or the deadline)─▶ mixing ─▶ the next round

`peer` brings a peer in and out of a run; between that, this is its life.

Invariants: one round is under way at most; an exchange needs a handshake that matched; a late model is
applied only where the partner has ours of that round too; nothing is waited for longer than the timeout.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from . import gossip as g
from . import messages as m
from .exchange import (
    OUTLIER,
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
LAGS = 4  # newest handshakes by which a peer sees that it is ahead


@dataclass
class Rounds:
    """The rounds of one peer. `links`: worker -> connected; missing: never was; shared with the peer."""

    name: str
    links: dict[str, bool]
    options: g.GossipOptions = field(default_factory=g.GossipOptions)
    run: str = ""
    seed: int = 0
    schema: str = ""
    round: int = -1  # -1: no state yet
    settled: int = 0  # rounds settled by this incarnation
    phase: str = ""  # steps, offering, exchanging, mixing; "": none under way
    steps_done: int = 0  # of the round under way
    tokens: int = 0
    views: list[g.View] = field(default_factory=list)
    exchange: Exchange | None = None
    past: dict[int, Exchange] = field(default_factory=dict)
    early: dict[str, g.Meet] = field(default_factory=dict)
    others: dict[str, Others] = field(default_factory=dict)
    lags: deque[int] = field(default_factory=lambda: deque(maxlen=LAGS))  # rounds others were behind
    failures: dict[str, int] = field(default_factory=dict)
    overdue: list[tuple[int, str]] = field(default_factory=list)  # late models to apply after mixing
    pace: Pace = field(default_factory=Pace)
    alarm_at: float = -1.0

    @property
    def schedule_tick(self) -> int:
        """The tick a step's learning rate follows: H a round, whatever this peer's own H_i."""
        full = self.options.local_steps
        own = self.exchange.local_steps if self.exchange is not None else full
        return max(self.round, 0) * full + self.steps_done * full // own

    @property
    def over(self) -> bool:
        """Whether the last round is settled."""
        return self.round >= self.options.rounds

    @property
    def epoch(self) -> int:
        """Of the membership, as this round has it."""
        return self.exchange.epoch if self.exchange is not None else 0

    # ---- views ----

    def see(self, view: g.View) -> None:
        """Take in a view, for the round it names."""
        if self.views and view.epoch < self.views[-1].epoch:
            self.views.clear()  # a rendezvous that starts anew counts its epochs anew
        self.views.append(view)

    def _current_view(self) -> g.View:
        usable = [view for view in self.views if view.round <= self.round] or self.views[:1]
        self.views = self.views[self.views.index(usable[-1]) :]
        return usable[-1]

    def _paces(self) -> list[tuple[float, float]]:
        """Return (step_s, transfer_s) of this peer and of those in the view whose pace is known."""
        names = {one.name for one in self.views[-1].members} - {self.name} if self.views else set()
        known = [(own.step_s, own.transfer_s) for name, own in sorted(self.others.items()) if name in names]
        return [pace for pace in (*known, (self.pace.step_s, self.pace.transfer_s)) if all(pace)]

    def _slow_lines(self) -> set[str]:
        """Return whose transfers take much longer than most peers', as they say: that is their lines."""
        usual = sorted(transfer_s for _, transfer_s in self._paces())
        limit = OUTLIER * usual[(len(usual) - 1) // 2] if usual else 0.0
        return {name for name, own in self.others.items() if limit and own.transfer_s > limit}

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

    # ---- a round ----

    def begin(self, now: float) -> list[m.Action]:
        """Start the round `self.round`."""
        self.steps_done = 0
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
            meets += self.meet(now, name, self.early.pop(name))
        return [*meets, m.Resume()]

    def end(self) -> list[m.Action]:
        """The last round is settled."""
        self.phase, self.exchange = "", None
        return [m.Send(g.RENDEZVOUS, g.AtEnd(self.round, self.tokens))]

    def step(self, event: m.StepCompleted) -> list[m.Action]:
        """An inner step is done."""
        self.tokens += event.tokens
        self.pace.stepped(event.step_s)
        if self.phase != "steps" or self.exchange is None:
            return []
        self.steps_done += 1
        if self.steps_done < self.exchange.local_steps:
            return []
        self.phase = "offering"
        return [m.Hold(), g.Offer(self.round)]

    def offered(self, now: float) -> list[m.Action]:
        """The own model is there to be sent."""
        exchange = self.exchange
        assert exchange is not None
        self.phase, exchange.offered_at = "exchanging", now
        for name in exchange.partners:
            gone = self.links.get(name) is False
            suspect = self.failures.get(name, 0) >= self.options.suspect_rounds
            if name not in exchange.met and (gone or suspect):
                self._fail(exchange, name, "gone" if gone else "suspect")
        return [*self._send_models(now, exchange), *self.settle(now)]

    def settle(self, now: float) -> list[m.Action]:
        """Mix if there is nothing to wait for, or if it has been waited for long enough."""
        exchange = self.exchange
        if exchange is None or self.phase != "exchanging" or exchange.offered_at is None:
            return []
        awaited = exchange.awaited()
        if awaited and now < (deadline := self._deadline(exchange)):
            return self._alarm(deadline)
        for name in awaited:
            self._fail(exchange, name, "timeout")
        if awaited:  # who is ahead of the others waits longer from round to round, until they are there
            self.pace.waited(now - exchange.offered_at)
        if exchange.received and not exchange.missing:
            self.pace.waited(max(exchange.received.values()) - exchange.offered_at)
        workers = tuple(name for name in exchange.row.partners if name in exchange.received)
        for name in workers:
            self.failures[name] = 0
        self.phase = "mixing"
        weights = tuple(exchange.weight(name) for name in workers)
        skipped = [m.Notice(f"skipped round={exchange.round} partners={exchange.failed}", "warning")]
        return [*(skipped if exchange.failed else []), g.Mix(exchange.round, workers, weights)]

    def _deadline(self, exchange: Exchange) -> float:
        assert exchange.offered_at is not None
        patient_s = self.options.timeout_s_max if self._ahead else timeout_s(self.options, self.pace)
        latest = exchange.offered_at + patient_s
        if exchange.local_steps < self.options.local_steps and exchange.acknowledged:
            # Late by its link, not by choice: whoever it waits for now comes over the same link.
            usual = exchange.began_at + target_s(self.options, self._paces())
            return min(latest, max(usual, *exchange.got.values()))
        return latest

    @property
    def _ahead(self) -> bool:
        """Whether most of the newest handshakes were for rounds that are over here.

        Nobody is there yet who could be kept waiting; going on would only mean to miss everybody again.
        """
        return len(self.lags) > 1 and sorted(self.lags)[(len(self.lags) - 1) // 2] > 0

    def _fail(self, exchange: Exchange, partner: str, reason: str) -> None:
        if (
            partner in exchange.partners
            and partner not in exchange.received
            and partner not in exchange.failed
        ):
            exchange.failed[partner] = reason
            self.failures[partner] = self.failures.get(partner, 0) + 1

    def _alarm(self, at: float) -> list[m.Action]:
        if at == self.alarm_at:
            return []
        self.alarm_at = at
        return [m.Wake(at)]

    def woke(self, now: float) -> list[m.Action]:
        """A deadline may have come."""
        self.alarm_at = -1.0
        return self.settle(now)

    def mixed(self, now: float, event: g.Mixed) -> list[m.Action]:
        """The round is settled: count it; the next may begin."""
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
        return [m.Send(g.RENDEZVOUS, report), *corrections, self._drop(), *jumped, *self._saved()]

    def _drop(self) -> m.Action:
        """Forget the tensors of rounds before the first one for which a model may still come late."""
        still = (number for number, past in self.past.items() if any(map(past.correctable, past.missing)))
        return g.Drop(min(still, default=self.round))

    def _saved(self) -> list[m.Action]:
        every = self.options.checkpoint_rounds
        due = every and (self.round % every == 0 or self.round >= self.options.rounds)
        return [m.Save(self.round)] if due else []

    # ---- handshakes and models ----

    def connected(self, worker: str) -> list[m.Action]:
        """A channel to a worker is open: say what it has not heard."""
        exchange = self.exchange
        if exchange is None or worker not in exchange.partners or worker in exchange.failed:
            return []
        return [self._meeting(exchange, worker)]

    def disconnected(self, now: float, worker: str, reason: str) -> list[m.Action]:
        """A channel is gone: what was to come over it in this round will not."""
        self.early.pop(worker, None)
        exchange = self.exchange
        if exchange is None or self.phase not in ("steps", "offering", "exchanging"):
            return []
        exchange.met.pop(worker, None)
        if worker not in exchange.got:
            exchange.sent.pop(worker, None)  # it may not have arrived
        self._fail(exchange, worker, f"gone: {reason}")
        return self.settle(now)

    def _meeting(self, exchange: Exchange, partner: str) -> m.Action:
        return m.Send(partner, meeting(exchange, self.identity, partner, self.pace))

    @property
    def identity(self) -> Identity:
        """What both partners of an exchange must have in common."""
        return Identity(self.name, self.run, self.schema, self.options.form)

    def meet(self, now: float, sender: str, meet: g.Meet) -> list[m.Action]:
        """A handshake is here."""
        self.others[sender] = Others(meet.round, meet.step_s, meet.transfer_s)
        self.failures[sender] = 0  # it may be late, but it is there
        self.lags.append(max(self.round - meet.round, 0))
        exchange = self.exchange
        late = meet.round < self.round
        if not late and (meet.round > self.round or exchange is None or self.phase == ""):
            self.early[sender] = meet
            return []
        if late or exchange is None or self.phase == "mixing":
            return [m.Send(sender, g.Decline(meet.round, self.round, "the round is over here"))]
        if reason := mismatch(exchange, self.identity, sender, meet):
            self._fail(exchange, sender, reason)
            notice = m.Notice(f"no exchange round={self.round} partner={sender} reason={reason!r}", "warning")
            return [notice, m.Send(sender, g.Decline(meet.round, self.round, reason)), *self.settle(now)]
        exchange.met[sender] = None
        # One that was given up in this round is back: what was said over its old channel it may not have.
        again = [self._meeting(exchange, sender)] if exchange.failed.pop(sender, None) else []
        return [*again, *(self._send_models(now, exchange) if self.phase == "exchanging" else [])]

    def declined(self, now: float, sender: str, decline: g.Decline) -> list[m.Action]:
        """A partner will not take part."""
        known = self.others.get(sender, Others(decline.at))
        self.others[sender] = replace(known, round=max(known.round, decline.at))
        exchange = self.exchange
        if exchange is None or decline.round != exchange.round or self.phase == "mixing":
            return []
        self._fail(exchange, sender, decline.reason)
        return self.settle(now)

    def _send_models(self, now: float, exchange: Exchange) -> list[m.Action]:
        actions: list[m.Action] = []
        for name in exchange.row.listeners:
            if name in exchange.met and name not in exchange.sent and name not in exchange.failed:
                exchange.sent[name] = now
                actions.append(m.Send(name, g.Model(exchange.round)))
        return actions

    def model(self, now: float, sender: str, number: int) -> list[m.Action]:
        """A model is here: of this round, late, or of no use."""
        exchange = self.exchange
        if exchange is not None and number == exchange.round and sender in exchange.missing:
            take = [g.Take(number, sender), m.Send(sender, g.Got(number))]
            if self.phase == "mixing":
                self.overdue.append((number, sender))
                return take
            exchange.received[sender] = now
            exchange.failed.pop(sender, None)
            return [*take, *self.settle(now)]
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
        late = self.past.get(number)
        if late is None or not late.correctable(sender):
            return []
        late.corrected[sender] = None
        self.failures[sender] = 0
        return [g.Correct(number, sender, late.weight(sender), self.settled - late.ordinal - 1)]

    def corrected(self, number: int) -> list[m.Action]:
        """A late model was applied: its round was not skipped after all."""
        late = self.past.get(number)
        if late is None or late.fate != "skipped":
            return []
        report = g.Report(number, self.tokens, "late", late.local_steps, self.pace.step_s, 0.0, 0.0)
        return [m.Send(g.RENDEZVOUS, report)]

    def got(self, now: float, sender: str, number: int) -> list[m.Action]:
        """A partner has our model."""
        exchange = self.exchange if self.exchange and self.exchange.round == number else self.past.get(number)
        if exchange is None or sender not in exchange.sent:
            return []
        exchange.got.setdefault(sender, now)
        slow = self._slow_lines()
        transfer_s = exchange.transfer_s(slow)
        if transfer_s is not None and sender not in slow:
            self.pace.transfers.append(transfer_s)
        return self.settle(now)
