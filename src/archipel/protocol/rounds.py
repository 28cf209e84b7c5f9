"""The rounds in flight: pull, fold, merge, publish (section 3.2). A round is one merge of one fragment.

    waiting ─▶ pulling ─▶ folding ─▶ folded          (or dropped, at any of the first three)

A round merges when nobody is left in the first three stages and something was folded; with nothing folded it
comes to nothing, the counts of those it lost for no fault of theirs are restored, and its fragment is owed to
the next tick. A participant that dies, is refused or is slower than its deadline leaves this round only.

Invariants: one round per fragment; at most `pulls_max` pushes under way; a push is folded only if it was
asked for, names a base version that is still kept and carries tokens that no other push or landing has used.
"""

from dataclasses import dataclass, field

from . import messages as m
from .ledger import Ledger, Stretch
from .membership import COUNT_MAX, Member
from .quorum import MovingAverage, Tempo, weight
from .schedule import SyncOptions

DEADLINE_FACTOR = 4.0  # a pull may take four of the learner's own usual transfer times (ours)
DEADLINE_S_MIN = 2.0
BASES_KEPT = 2  # versions of a fragment an outer gradient may be relative to: the current and the one before


@dataclass(frozen=True)
class Pulling:
    """A push that was asked for."""

    since: float
    deadline: float
    full: bool = False


@dataclass
class Round:
    """`counted`: worker -> step it was counted with, to give the count back if the round comes to nothing.

    `folding`, `folded`: worker -> the tokens that its push carries; in fold order.
    """

    fragment: int
    tick: int
    closed_at: float
    counted: dict[str, int]
    waiting: list[str]
    pulling: dict[str, Pulling] = field(default_factory=dict)
    folding: dict[str, Stretch] = field(default_factory=dict)
    folded: dict[str, Stretch] = field(default_factory=dict)
    merging: bool = False

    @property
    def collected(self) -> bool:
        """Whether nobody's push is outstanding."""
        return not (self.waiting or self.pulling or self.folding)

    def drop(self, worker: str) -> bool:
        """Leave the worker out, unless its bytes are here already; return whether it was in the round."""
        if worker in self.waiting:
            self.waiting.remove(worker)
            return True
        return self.pulling.pop(worker, None) is not None


@dataclass
class Arrivals:
    """Measures ξ_sync: from the close of a round to the lower-median participant having its update."""

    version: int
    closed_at: float
    awaited: set[str]
    need: int


