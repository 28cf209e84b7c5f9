"""The syncer's machine: ticks, quorum, grace, pull, merge, publish (Algorithm 2, section 3.2).

    tick t:  t−1 closed ─▶ open ─▶ K fresh reports ─▶ grace window ─▶ closed ─▶ round, if a fragment is due
    syncer:  running ─▶ parting (the last tick is over: learners say goodbye) ─▶ finished

Tick t+1 opens when tick t closes, so that its quorum and grace overlap the pull and merge of t; but not while
max(τ, 1) rounds are in flight, nor while the fragment it needs is.

Invariants: the tick and every version only grow within an epoch; one round in flight per fragment; no round
without a quorum of learners that hold a full model; what a worker says is checked before it changes anything,
and what is refused leaves no trace but a notice.
"""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from . import messages as m
from .ledger import Ledger
from .membership import COUNT_MAX, Member, Roster
from .quorum import (
    HUNG_S_MIN,
    TOO_FEW_FRESH,
    MovingAverage,
    Tempo,
    Tick,
    Verdict,
    hangs_at,
    judge,
    median_step_s,
    needed,
)
from .rounds import Rounds
from .schedule import SyncOptions, due

LEAVE_S_MIN = 10.0  # after the last tick, how long to wait for goodbyes
LAST_TRIES = 3  # how often the last tick collects again for rounds that came to nothing


