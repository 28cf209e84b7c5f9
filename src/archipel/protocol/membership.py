"""Who is live, with what identity, on which shard, and what a worker is told when it joins.

A worker is known by its name; each process start is a new incarnation of it. A name keeps its shard, so that
no two workers read the same data; a new name takes the number it ends in when that is free, else the lowest
free one. When none is free, it takes over the shard of the name that has been away longest, and goes on where
that one's data stopped: hosts that come and go under ever new names do not use the shards up. A worker joins
twice: first without a schema, to learn the settings, then with its model's.

Invariants: a learner counts only while it is connected, has joined and holds a full, current model; an
observer never counts and has no account; a data position only grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import messages as m
from .ledger import Ledger
from .quorum import MovingAverage, patience_s
from .schedule import SyncOptions

COUNT_MAX = 2**53  # steps, tokens and positions above this are refused: JSON would round them


@dataclass
class Member:
    """One worker as the syncer sees it."""

    name: str
    role: str
    incarnation: str
    shard: int
    start: int  # data position, in tokens, where this incarnation began
    connected: bool = True
    joined: bool = False  # its schema was accepted
    left: bool = False
    awaiting: dict[int, int] = field(default_factory=dict)  # fragment -> version to hold before it may report
    heard_at: float = 0.0
    quiet_since: float = 0.0
    step: int = 0
    tokens: int = 0
    reports: int = 0
    credit: int = 0  # reports not yet counted; the newest only, where learners never wait
    step_s: MovingAverage = field(default_factory=MovingAverage)
    transfer_s: MovingAverage = field(default_factory=MovingAverage)
    landed: dict[int, int] = field(default_factory=dict)  # fragment -> version it holds
    merged_into: dict[int, int] = field(default_factory=dict)  # fragment -> version its last push went into

    @property
    def live(self) -> bool:
        """A learner that may be counted and pulled from."""
        return self.role == "learner" and self.connected and self.joined and not (self.awaiting or self.left)

    @property
    def fresh(self) -> bool:
        """At least one inner step since it was last counted."""
        return self.credit > 0

    @property
    def pace_s(self) -> float | None:
        """Moving average of its step time."""
        return self.step_s.value

    @property
    def patience_s(self) -> float:
        """Quiet for longer, its trainer hangs."""
        return patience_s(self.step_s.get(), self.transfer_s.get())

    def settled(self, fragment: int) -> bool:
        """Whether its last merged push of the fragment has been answered by an update that landed."""
        return self.landed.get(fragment, 0) >= self.merged_into.get(fragment, 0)


@dataclass
class Roster:
    """Takes workers in. Shares `members`, `ledger` and `versions` with the syncer's machine."""

    run: str
    options: SyncOptions
    schema: tuple[m.TensorSpec, ...]
    settings: dict[str, Any]
    shards: int
    members: dict[str, Member]
    ledger: Ledger
    versions: list[int]
    published: list[int]  # tick of each fragment's newest version
    taken: dict[str, int] = field(default_factory=dict)  # worker -> shard
    positions: dict[str, int] = field(default_factory=dict)  # worker -> tokens drawn from its shard, as known
    epoch: int = 1
    fork: list[int] = field(default_factory=list)  # versions at which this epoch began

    def join(self, now: float, tick: int, name: str, join: m.Join) -> list[m.Action]:
        """Make the worker a member, or say what is wrong with it."""
        if refusal := self._refusal(join):
            notice = m.Notice(f"refused worker={name} reason={refusal!r}", "warning")
            return [notice, m.Send(name, m.Refused(refusal, final=True))]
        learner = join.role == "learner"
        shard = choose_shard(name, join.shard, self.taken, self.shards, self.away()) if learner else -1
        if shard is None:
            refusal = f"all data.shards={self.shards} are in use by connected learners: raise data.shards"
            return [m.Notice(f"refused worker={name} reason={refusal!r}", "warning"),
                    m.Send(name, m.Refused(refusal, final=True))]  # fmt: skip
        known = self.members.get(name)
        same = known is not None and known.incarnation == join.incarnation
        former = hand_over(name, shard, self.taken, self.positions) if learner else ""
        start = self._enter(name, join, shard, former) if learner else 0
        member = Member(name, join.role, join.incarnation, shard, start)
        member.heard_at = member.quiet_since = now
        member.step, member.tokens = join.step, join.tokens
        member.joined = bool(join.schema)
        if known is not None:
            member.transfer_s, member.step_s = known.transfer_s, known.step_s
            member.merged_into = known.merged_into if same else {}
        self.members[name] = member
        moved = f"handed over shard={shard} from={former} to={name} position={start + join.tokens}"
        return [*([m.Notice(moved)] if former else []), *self._welcome(tick, member, join)]

    def away(self) -> list[str]:
        """Return the names that have a shard and are not connected, the one gone longest first.

        A name that has not come back since the syncer resumed counts as gone before all others.
        """
        here = {name for name, member in self.members.items() if member.connected}
        gone = [name for name in self.taken if name not in here]
        heard_at = {name: member.heard_at for name, member in self.members.items()}
        return sorted(gone, key=lambda name: heard_at.get(name, float("-inf")))

    def _refusal(self, join: m.Join) -> str:
        """Return what differs between the worker and the run, or ""."""
        if join.protocol != m.PROTOCOL_VERSION:
            return (
                f"protocol version {join.protocol}, the run speaks {m.PROTOCOL_VERSION}: "
                "install the same archipel release on both sides"
            )
        if join.run and join.run != self.run:
            return f"run {join.run!r}, this syncer serves {self.run!r}: check the address or the run's name"
        if join.schema and (difference := schema_difference(self.schema, join.schema)):
            return f"the model differs: {difference}; build the model of the run's configuration"
        for what, held in (("versions", join.versions), ("counters", join.counters)):
            if held and len(held) != self.options.fragments:
                return (
                    f"{len(held)} {what}, the run has {self.options.fragments} fragments: restart the worker"
                )
        numbers = (join.step, join.tokens, join.position + 1, *(n for pair in join.counters for n in pair))
        if not all(0 <= number < COUNT_MAX for number in numbers):
            return f"impossible counts step={join.step} tokens={join.tokens}: restart the worker"
        if any(steps > join.step or tokens > join.tokens for steps, tokens in join.counters):
            return "counters of fragments exceed those of the incarnation: restart the worker"
        return ""

    def _enter(self, name: str, join: m.Join, shard: int, former: str) -> int:
        """Give the learner its account and return the data position at which this incarnation began."""
        known = self.positions.get(name, 0)
        # A position in another shard says nothing about this one, nor does one from before another had it.
        heard = join.shard == shard and not former and self._of_this_run(name, join)
        drawn = join.position if heard else -1
        account = self.ledger.accounts.get(name)
        if account is not None and account.incarnation == join.incarnation and account.open:
            known += max(join.tokens - account.current, 0)
            if join.counters and join.versions:
                open_tokens = [tokens for _, tokens in join.counters]
                self.ledger.resumed(name, join.tokens, open_tokens, list(join.versions))
        else:
            self.ledger.begin(name, join.incarnation)
            # Its position shows what was consumed before it and never reported: by an incarnation that died,
            # or since the checkpoint this syncer came back from.
            if drawn - join.tokens >= known:
                self.ledger.tail(name, drawn - join.tokens - known)
            known += join.tokens
        self.ledger.reported(name, join.tokens)
        self.positions[name] = max(known, drawn, join.tokens)
        return self.positions[name] - join.tokens

    def _of_this_run(self, name: str, join: m.Join) -> bool:
        """Whether the position a learner names can have come about in this run, not in an older one there."""
        if join.schema:
            return True  # it has built the run's model, and was told before where to start
        known = self.members.get(name)
        drew = self.positions.get(name, 0) > 0 or (known is not None and known.joined)
        # A syncer resumed from a checkpoint may have forgotten that it did; where the weights are the first
        # ones, whatever the epoch, the data begins anew with them.
        return drew or any(self.fork)

    def _welcome(self, tick: int, member: Member, join: m.Join) -> list[m.Action]:
        follow = self._stale(join) if member.joined else []
        member.awaiting = {fragment: self.versions[fragment] for fragment in follow}
        member.landed = dict(enumerate(join.versions))
        member.credit = self._credit(tick, join) if member.joined and not follow else 0
        welcome = m.Welcome(
            run=self.run,
            epoch=self.epoch,
            settings=self.settings,
            shard=member.shard,
            position=member.start + member.tokens,
            tick=tick,
            versions=tuple(self.versions),
            follow=tuple(follow),
            credit=member.credit,
        )
        updates = [m.Send(member.name, m.Update(p, self.versions[p], tick)) for p in follow]
        joined = m.Notice(f"joined worker={member.name} role={member.role} tick={tick}")
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

    def _credit(self, tick: int, join: m.Join) -> int:
        """At τ = 0, the steps since the last published round count, less the ticks that did count since."""
        if self.options.overlap_steps or not join.counters:
            return 0
        newest = max(range(self.options.fragments), key=lambda p: self.published[p])
        steps_since, _ = join.counters[newest]
        return max(0, min(steps_since - (tick - self.published[newest]), self.options.interval_steps))