@dataclass
class Rounds:
    """Shares `members`, `ledger`, `tempo`, `versions` and `published` with the syncer's machine."""

    options: SyncOptions
    members: dict[str, Member]
    ledger: Ledger
    tempo: Tempo
    versions: list[int]
    published: list[int]
    flying: dict[int, Round] = field(default_factory=dict)
    owed: list[int] = field(default_factory=list)  # fragments whose round came to nothing
    arrivals: dict[int, Arrivals] = field(default_factory=dict)

    # ---- pull ----

    def start(self, now: float, fragment: int, tick: int, counted: dict[str, int]) -> list[m.Action]:
        """Begin the round of a fragment with those counted at its tick."""
        assert fragment not in self.flying
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
        round_.pulling[name] = Pulling(now, now + self._patience_s(self.members[name]), full)
        return m.Send(name, m.Pull(round_.fragment, round_.tick, self.versions[round_.fragment], full))

    def _patience_s(self, member: Member) -> float:
        """Return how long a push may take: the transfer, and a step where no copy is at hand."""
        transfer_s = member.transfer_s.value
        if transfer_s is None:
            return self.options.pull_deadline_s
        return max(DEADLINE_FACTOR * transfer_s, DEADLINE_S_MIN) + member.step_s.get()

    # ---- fold ----

    def pushed(self, now: float, member: Member, push: m.Push) -> list[m.Action]:
        """A push is here: fold it, refuse it, or ask for the weights in full."""
        round_ = self.flying.get(push.fragment)
        if round_ is None or member.name not in round_.pulling or push.tick != round_.tick:
            return self._refuse(member, push.fragment, "not asked for: a duplicate, or its round is over")
        if push.full != round_.pulling[member.name].full:
            return self._refuse(member, push.fragment, f"full={push.full} was not asked for")
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
        self._accept(member, round_, push)
        value = weight(push.steps, push.tokens)
        return [m.Fold(push.fragment, member.name, value, push.base, push.full), *self._pull_more(now)]

    def _accept(self, member: Member, round_: Round, push: m.Push) -> None:
        stretch = _stretch(member, push)
        version = self.versions[push.fragment] + 1
        round_.folding[member.name] = stretch
        self.ledger.accepted(member.name, push.fragment, stretch, version)
        member.merged_into[push.fragment] = version

    def _outdated(self, member: Member, push: m.Push) -> bool:
        """Whether the push is fit but relative to a version that is no longer kept."""
        forgotten = push.base <= self.versions[push.fragment] - BASES_KEPT
        return forgotten and not push.full and not self._unfit(member, push)

    def _unfit(self, member: Member, push: m.Push) -> str:
        """Return why a push may not be folded, or ""."""
        current, merged_into = self.versions[push.fragment], member.merged_into.get(push.fragment, 0)
        if not 0 < push.steps <= push.step < COUNT_MAX or not 0 < push.tokens <= push.total < COUNT_MAX:
            return f"impossible counters steps={push.steps} tokens={push.tokens} total={push.total}"
        if push.base > current:
            return f"base version {push.base} is ahead of the run's {current}: adopt the update that follows"
        if push.base < merged_into:
            return f"base version {push.base}: these tokens went into version {merged_into} already"
        if not self.ledger.admits(member.name, push.fragment, _stretch(member, push)):
            return f"base version {push.base}: some of its tokens were pushed or overwritten before"
        return ""

    def _resynchronise(self, member: Member, push: m.Push) -> list[m.Action]:
        current = self.versions[push.fragment]
        if push.base <= current:
            return []
        return [m.Send(member.name, m.Update(push.fragment, current, self.published[push.fragment]))]

    def _refuse(self, member: Member, fragment: int, reason: str) -> list[m.Action]:
        notice = m.Notice(
            f"refused push worker={member.name} fragment={fragment} reason={reason!r}", "warning"
        )
        return [notice, m.Send(member.name, m.Refused(reason, fragment=fragment))]

    def declined(self, now: float, member: Member, nothing: m.Nothing) -> list[m.Action]:
        """The learner has no step to push: weight 0, left out of the round (section 3.2)."""
        round_ = self.flying.get(nothing.fragment)
        if round_ is None or nothing.tick != round_.tick or not round_.drop(member.name):
            return []
        round_.counted.pop(member.name, None)
        return self._go_on(now, round_)

    def folded(self, now: float, fragment: int, worker: str) -> list[m.Action]:
        """The compute port has added the push to its round."""
        round_ = self.flying[fragment]
        round_.folded[worker] = round_.folding.pop(worker)
        return self._go_on(now, round_)

    def rejected(self, now: float, rejected: m.Rejected) -> list[m.Action]:
        """The compute port found the push unusable; nothing of it remains."""
        fragment, worker = rejected.fragment, rejected.worker
        round_ = self.flying[fragment]
        self._return(fragment, worker, round_.folding.pop(worker))
        round_.counted.pop(worker, None)
        refusal = self._refuse(self.members[worker], fragment, rejected.reason)
        return [*refusal, *self._go_on(now, round_)]

    def _return(self, fragment: int, worker: str, stretch: Stretch) -> None:
        self.ledger.returned(worker, fragment, stretch)
        if self.members[worker].incarnation == stretch.incarnation:
            self.members[worker].merged_into.pop(fragment, None)

    # ---- merge, publish ----

    def _settle(self, round_: Round) -> list[m.Action]:
        """Merge once everything asked for is here; give the round up if nothing is."""
        if not round_.collected or round_.merging or self.flying.get(round_.fragment) is not round_:
            return []
        if not round_.folded:
            return self._abandon(round_, "nobody's push could be folded", round_.counted)
        round_.merging = True
        return [m.Merge(round_.fragment, self.versions[round_.fragment] + 1)]

    def failed(self, fragment: int, reason: str) -> list[m.Action]:
        """The merge came out unusable: everyone must step before it is tried again."""
        return self._abandon(self.flying[fragment], reason, {})

    def _abandon(self, round_: Round, reason: str, restored: dict[str, int]) -> list[m.Action]:
        """Forget the round: nothing of it was applied, its fragment is due again at the next tick."""
        fragment = round_.fragment
        del self.flying[fragment]
        self.owed.append(fragment)
        for name, stretch in round_.folded.items():
            self._return(fragment, name, stretch)
        text = f"round abandoned fragment={fragment} tick={round_.tick} reason={reason!r}"
        actions: list[m.Action] = [m.Notice(text, "warning"), m.Discard(fragment)]
        for member in self.members.values():
            if member.live:
                # Those it lost on the way count again; all are told not to wait for an update of this round.
                step = restored.get(member.name, -1)
                if step >= 0:
                    member.credit = min(member.credit + 1, self.options.credit_max)
                actions.append(m.Send(member.name, m.TickClosed(round_.tick, step, fragment)))
        return actions

    def publish(self, merged: m.Merged) -> list[m.Action]:
        """Send the new version to every member, those outside the round included (Algorithm 1)."""
        round_ = self.flying.pop(merged.fragment)
        self.versions[merged.fragment] = merged.version
        self.published[merged.fragment] = round_.tick
        need = (len(round_.folded) + 1) // 2
        self.arrivals[merged.fragment] = Arrivals(merged.version, round_.closed_at, set(round_.folded), need)
        actions: list[m.Action] = []
        for member in self.members.values():
            if member.connected and member.joined:
                stretch = round_.folded.get(member.name)
                own = stretch is not None and stretch.incarnation == member.incarnation
                tokens = stretch.tokens if stretch is not None and own else 0
                update = m.Update(merged.fragment, merged.version, round_.tick, tokens)
                actions.append(m.Send(member.name, update))
        return actions

    def arrived(self, now: float, worker: str, fragment: int, version: int) -> None:
        """An update reached a participant: the lower-median one completes a sample of ξ_sync."""
        arrivals = self.arrivals.get(fragment)
        if arrivals is None or arrivals.version != version or worker not in arrivals.awaited:
            return
        arrivals.awaited.discard(worker)
        arrivals.need -= 1
        if arrivals.need == 0:
            self.tempo.sync_s.add(now - arrivals.closed_at)
            del self.arrivals[fragment]

    # ---- those who do not make it ----

    def drop(self, now: float, worker: str) -> list[m.Action]:
        """A worker is gone: its rounds go on without it."""
        # Out of all of them before any goes on: a freed place must not be given to it again.
        touched = [round_ for round_ in self.flying.values() if round_.drop(worker)]
        return [action for round_ in touched for action in self._go_on(now, round_)]

    def expire(self, now: float) -> list[m.Action]:
        """Leave out whoever is slower than its deadline, in this round."""
        actions: list[m.Action] = []
        for round_ in list(self.flying.values()):
            late = [(name, pull) for name, pull in round_.pulling.items() if now >= pull.deadline]
            for name, pull in late:
                round_.drop(name)
                waited_s = now - pull.since
                text = f"pull overdue worker={name} fragment={round_.fragment} waited_s={waited_s:.1f}"
                actions.append(m.Notice(text, "warning"))
                self._allow_more(self.members[name], waited_s)
            if late:
                actions += self._go_on(now, round_)
        return actions

    def _allow_more(self, member: Member, waited_s: float) -> None:
        """The next deadline must not follow from a time that was too short; nor outgrow the first one."""
        twice_s = min(2 * waited_s, self.options.pull_deadline_s) / DEADLINE_FACTOR
        member.transfer_s = MovingAverage(max(twice_s, member.transfer_s.get()))

    def deadlines(self) -> list[float]:
        """Return when `expire` has something to do."""
        return [pull.deadline for r in self.flying.values() for pull in r.pulling.values()]


def _stretch(member: Member, push: m.Push) -> Stretch:
    return Stretch(member.incarnation, push.total - push.tokens, push.total)
