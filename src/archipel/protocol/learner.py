"""The learner's machine: report, push, let updates land at step boundaries, never wait (Algorithm 1, section 3.1).

    connecting ─▶ joining ─▶ preparing ─▶ joining ─▶ adopting ─▶ running ─▶ stopping ─▶ finished
                (no settings yet)      (with the model's schema)

It lives beside the thing that computes, not in it: `StepCompleted` and `Applied` tell it in order what the compute
port did at a step boundary (a copy of fragments is taken *before* updates are applied), and `Copy`, `Apply`, `Hold`
ask for what comes next. When the channel breaks it goes on counting and says everything anew after reconnecting.

Invariants: no `Progress` before every fragment is adopted; a fragment's counters reset when an update lands on it
and at no other time; a push is made from a copy taken at the end of a step, with the counters of that step.
"""

from dataclasses import dataclass, field

from msgspec import convert

from . import messages as m
from .schedule import SyncOptions, due, due_between


@dataclass
class Counters:
    """c_steps and c_tokens of one fragment, and the tokens consumed when the last update landed on it."""

    steps: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Snapshot:
    """A copy of one fragment that the compute port holds, with the counters that belong to it."""

    step: int
    base: int
    steps: int
    tokens: int
    total: int


@dataclass
class Lead:
    """What a learner that may have to wait knows of the ticks it takes part in."""

    credit: int = 0  # own reports that no closed tick has counted, as far as heard
    unsettled: dict[int, int] = field(default_factory=dict)  # due tick that closed -> its fragment
    published: dict[int, int] = field(default_factory=dict)  # fragment -> tick of its newest update
    holding: bool = False


