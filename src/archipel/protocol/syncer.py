"""The syncer's machine: ticks, quorum, grace, pull, merge, publish (Algorithm 2, section 3.2).

    tick t:  closed t−1 ─▶ open ─▶ K fresh reports ─▶ grace window ─▶ closed ─▶ (a fragment is due) round ─▶ published

Tick t+1 opens when tick t closes, so that its quorum and grace overlap the pull and merge of t; but not while
max(τ, 1) rounds are in flight, nor while the fragment it needs is, nor, at τ = 0, while any is.

Invariants: the tick and every version only grow within an epoch; one round in flight per fragment; no round without
a quorum of learners that hold a full model; a push is folded only if it was asked for, names a base version that is
still kept and carries tokens no other push or landing has used; what is refused leaves no trace but a notice.
"""

from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from . import messages as m
from .ledger import Ledger
from .membership import Member, choose_shard, schema_difference
from .quorum import MovingAverage, Report, Tempo, Tick, judge, median_step_s
from .rounds import Rounds
from .schedule import SyncOptions, due

LEAVE_S_MIN = 10.0  # after the last tick, how long to wait for goodbyes


@dataclass
class SyncerMachine:
    """`settings`: the whole run's options as plain data, handed to every learner. `shards`: of the data."""

    run: str
    options: SyncOptions
    schema: tuple[m.TensorSpec, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    shards: int = 64
    epoch: int = 1
    tick: int = 0  # newest closed tick
    rounds_merged: int = 0
    versions: list[int] = field(default_factory=list)
    fork: list[int] = field(default_factory=list)  # versions at which this epoch began
    members: dict[str, Member] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)  # worker -> shard
    positions: dict[str, int] = field(default_factory=dict)  # worker -> tokens drawn from its shard, as known
    collecting: Tick | None = None
    tempo: Tempo = field(default_factory=Tempo)
    ledger: Ledger = field(default_factory=lambda: Ledger(0))
    rounds: Rounds = field(init=False)
    phase: str = "running"  # running | parting | finished
    parting_until: float = 0.0
    idle_since: float | None = None
    said: str = ""
    again_at: float | None = None  # when the open tick's verdict could change by itself
    alarm_at: float | None = None

    def __post_init__(self) -> None:
        assert self.options.fragments <= self.options.interval_steps, (
            "P above H: a fragment would never be due"
        )
        self.versions = self.versions or [0] * self.options.fragments
        self.fork = self.fork or list(self.versions)
        self.ledger = self.ledger if self.ledger.fragments else Ledger(self.options.fragments)
        self.rounds = Rounds(self.options, self.members, self.ledger, self.tempo, self.versions)

    def handle(self, now: float, event: m.Event) -> list[m.Action]:
        """Return what to do about the event, then whatever ticks and rounds can go on because of it."""
        if self.phase == "finished":
            return []
        actions = self._react(now, event)
        actions += self._expire(now)
        actions += self._advance(now)
        return actions + self._alarm(now)

    def _react(self, now: float, event: m.Event) -> list[m.Action]:
        match event:
            case m.Received(sender=sender, message=message):
                return self._receive(now, sender, message)
            case m.Disconnected(worker=worker, reason=reason):
                return self._gone(now, worker, reason)
            case m.Folded(fragment=fragment, worker=worker):
                return self.rounds.folded(now, fragment, worker)
            case m.Rejected():
                return self.rounds.rejected(now, event)
            case m.Merged():
                return self._publish(event)
            case m.MergeFailed(fragment=fragment, reason=reason):
                return self.rounds.abandon(fragment, reason)
            case m.StopRequested(reason=reason):
                self.phase = "finished"
                return [m.Save(self.rounds_merged), m.Finish(reason or "stopped", complete=False)]
            case _:
                return []

    # ---- messages ----

    def _receive(self, now: float, sender: str, message: m.Message) -> list[m.Action]:
        if isinstance(message, m.Join):
            return self._join(now, sender, message)
        member = self.members.get(sender)
        if member is None or not member.connected:
            return [
                m.Notice(f"ignored worker={sender} message={type(message).__name__} not a member", "warning")
            ]
        member.heard_at = now
        match message:
            case m.Progress():
                return self._progress(now, member, message)
            case m.Push():
                return self._push(now, member, message)
            case m.Arrived(fragment=fragment, version=version):
                self.rounds.arrived(now, fragment, version)
                return []
            case m.Landed():
                return self._landed(now, member, message)
            case m.Leave():
                return self._leave(now, member, message)
            case m.Heartbeat():
                return []
            case _:
                return [m.Notice(f"ignored worker={sender} message={type(message).__name__}", "warning")]

    def _progress(self, now: float, member: Member, progress: m.Progress) -> list[m.Action]:
        if progress.step <= member.step or progress.tokens < member.tokens or not 0 <= progress.step_s < 1e9:
            return [m.Notice(f"ignored progress worker={member.name} step={progress.step}", "warning")]
        member.step, member.tokens = progress.step, progress.tokens
        self.ledger.reported(member.name, progress.tokens)
        self.positions[member.name] = member.start + progress.tokens
        member.quiet_since = now
        member.step_s.add(progress.step_s)
        if member.live:
            member.reports += 1
            member.credit = min(member.credit + 1, self.options.interval_steps)
        return []

    def _landed(self, now: float, member: Member, landed: m.Landed) -> list[m.Action]:
        if not 0 <= landed.fragment < self.options.fragments:
            return [m.Notice(f"ignored landing worker={member.name} fragment={landed.fragment}", "warning")]
        member.landed[landed.fragment] = landed.version
        if member.role == "learner":
            self.ledger.landed(member.name, landed.fragment, landed.total, landed.version)
        if landed.fragment in member.awaiting:
            member.awaiting.discard(landed.fragment)
            if not member.awaiting:
                return self._ready(now, member)
        return []

    def _ready(self, now: float, member: Member) -> list[m.Action]:
        member.quiet_since = now
        member.counted = member.step
        return [m.Notice(f"ready worker={member.name} tick={self.tick} shard={member.shard}")]

    def _push(self, now: float, member: Member, push: m.Push) -> list[m.Action]:
        if not 0 <= push.fragment < self.options.fragments or member.role != "learner":
            return [m.Notice(f"ignored push worker={member.name} fragment={push.fragment}", "warning")]
        return self.rounds.pushed(now, member, push)

    def _publish(self, merged: m.Merged) -> list[m.Action]:
        self.rounds_merged += 1
        actions = self.rounds.publish(merged)
        if self.rounds_merged % self.options.checkpoint_rounds == 0:
            actions.append(m.Save(self.rounds_merged))
        return actions

    # ---- joining and leaving ----

    def _join(self, now: float, name: str, join: m.Join) -> list[m.Action]:
        refusal = self._refuse_join(name, join)
        if refusal:
            return [m.Notice(f"refused worker={name} reason={refusal!r}", "warning"),
                    m.Send(name, m.Refused(refusal, final=True))]  # fmt: skip
        shard = choose_shard(name, join, self.taken, self.shards) if join.role == "learner" else -1
        if shard is None:
            return [
                m.Send(name, m.Refused(f"all data.shards={self.shards} are taken: raise data.shards", True))
            ]
        known = self.members.get(name)
        same = known is not None and known.incarnation == join.incarnation and known.joined
        if join.role == "learner":
            self._enter_ledger(name, join, shard, same)
        member = Member(name, join.role, join.incarnation, shard, self._start(name, join, known, same))
        member.heard_at = member.quiet_since = now
        member.step = member.counted = join.step
        member.tokens = join.tokens
        member.joined = bool(join.schema) or (join.role == "observer" and bool(join.versions))
        if known is not None:
            member.transfer_s, member.step_s = known.transfer_s, known.step_s
            member.folded = known.folded if same else {}
        self.members[name] = member
        self.idle_since = None
        return self._welcome(member, join)

    def _refuse_join(self, name: str, join: m.Join) -> str:
        if join.protocol != m.PROTOCOL_VERSION:
            return (
                f"protocol version {join.protocol}, the run speaks {m.PROTOCOL_VERSION}: "
                "install the same archipel release on both sides"
            )
        if join.run and join.run != self.run:
            return f"run {join.run!r}, this syncer serves {self.run!r}: check the address or the run's name"
        if join.schema and (difference := schema_difference(self.schema, join.schema)):
            return f"the model differs: {difference}; build the model of the run's configuration"
        if join.versions and len(join.versions) != self.options.fragments:
            return f"{len(join.versions)} fragments held, the run has {self.options.fragments}: restart the worker"
        return ""

    def _start(self, name: str, join: m.Join, known: Member | None, same: bool) -> int:
        """Return the data position at which this incarnation began."""
        if same:
            assert known is not None
            return known.start
        return max(self.positions.get(name, 0), join.position) - join.tokens

    def _enter_ledger(self, name: str, join: m.Join, shard: int, same: bool) -> None:
        self.taken[name] = shard
        account = self.ledger.accounts.get(name)
        if account is not None and account.open and account.incarnation == join.incarnation:
            open_tokens = [tokens for _, tokens in join.counters]
            if open_tokens and len(open_tokens) == len(join.versions) == self.options.fragments:
                self.ledger.returned(name, join.tokens, open_tokens, list(join.versions))
            return
        if account is not None:
            # Its shard position shows what the incarnation before it consumed after its last report.
            unseen = join.position - join.tokens - self.positions.get(name, 0)
            if account.open:
                self.ledger.lose(name)
            if join.position >= 0 and unseen >= 0:
                self.ledger.tail(name, unseen)
        self.ledger.begin(name, join.incarnation)
        self.ledger.reported(name, join.tokens)
        start = max(self.positions.get(name, 0), join.position - join.tokens)
        self.positions[name] = start + join.tokens

    def _welcome(self, member: Member, join: m.Join) -> list[m.Action]:
        follow = self._stale(join) if member.joined or member.role == "observer" else []
        member.joined = member.joined or member.role == "observer"
        member.awaiting = set(follow)
        member.landed = dict(enumerate(join.versions))
        member.credit = self._credit(join) if not follow else 0
        welcome = m.Welcome(
            run=self.run,
            epoch=self.epoch,
            settings=self.settings,
            shard=member.shard,
            position=member.start + member.tokens,
            tick=self.tick,
            versions=tuple(self.versions),
            follow=tuple(follow),
            credit=member.credit,
        )
        updates = [m.Send(member.name, m.Update(p, self.versions[p], self.tick)) for p in follow]
        joined = m.Notice(f"joined worker={member.name} role={member.role} tick={self.tick}")
        return [*([joined] if member.joined else []), m.Send(member.name, welcome), *updates]

    def _stale(self, join: m.Join) -> list[int]:
        """Return the fragments of which the worker does not hold the current version of this lineage."""
        held = join.versions or (-1,) * self.options.fragments
        return [
            p
            for p, version in enumerate(self.versions)
            if held[p] != version
            # A version number of the epoch before means the same weights only up to where the epochs part.
            or (join.epoch != self.epoch and (join.epoch != self.epoch - 1 or version > self.fork[p]))
        ]

    def _credit(self, join: m.Join) -> int:
        """At τ = 0, the steps since the last published round still count."""
        if self.options.overlap_steps or not join.counters:
            return 0
        newest = max(range(len(self.versions)), key=lambda p: (self.versions[p], -p))
        return min(join.counters[newest][0], self.options.interval_steps)

    def _leave(self, now: float, member: Member, leave: m.Leave) -> list[m.Action]:
        member.left = True
        if member.role == "learner" and self.ledger.accounts[member.name].open:
            unmerged = list(leave.unmerged)
            self.ledger.left(member.name, leave.tokens, unmerged)
            self.positions[member.name] = member.start + leave.tokens
        return [
            m.Notice(f"left worker={member.name} tokens={leave.tokens}"),
            *self._gone(now, member.name, "left"),
        ]

    def _gone(self, now: float, name: str, reason: str) -> list[m.Action]:
        member = self.members.get(name)
        if member is None or not member.connected:
            return []
        member.connected = False
        actions: list[m.Action] = [m.Notice(f"gone worker={name} reason={reason!r} tick={self.tick}")]
        actions += self.rounds.drop(now, name)
        if not self._live() and member.role == "learner" and member.joined and self.phase == "running":
            self.idle_since = now
            actions += [m.Save(self.rounds_merged), m.Notice("no learners", "warning")]
        return actions

    # ---- ticks ----

    def _live(self) -> list[Member]:
        return [member for member in self.members.values() if member.live]

    def _reports(self) -> list[Report]:
        return [member.report(self.options.overlap_steps) for member in self._live()]

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
            verdict = judge(now, self.collecting, self._reports(), self.tempo, self.options)
            if not verdict.close:
                self.again_at = verdict.again_at
                actions += self._say(verdict.reason)
                break
            actions += self._close(now, self.collecting)
        return actions + (self._parted(now) if self.phase == "parting" else [])

    def _over(self) -> bool:
        return self.tick >= self.options.steps and not self.rounds.flying and not self.rounds.owed

    def _may_open(self) -> bool:
        if self.tick >= self.options.steps and not self.rounds.owed:
            return False
        if len(self.rounds.flying) >= max(self.options.overlap_steps, 1):
            return False
        return due(self.tick + 1, self.options) not in self.rounds.flying

    def _say(self, reason: str) -> list[m.Action]:
        """Tell those who watch, once, that too few learners are live."""
        reason = reason if reason.startswith("waiting for learners") else ""
        if reason == self.said:
            return []
        self.said = reason
        return [m.Notice(reason, "warning")] if reason else []

    def _close(self, now: float, tick: Tick) -> list[m.Action]:
        assert tick.reached_at is not None
        reports = self._reports()
        counted = {report.name: self.members[report.name].step for report in reports if report.fresh}
        tally = m.Tally(
            tick=tick.number,
            workers=tuple(counted),
            step_s=median_step_s(reports, now) or 0.0,
            quorum_s=self.tempo.quorum_s.get(),
            sync_s=self.tempo.sync_s.get(),
            window_s=tick.window_s,
            used_s=now - tick.reached_at,
        )
        for name in counted:
            member = self.members[name]
            member.counted, member.credit = member.step, max(member.credit - 1, 0)
        again = tick.number == self.tick  # the last tick collects again for what it owes
        fragments = [*self.rounds.owed, None if again else due(tick.number, self.options)]
        self.tick, self.collecting, self.said = tick.number, None, ""
        self.rounds.owed.clear()
        actions: list[m.Action] = [tally]
        for report in reports:
            closed = m.TickClosed(tick.number, counted.get(report.name, -1))
            actions.append(m.Send(report.name, closed))
        for fragment in dict.fromkeys(fragments):
            if fragment is not None:
                actions += self.rounds.start(now, fragment, tick.number, counted)
        return actions

    # ---- the end, and the clock ----

    def _part(self, now: float) -> list[m.Action]:
        self.phase = "parting"
        patience_s = max(LEAVE_S_MIN, 5 * (median_step_s(self._reports(), now) or 0.0))
        self.parting_until = now + patience_s
        done = m.Done(self.tick, f"tick {self.tick} of {self.options.steps}")
        everyone = [m.Send(name, done) for name, member in self.members.items() if member.connected]
        return [m.Save(self.rounds_merged), *everyone, *self._parted(now)]

    def _parted(self, now: float) -> list[m.Action]:
        here = any(member.connected and not member.left for member in self.members.values())
        if here and now < self.parting_until:
            return []
        self.phase = "finished"
        self.ledger.end()
        return [m.Save(self.rounds_merged), m.Finish(f"tick {self.tick} of {self.options.steps}")]

    def _expire(self, now: float) -> list[m.Action]:
        actions = self.rounds.expire(now)
        for member in list(self.members.values()):
            if member.connected and now - member.heard_at > self.options.silence_s:
                actions += [m.Close(member.name, "silent"), *self._gone(now, member.name, "silent")]
        idle_until = self._idle_until()
        if idle_until is not None and now >= idle_until:
            self.phase = "finished"
            actions += [m.Save(self.rounds_merged), m.Finish("no learners", complete=False)]
        return actions

    def _idle_until(self) -> float | None:
        if self.idle_since is None or not self.options.idle_exit_s:
            return None
        return self.idle_since + self.options.idle_exit_s

    def _alarm(self, now: float) -> list[m.Action]:
        """Ask to be woken at the earliest moment that could change something by itself."""
        if self.phase == "finished":
            return []
        moments = [*self.rounds.deadlines()]
        silences = [member.heard_at for member in self.members.values() if member.connected]
        if silences:
            # Looked at a few times a period, not after every message.
            quiet_at = min(silences) + self.options.silence_s
            moments.append(max(quiet_at, now + self.options.silence_s / 8))
        moments += [moment for moment in (self.again_at, self._idle_until()) if moment is not None]
        if self.phase == "parting":
            moments.append(self.parting_until)
        nearest = min(moments, default=None)
        if nearest is None or (self.alarm_at is not None and now < self.alarm_at <= nearest):
            return []  # an alarm that rings too early does no harm
        self.alarm_at = nearest
        return [m.Wake(nearest)]

    # ---- what outlives the process ----

    def state(self) -> "SyncerState":
        """Return what a checkpoint keeps of this machine; rounds in flight are not part of it."""
        return SyncerState(
            epoch=self.epoch,
            tick=self.tick,
            rounds_merged=self.rounds_merged,
            versions=list(self.versions),
            taken=dict(self.taken),
            positions=dict(self.positions),
            quorum_s=self.tempo.quorum_s.value,
            sync_s=self.tempo.sync_s.value,
            ledger=self.ledger,
        )

    def restore(self, state: "SyncerState") -> None:
        """Begin a new epoch where the checkpoint ended; learners that come back are told what to discard."""
        assert len(state.versions) == self.options.fragments
        self.epoch, self.tick, self.rounds_merged = state.epoch + 1, state.tick, state.rounds_merged
        self.versions[:] = state.versions
        self.fork = list(state.versions)
        self.taken, self.positions = dict(state.taken), dict(state.positions)
        self.tempo.quorum_s, self.tempo.sync_s = MovingAverage(state.quorum_s), MovingAverage(state.sync_s)
        self.ledger = self.rounds.ledger = state.ledger


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