@dataclass
class SyncerMachine:
    """`settings`: the whole run's options as plain data, handed to every learner. `shards`: of the data."""

    run: str
    options: SyncOptions
    schema: tuple[m.TensorSpec, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    shards: int = 64
    tick: int = 0  # newest closed tick
    rounds_merged: int = 0
    versions: list[int] = field(default_factory=list)
    members: dict[str, Member] = field(default_factory=dict)
    collecting: Tick | None = None
    tempo: Tempo = field(default_factory=Tempo)
    ledger: Ledger = field(default_factory=lambda: Ledger(0))
    roster: Roster = field(init=False)
    rounds: Rounds = field(init=False)
    begun: bool = False
    phase: str = "running"
    tries_left: int = LAST_TRIES
    parting_until: float = 0.0
    idle_since: float | None = None  # without a learner since then; None: there is one
    said: str = ""
    live: list[Member] = field(default_factory=list)  # refreshed whenever a member changes
    again_at: float | None = None  # when the open tick's verdict could change by itself
    listen_at: float = float("inf")  # when to look for members gone silent
    alarm_at: float | None = None

    def __post_init__(self) -> None:
        fragments = self.options.fragments
        assert fragments <= self.options.interval_steps, "P above H: a fragment would never be due"
        self.versions = self.versions or [0] * fragments
        self.ledger = self.ledger if self.ledger.fragments else Ledger(fragments)
        published = [0] * fragments
        self.roster = Roster(
            run=self.run,
            options=self.options,
            schema=self.schema,
            settings=self.settings,
            shards=self.shards,
            members=self.members,
            ledger=self.ledger,
            versions=self.versions,
            published=published,
            fork=list(self.versions),
        )
        self.rounds = Rounds(
            self.options, self.members, self.ledger, self.tempo, self.versions, published=published
        )

    @property
    def epoch(self) -> int:
        """Grows by one each time the syncer resumes from a checkpoint."""
        return self.roster.epoch

    def handle(self, now: float, event: m.Event) -> list[m.Action]:
        """Return what to do about the event, then whatever ticks and rounds can go on because of it."""
        if self.phase == "finished":
            return []
        actions = [] if self.begun else self._begin(now)
        actions += self._react(now, event)
        actions += self._expire(now)
        actions += self._advance(now)
        return actions + self._alarm(now)

    def _begin(self, now: float) -> list[m.Action]:
        """Save first of all: an epoch that nobody could tell from the next one would have no name."""
        self.begun = True
        self.idle_since = now
        return [m.Save(self.rounds_merged)]

    def _react(self, now: float, event: m.Event) -> list[m.Action]:
        match event:
            case m.Received(sender=sender, message=message):
                return self._receive(now, sender, message)
            case m.Folded(fragment=fragment, worker=worker):
                return self.rounds.folded(now, fragment, worker)
            case m.Merged():
                return self._publish(event)
            case m.Disconnected(worker=worker, reason=reason):
                return self._gone(now, worker, reason)
            case m.Rejected():
                return self.rounds.rejected(now, event)
            case m.MergeFailed(fragment=fragment, reason=reason):
                return self.rounds.failed(fragment, reason)
            case m.StopRequested(reason=reason):
                return self._finish(reason or "stopped", complete=False)
            case _:
                return []

    # ---- messages ----

    def _receive(self, now: float, sender: str, message: m.Message) -> list[m.Action]:
        if isinstance(message, m.Join):
            return self._join(now, sender, message)
        member = self.members.get(sender)
        if member is None or not member.connected:
            if isinstance(message, m.Heartbeat):
                return []  # a worker that builds its model says nothing else for a while
            return self._ignore(sender, message, "not a member")
        member.heard_at = now
        match message:
            case m.Heartbeat():
                return []
            case m.Leave():
                return self._leave(now, member, message)
            case m.Landed():
                return self._landed(now, member, message)
        if member.role != "learner":
            return self._ignore(sender, message, "an observer")
        match message:
            case m.Progress():
                return self._progress(now, member, message)
            case m.Arrived(fragment=fragment, version=version):
                self.rounds.arrived(now, sender, fragment, version)
                return []
            case m.Push():
                return self.rounds.pushed(now, member, message)
            case m.Nothing():
                return self.rounds.declined(now, member, message)
            case _:
                return self._ignore(sender, message, "not for a syncer")

    def _ignore(self, sender: str, message: m.Message, reason: str) -> list[m.Action]:
        text = f"ignored worker={sender} message={type(message).__name__} reason={reason!r}"
        return [m.Notice(text, "warning")]

    def _progress(self, now: float, member: Member, progress: m.Progress) -> list[m.Action]:
        # Written so that a step time that is no number fails, too.
        plausible = (
            member.step < progress.step < COUNT_MAX
            and member.tokens <= progress.tokens < COUNT_MAX
            and 0 <= progress.step_s < 1e9
        )
        if not plausible:
            return self._ignore(member.name, progress, f"impossible counts step={progress.step}")
        steps = progress.step - member.step
        member.step, member.tokens = progress.step, progress.tokens
        self.ledger.reported(member.name, progress.tokens)
        self.roster.positions[member.name] = member.start + progress.tokens
        member.quiet_since = now
        member.step_s.add(progress.step_s)
        if member.live:
            member.reports += 1
            member.credit = min(member.credit + steps, self.options.credit_max)
        return []

    def _landed(self, now: float, member: Member, landed: m.Landed) -> list[m.Action]:
        fragment, version = landed.fragment, landed.version
        if not 0 <= fragment < self.options.fragments:
            return self._ignore(member.name, landed, f"no fragment {fragment}")
        if member.role == "learner" and not self.ledger.landed(member.name, fragment, landed.total, version):
            return self._ignore(member.name, landed, f"impossible total={landed.total}")
        member.landed[fragment] = version
        # What landed may be an update from before the channel broke, even of another lineage.
        if member.awaiting.get(fragment, version + 1) <= version <= self.versions[fragment]:
            del member.awaiting[fragment]
            if not member.awaiting:
                return self._ready(now, member)
        return []

    def _ready(self, now: float, member: Member) -> list[m.Action]:
        member.quiet_since, member.credit = now, 0
        self._refresh()
        return [m.Notice(f"ready worker={member.name} tick={self.tick} shard={member.shard}")]

    def _publish(self, merged: m.Merged) -> list[m.Action]:
        self.rounds_merged += 1
        actions = self.rounds.publish(merged)
        if self.rounds_merged % self.options.checkpoint_rounds == 0:
            actions.append(m.Save(self.rounds_merged))
        return actions

    # ---- joining and leaving ----

    def _join(self, now: float, name: str, join: m.Join) -> list[m.Action]:
        # A channel that replaces another: what was asked for on the old one will not be answered.
        actions = self.rounds.drop(now, name)
        actions += self.roster.join(now, self.tick, name, join)
        self._refresh()
        self.listen_at = min(self.listen_at, now + self.options.silence_s)
        if join.role == "learner" and name in self.members:
            self.idle_since = None
        if self.phase == "parting":
            actions.append(m.Send(name, self._goodbye()))
        return actions

    def _leave(self, now: float, member: Member, leave: m.Leave) -> list[m.Action]:
        if not member.tokens <= leave.tokens < COUNT_MAX:
            return self._ignore(member.name, leave, f"impossible tokens={leave.tokens}")
        member.left = True
        if member.role == "learner":
            self.ledger.left(member.name, leave.tokens, list(leave.unmerged))
            self.roster.positions[member.name] = member.start + leave.tokens
        notice = m.Notice(f"left worker={member.name} tokens={leave.tokens} reason={leave.reason!r}")
        return [notice, *self._gone(now, member.name, "left")]

    def _gone(self, now: float, name: str, reason: str) -> list[m.Action]:
        member = self.members.get(name)
        if member is None or not member.connected:
            return []
        member.connected = False
        self._refresh()
        actions: list[m.Action] = [m.Notice(f"gone worker={name} reason={reason!r} tick={self.tick}")]
        actions += self.rounds.drop(now, name)
        if member.role == "learner" and not self._learners() and self.phase == "running":
            self.idle_since = now
            actions += [m.Save(self.rounds_merged), m.Notice("no learners", "warning")]
        return actions

    def _learners(self) -> list[Member]:
        return [member for member in self.members.values() if member.connected and member.role == "learner"]

    def _refresh(self) -> None:
        """Call after any change of who is live."""
        self.live = [member for member in self.members.values() if member.live]

    # ---- ticks ----

    def _advance(self, now: float) -> list[m.Action]:
        """Open and close ticks for as long as nothing has to be waited for."""
        actions: list[m.Action] = []
        self.again_at = None
        while self.phase == "running":
            if self.collecting is None:
                if self._over():
                    actions += self._part(now)
                    break
                if not self._may_open():
                    break
                self.collecting = Tick(min(self.tick + 1, self.options.steps), now)
            verdict = judge(now, self.collecting, self.live, self.tempo, self.options)
            if not verdict.close:
                self.again_at = verdict.again_at
                actions += self._say(now, self.collecting, verdict)
                break
            actions += self._close(now, self.collecting)
        return actions + (self._parted(now) if self.phase == "parting" else [])

    def _over(self) -> bool:
        owed = self.rounds.owed and self.tries_left > 0
        return self.tick >= self.options.steps and not self.rounds.flying and not owed

    def _may_open(self) -> bool:
        if self.tick >= self.options.steps:
            return bool(self.rounds.owed) and self.tries_left > 0 and not self.rounds.flying
        if len(self.rounds.flying) >= max(self.options.overlap_steps, 1):
            return False
        return due(self.tick + 1, self.options) not in self.rounds.flying

    def _say(self, now: float, tick: Tick, verdict: Verdict) -> list[m.Action]:
        """Tell those who watch, once, that too few learners are live, or that too few of them step."""
        reason = verdict.reason if verdict.reason.startswith("waiting for learners") else ""
        if verdict.reason == TOO_FEW_FRESH.reason:
            reason = self._hung(now, tick)
        if reason == self.said:
            return []
        self.said = reason
        return [m.Notice(reason, "warning")] if reason else []

    def _hung(self, now: float, tick: Tick) -> str:
        """Return which learners hang, where the tick has waited for them for long and cannot close without.

        It needs no alarm: their couriers' heartbeats, or the lack of them, have us look again.
        """
        if now < tick.opened_at + HUNG_S_MIN:
            return ""
        quiet = [member for member in self.live if not member.fresh and now >= hangs_at(member)]
        hung = [member.name for member in quiet if now >= tick.opened_at + member.patience_s]
        able = len(self.live) - len(hung)
        if not hung or able >= needed(self.options, able):
            return ""
        without = "; sync.quorum_live = true would go on without them" if able else ""
        return (
            f"waiting for steps silent={','.join(hung)} quorum={self.options.quorum}: their couriers are "
            f"heard, their trainers are not, for far longer than a step takes; restart them{without}"
        )

    def _close(self, now: float, tick: Tick) -> list[m.Action]:
        assert tick.reached_at is not None
        counted = {member.name: member.step for member in self.live if member.fresh}
        tally = m.Tally(
            tick=tick.number,
            workers=tuple(counted),
            step_s=tick.step_s or 0.0,
            quorum_s=self.tempo.quorum_s.get(),
            sync_s=self.tempo.sync_s.get(),
            window_s=tick.window_s,
            used_s=now - tick.reached_at,
        )
        again = tick.number == self.tick  # the last tick collects again for what it owes
        fragments = [*self.rounds.owed, None if again else due(tick.number, self.options)]
        self.tick, self.collecting, self.said = tick.number, None, ""
        self.tries_left -= again
        self.rounds.owed.clear()
        actions: list[m.Action] = [tally]
        for member in self.live:
            member.credit = max(member.credit - 1, 0)
            actions.append(m.Send(member.name, m.TickClosed(tick.number, counted.get(member.name, -1))))
        for fragment in dict.fromkeys(fragments):
            if fragment is not None:
                actions += self.rounds.start(now, fragment, tick.number, counted)
        return actions

    # ---- the end, and the clock ----

    def _part(self, now: float) -> list[m.Action]:
        self.phase = "parting"
        self.parting_until = now + max(LEAVE_S_MIN, 5 * (median_step_s(self.live, now) or 0.0))
        everyone = [
            m.Send(name, self._goodbye()) for name, member in self.members.items() if member.connected
        ]
        return [m.Save(self.rounds_merged), *everyone]

    def _goodbye(self) -> m.Done:
        return m.Done(self.tick, f"tick {self.tick} of {self.options.steps}", tuple(self.versions))

    def _parted(self, now: float) -> list[m.Action]:
        here = {name for name, member in self.members.items() if member.connected}
        if here and now < self.parting_until:
            return []
        self.ledger.end(present=here)
        return self._finish(f"tick {self.tick} of {self.options.steps}", complete=True)

    def _finish(self, reason: str, *, complete: bool) -> list[m.Action]:
        self.phase = "finished"
        return [m.Save(self.rounds_merged), m.Finish(reason, complete)]

    def _expire(self, now: float) -> list[m.Action]:
        actions = self.rounds.expire(now) if self.rounds.flying else []
        if now >= self.listen_at:
            actions += self._listen(now)
        idle_until = self._idle_until()
        if idle_until is not None and now >= idle_until and self.phase == "running":
            watchers = [name for name, member in self.members.items() if member.connected]
            done = m.Done(self.tick, "no learners", tuple(self.versions))
            actions += [
                *(m.Send(name, done) for name in watchers),
                *self._finish("no learners", complete=False),
            ]
        return actions

    def _listen(self, now: float) -> list[m.Action]:
        """Part with whoever has been silent for too long; look again a few times a period."""
        actions: list[m.Action] = []
        silence_s = self.options.silence_s
        for member in list(self.members.values()):
            if member.connected and now - member.heard_at >= silence_s:
                actions += [m.Close(member.name, "silent"), *self._gone(now, member.name, "silent")]
        heard = [member.heard_at for member in self.members.values() if member.connected]
        self.listen_at = max(min(heard) + silence_s, now + silence_s / 8) if heard else float("inf")
        return actions

    def _idle_until(self) -> float | None:
        if self.idle_since is None or not self.options.idle_exit_s:
            return None
        return self.idle_since + self.options.idle_exit_s

    def _alarm(self, now: float) -> list[m.Action]:
        """Ask to be woken at the earliest moment that could change something by itself."""
        if self.phase == "finished":
            return []
        moments = [self.listen_at]
        if self.rounds.flying:
            moments += self.rounds.deadlines()
        if self.again_at is not None:
            moments.append(self.again_at)
        if self.phase == "parting":
            moments.append(self.parting_until)
        idle_until = self._idle_until()
        if idle_until is not None:
            moments.append(idle_until)
        nearest = min(moments)
        if nearest == float("inf") or (self.alarm_at is not None and now < self.alarm_at <= nearest):
            return []  # an alarm that rings too early does no harm
        self.alarm_at = nearest
        return [m.Wake(nearest)]

    # ---- what outlives the process ----

    def state(self) -> "SyncerState":
        """Return what a checkpoint keeps of this machine: a copy. Rounds in flight are owed instead."""
        ledger = deepcopy(self.ledger)
        for fragment, round_ in self.rounds.flying.items():
            for worker, stretch in (*round_.folding.items(), *round_.folded.items()):
                ledger.returned(worker, fragment, stretch)
        flying, tick = list(self.rounds.flying), self.tick
        waited_for = due(tick, self.options)
        if self.options.overlap_steps == 0 and waited_for is not None and waited_for in flying:
            # Every learner stands where this tick closed: it closes anew, with the round it had.
            flying.remove(waited_for)
            tick -= 1
        return SyncerState(
            epoch=self.epoch,
            tick=tick,
            rounds_merged=self.rounds_merged,
            versions=list(self.versions),
            taken=dict(self.roster.taken),
            positions=dict(self.roster.positions),
            quorum_s=self.tempo.quorum_s.value,
            sync_s=self.tempo.sync_s.value,
            ledger=ledger,
            published=list(self.rounds.published),
            owed=[*self.rounds.owed, *flying],
        )

    def restore(self, state: "SyncerState") -> None:
        """Begin a new epoch where the checkpoint ended; learners that come back are told what to discard."""
        assert len(state.versions) == self.options.fragments and not self.members
        self.tick, self.rounds_merged = state.tick, state.rounds_merged
        self.versions[:] = state.versions
        self.rounds.published[:] = state.published or [0] * self.options.fragments
        self.rounds.owed[:] = state.owed
        self.roster.epoch, self.roster.fork = state.epoch + 1, list(state.versions)
        self.roster.taken, self.roster.positions = dict(state.taken), dict(state.positions)
        self.tempo.quorum_s, self.tempo.sync_s = MovingAverage(state.quorum_s), MovingAverage(state.sync_s)
        self.ledger = self.rounds.ledger = self.roster.ledger = deepcopy(state.ledger)


class SyncerState(Struct):
    """A syncer's machine at rest."""

    epoch: int
    tick: int
    rounds_merged: int
    versions: list[int]
    taken: dict[str, int]
    positions: dict[str, int]
    quorum_s: float | None
    sync_s: float | None
    ledger: Ledger
    published: list[int] = []  # tick of each fragment's newest version
    owed: list[int] = []  # fragments whose round was in flight
