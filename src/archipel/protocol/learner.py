"""The learner's machine: report, push, let updates land at step boundaries, never wait (Algorithm 1).

    connecting ─▶ joining ─▶ preparing ─▶ joining ─▶ adopting ─▶ running ─▶ stopping ─▶ finished
                (no settings yet)      (with the model's schema)

It lives beside the thing that computes, not in it: `StepCompleted` and `Applied` tell it in order what the
compute port did at a step boundary (a copy of fragments is taken *before* updates are applied), and `Copy`,
`Apply`, `Hold` ask for what comes next. When the channel breaks it goes on counting and says everything anew
after reconnecting.

Invariants: no `Progress` before every fragment is adopted; a fragment's counters reset when an update lands
on it and at no other time; a push is made from a copy taken at the end of a step, with the counters of that
step; at most the copies of the newest step are kept; a learner that owes a push never holds.
"""

from dataclasses import dataclass, field

from msgspec import ValidationError

from . import messages as m
from .schedule import SyncOptions, due, due_between, options_of


@dataclass
class Counters:
    """Where the incarnation stood when the last update landed on a fragment: c_steps, c_tokens follow."""

    step: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
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
    unsettled: dict[int, int] = field(default_factory=dict)  # fragment -> due tick that closed, not published
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
    wanted: dict[int, None] = field(default_factory=dict)  # will be asked for, as far as closed ticks tell
    missing: set[int] = field(default_factory=set)  # fragments to adopt before it counts
    asked: dict[int, int] = field(default_factory=dict)  # fragment -> newest update of this connection
    adopted: set[int] = field(default_factory=set)  # fragments on which one of them has landed
    copying: tuple[int, ...] = ()
    lead: Lead = field(default_factory=Lead)
    done: m.Done | None = None
    joined_step: int = 0  # step named in the last join
    adopted_step: int = 0  # step at which the last of `adopted` landed
    spoke_at: float = 0.0
    alarm_at: float = -1.0

    @property
    def schedule_tick(self) -> int:
        """The global tick that a step's learning rate follows.

        At τ = 0 every step counts once, at a tick of its own: that one, whether or not it is closed yet, so
        that the learning rate does not depend on when the news of a closed tick arrives.
        """
        return self.tick if self.options.overlap_steps else self.tick + self.lead.credit

    def handle(self, now: float, event: m.Event) -> list[m.Action]:
        """Return what to do about the event. Nothing happens any more once the machine has finished."""
        if self.state == "finished":
            return []
        actions = self._react(now, event)
        if any(isinstance(action, m.Send) for action in actions):
            self.spoke_at = now
        if now >= self.alarm_at:
            actions += self._heartbeat(now)
        return actions

    def _react(self, now: float, event: m.Event) -> list[m.Action]:
        match event:
            case m.StepCompleted():
                return self._step(event)
            case m.Received(message=message):
                return self._receive(message)
            case m.Applied():
                return self._land(event)
            case m.Connected():
                return self._connect()
            case m.Disconnected(reason=reason):
                return self._disconnect(reason)
            case m.Prepared(schema=schema):
                return self._prepared(schema)
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
        self.joined_step = self.step
        # What was on its way when the channel broke may belong to another epoch: only what comes now counts.
        self.asked.clear()
        self.adopted.clear()
        self.lead.published.clear()
        held = any(version >= 0 for version in self.versions)
        join = m.Join(
            run=self.run,
            role="observer" if self.role == "observer" else "learner",
            incarnation=self.incarnation,
            schema=self.schema,
            epoch=self.epoch,
            versions=tuple(self.versions) if held else (),
            step=self.step,
            tokens=self.tokens,
            shard=self.shard,
            position=self.position + self.tokens if self.position >= 0 else -1,
            counters=tuple((self.step - c.step, self.tokens - c.tokens) for c in self.counters if held),
        )
        return [m.Send(m.SYNCER, join)]

    def _disconnect(self, reason: str) -> list[m.Action]:
        self.connected = False
        self.pulls.clear()
        self.wanted.clear()
        if self.state == "joining":
            self.state = "connecting"
        notice = m.Notice(f"disconnected reason={reason!r} step={self.step}", "warning")
        return [notice, *self._watch(), *self._balance()]

    def _prepared(self, schema: tuple[m.TensorSpec, ...]) -> list[m.Action]:
        self.schema = schema
        if self.state != "preparing":
            return []
        # From here on updates can be taken, even one that overtakes its welcome: it has a lane of its own.
        self.versions = [-1] * self.options.fragments
        self.counters = [Counters() for _ in self.versions]
        self.state = "connecting"
        return self._connect() if self.connected else []

    def _heartbeat(self, now: float) -> list[m.Action]:
        """Called once the alarm has rung, and only then moves it: a step does not cost a timer."""
        if not self.connected or self.state == "finished":
            return []
        actions: list[m.Action] = []
        if now >= self.spoke_at + self.options.heartbeat_s:
            actions.append(m.Send(m.SYNCER, m.Heartbeat()))
            self.spoke_at = now
        self.alarm_at = self.spoke_at + self.options.heartbeat_s
        return [*actions, m.Wake(self.alarm_at)]

    # ---- what the syncer says ----

    def _receive(self, message: m.Message) -> list[m.Action]:
        match message:
            case m.TickClosed():
                return self._tick(message)
            case m.Update():
                return self._update(message)
            case m.Pull():
                return self._pull(message)
            case m.Welcome():
                return self._welcome(message)
            case m.Refused():
                return self._refused(message)
            case m.Done():
                return self._done(message)
            case _:
                return [m.Notice(f"ignored message={type(message).__name__}", "warning")]

    def _welcome(self, welcome: m.Welcome) -> list[m.Action]:
        if self.state == "stopping":
            return []
        try:
            self.options = options_of(welcome.settings)
        except (KeyError, ValidationError) as error:
            return self._give_up(f"settings of the run are unusable: {error!r}; use the syncer's release")
        self.run, self.shard, self.tick = welcome.run, welcome.shard, welcome.tick
        if not self.schema:
            self.state, self.position = "preparing", welcome.position
            return [m.Prepare(welcome.settings, welcome.shard, welcome.position)]
        self.epoch = welcome.epoch
        self.missing = {fragment for fragment in welcome.follow if fragment not in self.adopted}
        # The syncer counts from the join on, or from the landing of the last update that follows it.
        since = self.adopted_step if welcome.follow and not self.missing else self.joined_step
        self.lead.credit = self._capped(welcome.credit + self.step - since)
        self.lead.unsettled.clear()
        if self.state != "running":
            self.state = "adopting"
            return self._adopted()
        return [*self._watch(), *self._balance()]

    def _adopted(self) -> list[m.Action]:
        """Begin to step once nothing is missing."""
        if self.missing:
            return []
        self.state = "running"
        return [*self._watch(), m.Resume()]

    def _refused(self, refusal: m.Refused) -> list[m.Action]:
        notice = m.Notice(f"refused fragment={refusal.fragment} reason={refusal.reason!r}", "warning")
        if refusal.final:
            return [notice, *self._give_up(refusal.reason)]
        if refusal.fragment < 0:
            # Turned down for now (the name is still taken, say): hang up, the host calls again after a while.
            return [notice, m.Close(m.SYNCER, refusal.reason)]
        return [notice, *self._settle(refusal.fragment)]

    def _give_up(self, reason: str) -> list[m.Action]:
        self.state = "finished"
        return [m.Finish(reason, complete=False)]

    def _settle(self, fragment: int) -> list[m.Action]:
        """The round that this learner's push was for is not waited for any more."""
        self.lead.unsettled.pop(fragment, None)
        return self._balance()

    def _tick(self, closed: m.TickClosed) -> list[m.Action]:
        self.tick = max(self.tick, closed.tick)
        if closed.abandoned >= 0:
            return self._abandoned(closed)
        counted = closed.counted >= 0
        if counted:
            self.lead.credit = max(self.lead.credit - 1, 0)
        fragment = due(closed.tick, self.options)
        if fragment is not None and self.lead.published.get(fragment, -1) < closed.tick:
            if counted:
                self.wanted[fragment] = None
            if self._waits(counted=counted):
                self.lead.unsettled[fragment] = closed.tick
        return [*self._watch(), *self._balance()]

    def _abandoned(self, closed: m.TickClosed) -> list[m.Action]:
        """A round came to nothing: do not wait for it, but have a copy ready for when it is tried again."""
        if closed.counted >= 0:
            self.wanted[closed.abandoned] = None
            self.lead.credit = self._capped(self.lead.credit + 1)
        self.pulls.pop(closed.abandoned, None)
        return [*self._watch(), *self._settle(closed.abandoned)]

    def _capped(self, credit: int) -> int:
        return min(credit, self.options.credit_max)

    def _waits(self, *, counted: bool) -> bool:
        """Whether a closed due tick is one to wait for: at τ = 0, only with its own push in the round."""
        return self.options.lead_steps is not None and (counted or self.options.overlap_steps > 0)

    def _pull(self, pull: m.Pull) -> list[m.Action]:
        if not 0 <= pull.fragment < len(self.versions) or self.state not in ("running", "stopping"):
            return [m.Notice(f"ignored pull fragment={pull.fragment} state={self.state}", "warning")]
        self.tick = max(self.tick, pull.tick)
        if self.options.lead_steps is not None:
            self.lead.unsettled[pull.fragment] = pull.tick
        if pull.fragment in self.snapshots:
            return [self._push(pull), *self._balance()]
        if self.counters[pull.fragment].step == self.step:
            # An update has just landed on it: weight 0 (section 3.2), and nothing to wait for.
            self.wanted.pop(pull.fragment, None)
            nothing = m.Send(m.SYNCER, m.Nothing(pull.fragment, pull.tick))
            return [nothing, *self._settle(pull.fragment)]
        self.pulls[pull.fragment] = pull
        return [*self._watch(), *self._balance()]

    def _push(self, pull: m.Pull) -> m.Action:
        snapshot = self.snapshots[pull.fragment]
        self.wanted.pop(pull.fragment, None)
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
        fragment = update.fragment
        if not 0 <= fragment < len(self.versions):
            # A worker without a model yet: its join with the model's schema has everything sent again.
            return [m.Notice(f"ignored update fragment={fragment} state={self.state}")]
        self.tick = max(self.tick, update.tick)
        self.lead.published[fragment] = update.tick
        if self.lead.unsettled.get(fragment, update.tick + 1) <= update.tick:
            del self.lead.unsettled[fragment]
        self.asked[fragment] = update.version
        self.wanted.pop(fragment, None)
        arrived = m.Send(m.SYNCER, m.Arrived(fragment, update.version))
        return [
            *([arrived] if self.connected and self.role == "learner" else []),
            m.Apply(fragment, update.version),
            *self._watch(),
            *self._balance(),
        ]

    def _done(self, done: m.Done) -> list[m.Action]:
        self.tick = max(self.tick, done.tick)
        if self.state == "stopping":
            return []
        self.state, self.done = "stopping", done
        return self._stop_when_complete()

    def _stop_when_complete(self) -> list[m.Action]:
        """A learner stops at once; an observer once it holds the final version of every fragment."""
        if self.done is None:
            return []
        behind = any(held < final for held, final in zip(self.versions, self.done.versions, strict=False))
        return [] if self.role == "observer" and behind else [m.Stop(self.done.reason)]

    # ---- what the compute port did ----

    def _step(self, step: m.StepCompleted) -> list[m.Action]:
        assert self.state in ("running", "stopping"), "a step before the model was adopted"
        self.step = step.step
        self.tokens += step.tokens
        self.snapshots = {fragment: self._snapshot(fragment) for fragment in step.copied}
        self.lead.credit = self._capped(self.lead.credit + 1)
        if not self.connected:
            return [*self._watch(), *self._balance()]
        report = m.Send(m.SYNCER, m.Progress(self.step, self.tokens, step.step_s))
        answers = [self._push(self.pulls.pop(p)) for p in sorted(self.pulls) if p in step.copied]
        return [report, *answers, *self._watch(), *self._balance()]

    def _snapshot(self, fragment: int) -> Snapshot:
        mark = self.counters[fragment]
        base, steps = self.versions[fragment], self.step - mark.step
        return Snapshot(self.step, base, steps, self.tokens - mark.tokens, self.tokens)

    def _land(self, applied: m.Applied) -> list[m.Action]:
        fragment = applied.fragment
        self.versions[fragment] = applied.version
        self.counters[fragment] = Counters(self.step, self.tokens)
        self.snapshots.pop(fragment, None)
        actions: list[m.Action] = []
        if self.connected:
            landed = m.Landed(fragment, applied.version, applied.step, self.tokens)
            actions.append(m.Send(m.SYNCER, landed))
        if fragment in self.pulls:
            pull = self.pulls.pop(fragment)
            actions += self._pull(pull)
        if applied.version == self.asked.get(fragment):
            self.adopted.add(fragment)
            self.adopted_step = self.step
            actions += self._complete(fragment)
        return actions + (self._stop_when_complete() if self.role == "observer" else [])

    def _complete(self, fragment: int) -> list[m.Action]:
        """A fragment that was missing is there; with the last of them the learner may be counted again."""
        if fragment not in self.missing:
            return []
        self.missing.discard(fragment)
        if self.missing:
            return []
        # The syncer counts from this moment on; what was stepped on the old weights does not count.
        self.lead.credit = 0
        return self._adopted() if self.state == "adopting" else self._balance()

    def _leave(self, reason: str) -> list[m.Action]:
        self.state = "finished"
        unmerged = tuple(self.tokens - mark.tokens for mark in self.counters)
        goodbye = m.Send(m.SYNCER, m.Leave(self.tokens, unmerged, reason))
        return [*([goodbye] if self.connected else []), m.Finish(reason)]

    # ---- what it wants next ----

    def _watch(self) -> list[m.Action]:
        """Ask for copies of what can be pulled next, and of what was asked for already."""
        if self.state != "running" or self.role == "observer":
            return []
        ahead = self.options.overlap_steps + 1
        if self.options.lead_steps is not None:
            # Each report counts at a tick of its own, and the step now under way makes one more.
            ahead = max(ahead, self.lead.credit + 1)
        soon = due_between(self.tick + 1, self.tick + ahead, self.options)
        wanted = tuple(dict.fromkeys((*self.pulls, *self.wanted, *soon)))
        if wanted == self.copying:
            return []
        self.copying = wanted
        return [m.Copy(wanted)]

    def _balance(self) -> list[m.Action]:
        """Hold or resume: at τ = 0 at every due step, with `max_lead_steps` when too far ahead."""
        if self.state != "running":
            return []
        hold = not self.pulls and self._ahead()
        if hold == self.lead.holding:
            return []
        self.lead.holding = hold
        return [m.Hold()] if hold else [m.Resume()]

    def _ahead(self) -> bool:
        allowed = self.options.lead_steps
        if allowed is None:
            return False
        # The newest report can be counted at tick `expected` at the earliest.
        expected = self.tick + self.lead.credit
        limit = expected - allowed
        if any(tick <= limit for tick in self.lead.unsettled.values()):
            return True
        return any(due(tick, self.options) is not None for tick in range(self.tick + 1, limit + 1))
