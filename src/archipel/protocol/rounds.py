"""The rounds in flight: pull, fold, merge, publish (section 3.2). A round is one merge of one fragment.

    waiting ─▶ pulling ─▶ folding ─▶ folded          (or dropped, at any of the first three)

A round merges when nobody is left in the first three stages and something was folded; with nothing folded it comes
to nothing, the counts of those it lost for no fault of theirs are restored, and its fragment is owed to the next
tick. A participant that dies, is refused or is slower than its deadline leaves this round only.

Invariants: one round per fragment; at most `pulls_max` pushes under way; a push is folded only if it was asked for,
names a base version that is still kept and carries tokens that no other push or landing has used.
"""

from dataclasses import dataclass, field

from . import messages as m
from .ledger import Ledger
from .membership import Member
from .quorum import Tempo, weight
from .schedule import SyncOptions

DEADLINE_FACTOR = 4.0  # a pull may take four of the learner's own usual transfer times (ours)
DEADLINE_S_MIN = 2.0
BASES_KEPT = 2  # versions of a fragment an outer gradient may be relative to: the current and the one before


@dataclass(frozen=True)
class Pulling:
    """A push that was asked for."""

    since: float
    deadline: float


@dataclass
class Round:
    """`counted`: worker -> step it was counted with, to give the count back if the round comes to nothing.

    `folding`, `folded`: worker -> the stretch (start, end) of its tokens that the push carries; in fold order.
    """

    fragment: int
    tick: int
    closed_at: float
    counted: dict[str, int]
    waiting: list[str]
    pulling: dict[str, Pulling] = field(default_factory=dict)
    folding: dict[str, tuple[int, int]] = field(default_factory=dict)
    folded: dict[str, tuple[int, int]] = field(default_factory=dict)
    merging: bool = False

    @property
    def collected(self) -> bool:
        """Whether nobody's push is outstanding."""
        return not (self.waiting or self.pulling or self.folding)

    def drop(self, worker: str) -> bool:
        """Leave the worker out, unless its bytes are here already; return whether it was part of the round."""
        if worker in self.waiting:
            self.waiting.remove(worker)
            return True
        return self.pulling.pop(worker, None) is not None


@dataclass
class Arrivals:
    """Measures ξ_sync: from the close of a round to the lower-median participant having its update."""

    version: int
    closed_at: float
    need: int