@dataclass
class LearnerMachine:
    """One learner. `position`: tokens of `shard` drawn before this incarnation; -1 if it does not know."""

    name: str
    incarnation: str
    run: str = ""
    shard: int = -1
    position: int = -1
    role: str = "learner"
    state: str = "connecting"
    connected: bool = False
    options: SyncOptions = field(default_factory=SyncOptions)
    epoch: int = 0
    tick: int = 0
    step: int = 0
    tokens: int = 0
    schema: tuple[m.TensorSpec, ...] = ()
    versions: list[int] = field(default_factory=list)
    counters: list[Counters] = field(default_factory=list)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    pulls: dict[int, m.Pull] = field(default_factory=dict)  # asked for, no copy to answer with yet
    missing: set[int] = field(default_factory=set)  # not adopted yet
    copying: tuple[int, ...] = ()
    lead: Lead = field(default_factory=Lead)
    spoke_at: float = 0.0
    alarm_at: float = -1.0

    def handle(self, now: float, event: m.Event) -> list[m.Action]:
        """Return what to do about the event. Nothing happens any more once the machine has finished."""
        if self.state == "finished":
            return []
        actions = self._react(now, event)
        if any(isinstance(action, m.Send) for action in actions):
            self.spoke_at = now
        return actions + self._heartbeat(now)

    def _react(self, now: float, event: m.Event) -> list[m.Action]:
        match event:
            case m.Connected():
                return self._connect()
            case m.Disconnected(reason=reason):
                return self._disconnect(reason)
            case m.Received(message=message):
                return self._receive(message)
            case m.Prepared(schema=schema):
                self.schema = schema
                self.state = "connecting"
                return self._connect() if self.connected else []
            case m.StepCompleted():
                return self._step(event)
            case m.Applied():
                return self._land(event)
            case m.StopRequested(reason=reason):
                return self._leave(reason)
            case _:
                return []

    # ---- the channel ----

    def _connect(self) -> list[m.Action]:
        self.connected = True
        if self.state == "preparing":
            return []  # the join with the schema follows when the compute port is ready
        if self.state == "connecting":
            self.state = "joining"
        join = m.Join(
            run=self.run,
            role="observer" if self.role == "observer" else "learner",
            incarnation=self.incarnation,
            schema=self.schema,
            epoch=self.epoch,
            versions=tuple(self.versions),
            step=self.step,
            tokens=self.tokens,
            shard=self.shard,
            position=self.position + self.tokens if self.position >= 0 else -1,
            counters=tuple((counter.steps, counter.tokens) for counter in self.counters),
        )
        return [m.Send(m.SYNCER, join)]

    def _disconnect(self, reason: str) -> list[m.Action]:
        self.connected = False
        self.pulls.clear()
        if self.state == "joining":
            self.state = "connecting"
        return [m.Notice(f"disconnected reason={reason!r} step={self.step}", "warning")]

    def _heartbeat(self, now: float) -> list[m.Action]:
        if not self.connected or self.state == "finished":
            return []
        beat_s = self.options.heartbeat_s
        actions: list[m.Action] = []
        if now - self.spoke_at >= beat_s:
            actions.append(m.Send(m.SYNCER, m.Heartbeat()))
            self.spoke_at = now
        # The alarm is only moved once it has rung: a step does not cost a timer.
        if now >= self.alarm_at:
            self.alarm_at = self.spoke_at + beat_s
            actions.append(m.Wake(self.alarm_at))
        return actions

    # ---- what the syncer says ----

    def _receive(self, message: m.Message) -> list[m.Action]:
        match message:
            case m.Welcome():
                return self._welcome(message)
            case m.Refused():
                return self._refused(message)
            case m.Pull():
                return self._pull(message)
            case m.TickClosed():
                return self._tick(message)
            case m.Update():
                return self._update(message)
            case m.Done(tick=tick, reason=reason):
                return self._done(tick, reason)
            case _:
                return [m.Notice(f"ignored message={type(message).__name__}", "warning")]

    def _welcome(self, welcome: m.Welcome) -> list[m.Action]:
        self.run, self.shard = welcome.run, welcome.shard
        self.tick = welcome.tick
        self.options = convert(welcome.settings["sync"], SyncOptions)
        if not self.schema:
            self.state, self.position = "preparing", welcome.position
            return [m.Prepare(welcome.settings, welcome.shard, welcome.position)]
        if not self.versions:
            self.versions = [-1] * len(welcome.versions)
            self.counters = [Counters() for _ in welcome.versions]
        self.epoch = welcome.epoch
        self.lead.credit = welcome.credit
        self.lead.unsettled.clear()
        if self.state == "joining":
            self.missing = set(welcome.follow)
            self.state = "adopting" if self.missing else "running"
        return [*self._watch(), *self._balance()]

    def _refused(self, refusal: m.Refused) -> list[m.Action]:
        notice = m.Notice(f"refused fragment={refusal.fragment} reason={refusal.reason!r}", "warning")
        if refusal.final:
            self.state = "finished"
            return [notice, m.Finish(refusal.reason, complete=False)]
        if refusal.fragment < 0:
            # Turned down for now (the name is still taken, say): hang up, the host calls again after a while.
            return [notice, m.Close(m.SYNCER, refusal.reason)]
        # A push that was turned down is not waited for any more.
        for tick in [t for t, p in self.lead.unsettled.items() if p == refusal.fragment]:
            del self.lead.unsettled[tick]
        return [notice, *self._balance()]

    def _tick(self, closed: m.TickClosed) -> list[m.Action]:
        self.tick = max(self.tick, closed.tick)
        counted = closed.counted >= 0
        if counted:
            self.lead.credit = self._credit_after(closed.counted)
        fragment = due(closed.tick, self.options)
        waits_for = counted or self.options.overlap_steps > 0
        if fragment is not None and waits_for and self.lead.published.get(fragment, -1) < closed.tick:
            self.lead.unsettled[closed.tick] = fragment
        return [*self._watch(), *self._balance()]

    def _credit_after(self, counted_step: int) -> int:
        """τ ≥ 1: only steps after the counted report are left; τ = 0: one step was used up."""
        return self.step - counted_step if self.options.overlap_steps else self.lead.credit - 1

    def _pull(self, pull: m.Pull) -> list[m.Action]:
        if pull.fragment in self.snapshots:
            return [self._push(pull)]
        self.pulls[pull.fragment] = pull
        return self._watch()

    def _push(self, pull: m.Pull) -> m.Action:
        snapshot = self.snapshots[pull.fragment]
        push = m.Push(
            fragment=pull.fragment,
            tick=pull.tick,
            base=snapshot.base,
            step=snapshot.step,
            steps=snapshot.steps,
            tokens=snapshot.tokens,
            total=snapshot.total,
            full=pull.full,
        )
        return m.Send(m.SYNCER, push)

    def _update(self, update: m.Update) -> list[m.Action]:
        if not 0 <= update.fragment < len(self.versions):
            return [m.Notice(f"ignored update fragment={update.fragment}", "warning")]
        self.tick = max(self.tick, update.tick)
        self.lead.published[update.fragment] = update.tick
        for tick in [t for t, p in self.lead.unsettled.items() if p == update.fragment and t <= update.tick]:
            del self.lead.unsettled[tick]
        return [
            m.Send(m.SYNCER, m.Arrived(update.fragment, update.version)),
            m.Apply(update.fragment, update.version),
            *self._watch(),
            *self._balance(),
        ]

    def _done(self, tick: int, reason: str) -> list[m.Action]:
        self.tick = max(self.tick, tick)
        if self.state == "stopping":
            return []
        self.state = "stopping"
        return [m.Stop(reason)]

    # ---- what the compute port did ----

    def _step(self, step: m.StepCompleted) -> list[m.Action]:
        assert self.state in ("running", "stopping"), "a step before the model was adopted"
        self.step = step.step
        self.tokens += step.tokens
        for counter in self.counters:
            counter.steps += 1
            counter.tokens += step.tokens
        for fragment in step.copied:
            counter = self.counters[fragment]
            self.snapshots[fragment] = Snapshot(
                step.step, self.versions[fragment], counter.steps, counter.tokens, self.tokens
            )
        self.lead.credit = min(self.lead.credit + 1, self.options.interval_steps)
        if not self.connected:
            return self._balance()
        report = m.Send(m.SYNCER, m.Progress(self.step, self.tokens, step.step_s))
        answers = [self._push(self.pulls.pop(p)) for p in sorted(self.pulls) if p in step.copied]
        return [report, *answers, *self._watch(), *self._balance()]

    def _land(self, applied: m.Applied) -> list[m.Action]:
        fragment = applied.fragment
        self.versions[fragment] = applied.version
        self.counters[fragment] = Counters()
        self.snapshots.pop(fragment, None)
        actions: list[m.Action] = []
        if self.connected:
            landed = m.Landed(fragment, applied.version, applied.step, self.tokens)
            actions.append(m.Send(m.SYNCER, landed))
        if self.state == "adopting":
            self.missing.discard(fragment)
            if not self.missing:
                self.state = "running"
                actions += [*self._watch(), m.Resume()]
        return actions

    def _leave(self, reason: str) -> list[m.Action]:
        self.state = "finished"
        unmerged = tuple(counter.tokens for counter in self.counters)
        goodbye = m.Send(m.SYNCER, m.Leave(self.tokens, unmerged, reason))
        return [*([goodbye] if self.connected else []), m.Finish(reason)]

    # ---- what it wants next ----

    def _watch(self) -> list[m.Action]:
        """Ask for copies of what can be pulled next: due at t+1 … t+τ+1, and what was asked for already."""
        if self.state not in ("running", "adopting") or self.role == "observer":
            return []
        soon = due_between(self.tick + 1, self.tick + self.options.overlap_steps + 1, self.options)
        wanted = tuple(dict.fromkeys((*soon, *sorted(self.pulls))))
        if wanted == self.copying:
            return []
        self.copying = wanted
        return [m.Copy(wanted)]

    def _balance(self) -> list[m.Action]:
        """Hold or resume: at τ = 0 at every due step, with `max_lead_steps` when too far ahead."""
        hold = self.state == "running" and self._ahead()
        if hold == self.lead.holding:
            return []
        self.lead.holding = hold
        return [m.Hold()] if hold else [m.Resume()]

    def _ahead(self) -> bool:
        if self.options.overlap_steps == 0:
            allowed = 0
        elif self.options.max_lead_steps is not None:
            allowed = self.options.max_lead_steps
        else:
            return False
        # The newest report can be counted at tick `expected` at the earliest.
        expected = self.tick + self.lead.credit
        limit = expected - allowed
        if any(tick <= limit for tick in self.lead.unsettled):
            return True
        return any(due(tick, self.options) is not None for tick in range(self.tick + 1, limit + 1))