def choose_shard(
    name: str, asked: int, taken: dict[str, int], shards: int, away: Sequence[str] = ()
) -> int | None:
    """Return the shard of a worker: its old one, that its name ends in, the lowest free, or one left behind.

    taken: worker name -> shard. shards: how many the data is cut into. away: names in `taken` whose shard may
    be handed over when none is free, the first of them first. None: there is no such name.
    """
    if name in taken:
        return taken[name]
    used = set(taken.values())
    if 0 <= asked < shards and asked not in used:
        return asked
    digits = name.rsplit("-", 1)[-1]
    if digits.isdecimal() and int(digits) < shards and int(digits) not in used:
        return int(digits)
    left_behind = taken[away[0]] if away else None
    return next((shard for shard in range(shards) if shard not in used), left_behind)


def hand_over(name: str, shard: int, taken: dict[str, int], positions: dict[str, int]) -> str:
    """Give the worker the shard, with the data position of the name that had it; return that name, or ""."""
    former = next((other for other, held in taken.items() if held == shard and other != name), "")
    if former:
        del taken[former]
        positions[name] = positions.pop(former, 0)
    taken[name] = shard
    return former


def schema_difference(ours: tuple[m.TensorSpec, ...], theirs: tuple[m.TensorSpec, ...]) -> str:
    """Return what differs between two models, or "" when they agree in names and shapes."""
    mine = {spec.name: spec for spec in ours}
    yours = {spec.name: spec for spec in theirs}
    missing = sorted(mine.keys() - yours.keys())
    extra = sorted(yours.keys() - mine.keys())
    if missing or extra:
        return f"tensors missing here: {missing[:3]}, unknown to the run: {extra[:3]}"
    for name, spec in mine.items():
        if spec.shape != yours[name].shape:
            return f"tensor {name!r} has shape {yours[name].shape} here, {spec.shape} in the run"
        if spec.kind != yours[name].kind:
            return f"tensor {name!r} is a {yours[name].kind} here, a {spec.kind} in the run"
    return ""