@dataclass
class Rounds:
    """Shares `members`, `ledger`, `tempo` and `versions` with the syncer's machine, which owns them."""

    options: SyncOptions
    members: dict[str, Member]
    ledger: Ledger
    tempo: Tempo
    versions: list[int]
    flying: dict[int, Round] = field(default_factory=dict)
    owed: list[int] = field(default_factory=list)  # fragments whose round came to nothing
    arrivals: dict[int, Arrivals] = field(default_factory=dict)

    # ---- pull ----

    def start(self, now: float, fragment: int, tick: int, counted: dict[str, int]) -> list[m.Action]:
        """Begin the round of a fragment with those counted at its tick."""
        # Whoever has not yet felt the update its last push went into would push the same tokens twice.
        waiting = [name for name in counted if self.members[name].settled(fragment)]
        round_ = Round(fragment, tick, now, {name: counted[name] for name in waiting}, waiting)
        self.flying[fragment] = round_
        return self._go_on(now, round_)

    def _go_on(self, now: float, round_: Round) -> list[m.Action]:
        return [*self._pull_more(now), *self._settle(round_)]

    def _pull_more(self, now: float) -> list[m.Action]:
        """Ask for pushes, oldest round first, while few enough are under way."""
        actions: list[m.Action] = []
        under_way = sum(len(r.pulling) + len(r.folding) for r in self.flying.values())
        for round_ in self.flying.values():
            while round_.waiting and under_way < self.options.pulls_max:
                name = round_.waiting.pop(0)
                actions.append(self._pull(now, round_, name))
                under_way += 1
        return actions

    def _pull(self, now: float, round_: Round, name: str, *, full: bool = False) -> m.Action:
        round_.pulling[name] = Pulling(now, now + self._patience_s(self.members[name]))
        return m.Send(name, m.Pull(round_.fragment, round_.tick, self.versions[round_.fragment], full))

    def _patience_s(self, member: Member) -> float:
        if member.transfer_s.value is None:
            return self.options.pull_deadline_s
        return max(DEADLINE_FACTOR * member.transfer_s.value, DEADLINE_S_MIN)

    # ---- fold ----

    def pushed(self, now: float, member: Member, push: m.Push) -> list[m.Action]:
        """A push is here: fold it, refuse it, or ask for the weights in full."""
        round_ = self.flying.get(push.fragment)
        if round_ is None or member.name not in round_.pulling or push.tick != round_.tick:
            return self._refuse(member, push.fragment, "not asked for: a duplicate, or its round is over")
        if self._outdated(member, push):
            again = self._pull(now, round_, member.name, full=True)
            return [m.Notice(f"full pull worker={member.name} fragment={push.fragment}"), again]
        pulling = round_.pulling.pop(member.name)
        if reason := self._unfit(member, push):
            round_.counted.pop(member.name, None)
            return [*self._refuse(member, push.fragment, reason),
                    *self._resynchronise(member, push), *self._go_on(now, round_)]  # fmt: skip
        # A learner that had no copy at hand answers at its step's end; its patience grows with that.
        member.transfer_s.add(now - pulling.since)
        round_.folding[member.name] = (push.total - push.tokens, push.total)
        value = weight(push.steps, push.tokens)
        return [m.Fold(push.fragment, member.name, value, push.base, push.full), *self._pull_more(now)]

    def _outdated(self, member: Member, push: m.Push) -> bool:
        """Whether the push is fit but relative to a version that is no longer kept."""
        forgotten = push.base <= self.versions[push.fragment] - BASES_KEPT
        return forgotten and not push.full and not self._unfit(member, push)

    def _unfit(self, member: Member, push: m.Push) -> str:
        """Return why a push may not be folded, or ""."""
        current, merged_into = self.versions[push.fragment], member.folded.get(push.fragment, 0)
        if push.steps == 0 or push.tokens == 0:
            return "no step since the last update landed"
        if not 0 < push.steps <= push.step or not 0 < push.tokens <= push.total < 2**53:
            return f"impossible counters steps={push.steps} tokens={push.tokens} total={push.total}"
        if push.base > current:
            return f"base version {push.base} is ahead of the run's {current}: adopt the update that follows"
        if push.base < merged_into:
            return f"base version {push.base}: these tokens went into version {merged_into} already"
        if not self.ledger.admits(member.name, push.fragment, push.total - push.tokens):
            return f"base version {push.base}: an update has landed on these tokens"
        return ""

    def _resynchronise(self, member: Member, push: m.Push) -> list[m.Action]:
        current = self.versions[push.fragment]
        return (
            [m.Send(member.name, m.Update(push.fragment, current, push.tick))] if push.base > current else []
        )

    def _refuse(self, member: Member, fragment: int, reason: str) -> list[m.Action]:
        notice = m.Notice(
            f"refused push worker={member.name} fragment={fragment} reason={reason!r}", "warning"
        )
        return [notice, m.Send(member.name, m.Refused(reason, fragment=fragment))]

    def folded(self, now: float, fragment: int, worker: str) -> list[m.Action]:
        """The compute port has added the push to its round."""
        round_ = self.flying[fragment]
        stretch = round_.folding.pop(worker)
        round_.folded[worker] = stretch
        version = self.versions[fragment] + 1
        self.ledger.folded(worker, fragment, stretch, version)
        self.members[worker].folded[fragment] = version
        return self._go_on(now, round_)

    def rejected(self, now: float, rejected: m.Rejected) -> list[m.Action]:
        """The compute port found the push unusable; nothing of it remains."""
        round_ = self.flying[rejected.fragment]
        round_.folding.pop(rejected.worker)
        round_.counted.pop(rejected.worker, None)
        member = self.members[rejected.worker]
        return [*self._refuse(member, rejected.fragment, rejected.reason), *self._go_on(now, round_)]

    # ---- merge, publish ----

    def _settle(self, round_: Round) -> list[m.Action]:
        """Merge once everything asked for is here; give the round up if nothing is."""
        if not round_.collected or round_.merging or self.flying.get(round_.fragment) is not round_:
            return []
        if not round_.folded:
            return self.abandon(round_.fragment, "nobody's push could be folded")
        round_.merging = True
        return [m.Merge(round_.fragment, self.versions[round_.fragment] + 1)]

    def abandon(self, fragment: int, reason: str) -> list[m.Action]:
        """Forget the round: nothing of it was applied, its fragment is due again at the next tick."""
        round_ = self.flying.pop(fragment)
        self.owed.append(fragment)
        for name, (start, end) in round_.folded.items():
            self.ledger.unfolded(name, fragment, end - start)
            self.members[name].folded.pop(fragment, None)
        if not round_.folded:
            # Those it lost on the way count again; after a merge that failed everyone must step first.
            for name, step in round_.counted.items():
                member = self.members[name]
                member.counted = min(member.counted, step - 1)
                member.credit = min(member.credit + 1, self.options.interval_steps)
        notice = m.Notice(
            f"round abandoned fragment={fragment} tick={round_.tick} reason={reason!r}", "warning"
        )
        return [notice, m.Discard(fragment)]

    def publish(self, merged: m.Merged) -> list[m.Action]:
        """Send the new version to every member, those outside the round included (Algorithm 1)."""
        round_ = self.flying.pop(merged.fragment)
        self.versions[merged.fragment] = merged.version
        need = (len(round_.folded) + 1) // 2
        self.arrivals[merged.fragment] = Arrivals(merged.version, round_.closed_at, need)
        actions: list[m.Action] = []
        for member in self.members.values():
            if member.connected and member.joined:
                start, end = round_.folded.get(member.name, (0, 0))
                update = m.Update(merged.fragment, merged.version, round_.tick, end - start)
                actions.append(m.Send(member.name, update))
        return actions

    def arrived(self, now: float, fragment: int, version: int) -> None:
        """An update reached a learner: the lower-median one completes a sample of ξ_sync."""
        arrivals = self.arrivals.get(fragment)
        if arrivals is not None and arrivals.version == version and arrivals.need > 0:
            arrivals.need -= 1
            if arrivals.need == 0:
                self.tempo.sync_s.add(now - arrivals.closed_at)

    # ---- those who do not make it ----

    def drop(self, now: float, worker: str) -> list[m.Action]:
        """A worker is gone: its rounds go on without it."""
        actions: list[m.Action] = []
        for round_ in list(self.flying.values()):
            if round_.drop(worker):
                actions += self._go_on(now, round_)
        return actions

    def expire(self, now: float) -> list[m.Action]:
        """Leave out whoever is slower than its deadline, in this round."""
        actions: list[m.Action] = []
        for round_ in list(self.flying.values()):
            late = [name for name, pull in round_.pulling.items() if now >= pull.deadline]
            for name in late:
                round_.drop(name)
                actions.append(m.Notice(f"pull overdue worker={name} fragment={round_.fragment}", "warning"))
                # The next deadline must not follow from a time that was too short for it.
                self.members[name].transfer_s.add(2 * self._patience_s(self.members[name]))
            if late:
                actions += self._go_on(now, round_)
        return actions

    def deadlines(self) -> list[float]:
        """Return when `expire` has something to do."""
        return [pull.deadline for r in self.flying.values() for pull in r.pulling.values()]
