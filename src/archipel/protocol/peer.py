"""A gossip peer's machine: local steps, an exchange with the round's partners, mixing; no syncer (GASLoC).

    connecting ─▶ preparing ─▶ cloning ─▶ ready ─▶ running ─▶ concluding ─▶ finished
                        └─ own state will do ─┘  ▲    │
                                                 └────┘ a round: steps ─▶ offering ─▶ exchanging ─▶ mixing

Rounds, the exchanges in them and what a peer waits for are in `gossip_rounds`, the end in `conclusion`. Here
is how a peer gets its state: its own (the run begins, or everybody comes back from checkpoints), or a clone
of a live peer's, asked for when the run has gone on without it.

Invariants: the weights change only by steps, `Mix`, `Correct`, `Adopt` and `Accept`; no step before a view
that has this peer in it; a view is used from the round it names.
"""

import hashlib
from dataclasses import dataclass, field

from msgspec import ValidationError

from . import gossip as g
from . import messages as m
from .conclusion import Conclusion
from .exchange import Exchange
from .gossip_rounds import Rounds
from .roster import Roster

CLONE_S_MAX = 60.0  # without a donor's state before the rendezvous is asked again
STATE_S_MAX = 600.0  # for a state that was asked for to come; twice as long each time it has not
GIVING = 4.0  # times what models took each is how long the mean may: it is float32, and goes to all at once


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
    roster: Roster | None = None  # a list that stands in for the rendezvous
    state: str = "connecting"
    donor: str = ""
    asked: str = ""  # the donor that our request has reached, or will
    asked_until: float = 0.0  # when its state should be here
    state_s_max: float = STATE_S_MAX  # patience with the next one
    step: int = 0
    links: dict[str, bool] = field(default_factory=dict)  # worker -> connected; missing: never was
    clones: dict[str, None] = field(default_factory=dict)  # whom we owe a state
    guests: dict[str, g.Address] = field(default_factory=dict)  # who will ask for one, and is no member yet
    conclusion: Conclusion = field(default_factory=Conclusion)
    rounds: Rounds = field(init=False)

    def __post_init__(self) -> None:
        self.rounds = Rounds(self.name, self.links)

    @property
    def options(self) -> g.GossipOptions:
        """The run's."""
        return self.rounds.options

    @property
    def round(self) -> int:
        """The round under way; -1 before there is a state."""
        return self.rounds.round

    @property
    def settled(self) -> int:
        """Rounds settled by this incarnation."""
        return self.rounds.settled

    @property
    def exchange(self) -> Exchange | None:
        """The exchange under way."""
        return self.rounds.exchange

    @property
    def tokens(self) -> int:
        """Tokens of this incarnation."""
        return self.rounds.tokens

    @property
    def schedule_tick(self) -> int:
        """The tick a step's learning rate follows."""
        return self.rounds.schedule_tick

    def handle(self, now: float, event: m.Event) -> list[m.Action]:
        """Return what to do about the event. Nothing happens any more once the machine has finished."""
        if self.state == "finished":
            return []
        return self._react(now, event) if self.roster is None else self.roster.drive(now, event, self._react)

    def _react(self, now: float, event: m.Event) -> list[m.Action]:
        match event:
            case m.StepCompleted():
                self.step = event.step
                return self.rounds.step(event)
            case m.Received(sender=sender, message=message):
                return self._receive(now, sender, message)
            case g.Offered():
                return self.rounds.offered(now)
            case g.Mixed():
                return [*self.rounds.mixed(now, event), *self._next(now)]
            case g.Corrected(round=number, worker=worker):
                return [
                    m.Notice(f"late model applied round={number} from={worker}"),
                    *self.rounds.corrected(number),
                ]
            case m.Connected(worker=worker):
                return self._connected(now, worker)
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
                return [m.Send(worker, g.State(number, self.rounds.epoch))]
            case g.Adopted(round=number, reason=reason):
                return self._adopted(number, reason)
            case g.Submitted(attempt=attempt, loss=loss):
                return self.conclusion.submitted(attempt, loss)
            case g.Gathered(attempt=attempt):
                return self.conclusion.gathered(attempt)
            case g.Averaged():
                patience_s = self.options.start_s_max + self._giving_s()
                return self._conclusion(self.conclusion.averaged(now, event, patience_s))
            case _:
                return []

    def _receive(self, now: float, sender: str, message: m.Message) -> list[m.Action]:
        match message:
            case g.Meet():
                return self.rounds.meet(now, sender, message)
            case g.Model(round=number):
                return self.rounds.model(now, sender, number)
            case g.Got(round=number):
                return self._got(now, sender, number)
            case g.Decline():
                return self.rounds.declined(now, sender, message)
            case g.View() if sender == g.RENDEZVOUS:
                return self._view(now, message)
            case g.Guest(name=name, address=address) if sender == g.RENDEZVOUS:
                self.guests[name] = g.Address(name, address)
                return [self._know()]
            case g.Admitted() if sender == g.RENDEZVOUS:
                return self._admitted(now, message)
            case m.Refused(reason=reason, final=True) if sender == g.RENDEZVOUS:
                self.state = "finished"
                return [m.Finish(reason, complete=False)]
            case m.Done(reason=reason) if sender == g.RENDEZVOUS:
                return [m.Stop(reason)]
            case g.Clone():
                self.clones[sender] = None
                return self._captures() if self.state in ("ready", "concluding") else []
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

    def _connected(self, now: float, worker: str) -> list[m.Action]:
        self.links[worker] = True
        if worker == g.RENDEZVOUS:
            again = self.rounds.end() if self.state == "concluding" else []
            return [self._enrol(), *again, *self.conclusion.connected(worker)]
        if worker == self.donor and self.state == "cloning":
            return self._ask(now)
        if self.state == "concluding":
            return self.conclusion.connected(worker)
        return self.rounds.connected(worker)

    def _enrol(self) -> m.Action:
        has_state = self.round >= 0
        return m.Send(
            g.RENDEZVOUS,
            g.Enrol(
                run=self.run,
                incarnation=self.incarnation,
                address=self.address,
                round=self.round if has_state else self.kept,
                schema=self.rounds.schema,
                tokens=self.tokens,
                shard=self.shard,
                position=self.position,
                kept=not has_state and self.kept >= 0,
            ),
        )

    def _admitted(self, now: float, admitted: g.Admitted) -> list[m.Action]:
        if self.run and admitted.run != self.run:
            self.state = "finished"
            return [
                m.Finish(
                    f"run {admitted.run!r} is served there, {self.run!r} wanted: check the address",
                    complete=False,
                )
            ]
        if self.state == "cloning" and self.asked and now < self.asked_until:
            return [m.Wake(self.asked_until)]  # of the one that was asked before
        self.donor = admitted.donor
        if self.state == "cloning":
            self.asked = ""
            return self._ask_donor(now, admitted)
        if self.state != "connecting":
            return []
        try:
            self.rounds.options = g.gossip_of(admitted.settings)
        except (ValidationError, KeyError) as error:
            self.state = "finished"
            return [m.Finish(f"the rendezvous' settings are not a gossip run's: {error}", complete=False)]
        self.state, self.run = "preparing", admitted.run
        self.rounds.run = admitted.run
        self.rounds.seed = int(admitted.settings.get("run", {}).get("seed", 0))
        self.shard, self.position = admitted.shard, admitted.position
        know = self._know_donor(admitted)
        return [*know, m.Prepare(admitted.settings, admitted.shard, admitted.position)]

    def _know_donor(self, admitted: g.Admitted) -> list[m.Action]:
        if not admitted.donor:
            return []
        return [g.Know((g.Address(admitted.donor, admitted.donor_address),))]

    def _ask_donor(self, now: float, admitted: g.Admitted) -> list[m.Action]:
        actions = [*self._know_donor(admitted), m.Wake(now + CLONE_S_MAX)]
        if not admitted.donor:  # everybody else is gone: what we have is all there is
            self.rounds.round = max(self.kept, 0)
            return self._ready()
        return [*actions, *self._ask(now)]

    def _ask(self, now: float) -> list[m.Action]:
        """Ask the donor for its state, once on a link: a state that is on its way is not asked for again."""
        if not self.links.get(self.donor) or self.asked == self.donor:
            return []
        self.asked, self.asked_until = self.donor, now + self.state_s_max
        self.state_s_max *= 2.0
        return [m.Send(self.donor, g.Clone(self.incarnation))]

    def _prepared(self, now: float, schema: tuple[m.TensorSpec, ...]) -> list[m.Action]:
        self.rounds.schema = schema_digest(schema)
        if not self.donor:
            self.rounds.round = max(self.kept, 0)
            return self._ready()
        self.state = "cloning"
        return [*self._ask(now), m.Wake(now + CLONE_S_MAX)]

    def _adopted(self, number: int, reason: str) -> list[m.Action]:
        if reason:
            self.state = "finished"
            return [m.Finish(f"the state of {self.donor} does not fit this model: {reason}", complete=False)]
        self.rounds.round = number
        return self._ready()

    def _ready(self) -> list[m.Action]:
        self.state = "ready"
        return [*self._captures(), m.Send(g.RENDEZVOUS, g.Ready(self.round, self.rounds.schema))]

    def _view(self, now: float, view: g.View) -> list[m.Action]:
        self.rounds.see(view)
        for one in view.members:
            self.guests.pop(one.name, None)
        know = self._know()
        if self.state == "ready" and any(one.name == self.name for one in view.members):
            self.state = "running"
            self.rounds.round = max(self.round, min(view.round, self.options.rounds))
            return [know, *self._next(now)]
        return [know]

    def _know(self) -> m.Action:
        views = self.rounds.views
        members = [one for one in views[-1].members if one.name != self.name] if views else []
        return g.Know((*members, *self.guests.values()))

    def _next(self, now: float) -> list[m.Action]:
        """Begin the next round, or the end; a state that is asked for is copied between two rounds."""
        captures = self._captures()
        if not self.rounds.over:
            return [*captures, *self.rounds.begin(now)]
        self.state = "concluding"
        return [*captures, *self.rounds.end()]

    def _got(self, now: float, sender: str, number: int) -> list[m.Action]:
        if self.state == "concluding" and number == self.options.rounds:
            return self._conclusion(self.conclusion.took(now, sender))
        return self.rounds.got(now, sender, number)

    def _giving_s(self) -> float:
        """Return how long the mean may take to all the others, by what models took in the rounds."""
        others = len(self.conclusion.conclude.members) if self.conclusion.conclude else 0
        return GIVING * others * self.rounds.pace.transfer_s

    def _captures(self) -> list[m.Action]:
        if self.round < 0:
            return []
        wanted, self.clones = [name for name in self.clones if self.links.get(name)], {}
        return [g.Capture(self.round, name) for name in wanted]

    # ---- clock and channels ----

    def _woke(self, now: float) -> list[m.Action]:
        if self.state == "cloning":
            if self.asked and now < self.asked_until:
                return [m.Wake(self.asked_until)]  # it is on its way, and may be large
            again = [m.Notice(f"no state from {self.donor} yet: asking again", "warning"), self._enrol()]
            return [*again, m.Wake(now + CLONE_S_MAX)]
        if self.state == "concluding" and self.conclusion.made:
            return self._conclusion(self.conclusion.woke(now))
        return self.rounds.woke(now)

    def _disconnected(self, now: float, worker: str, reason: str) -> list[m.Action]:
        self.links[worker] = False
        self.clones.pop(worker, None)
        self.asked = "" if worker == self.asked else self.asked
        self.guests.pop(worker, None)  # it will ask anew, and we shall be told anew
        if self.state == "concluding":
            return self._conclusion(self.conclusion.disconnected(now, worker, self.options.lease_s))
        if self.state == "cloning" and worker == self.donor:
            return [self._enrol()]
        return self.rounds.disconnected(now, worker, reason)

    # ---- the end ----

    def _leave(self, reason: str, *, complete: bool) -> list[m.Action]:
        self.state = "finished"
        goodbye = m.Send(g.RENDEZVOUS, m.Leave(self.tokens, reason=reason))
        return [goodbye, m.Finish(reason or "the run is over", complete)]

    def _conclusion(self, actions: list[m.Action]) -> list[m.Action]:
        """Return what the end calls for; go, once nobody needs this peer any more."""
        over = self.conclusion.over
        return [*actions, *(self._leave("", complete=True) if over else [])]
