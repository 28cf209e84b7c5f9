"""The token ledger: for every fragment, every token has one fate, and the sums close.

A token a learner consumed counts once for each fragment. It ends as *merged* (in a push that was folded in),
*overwritten* (an update of a round its learner took part in landed on it), *absent* (an update of a round
without its learner landed on it), *lost* (its learner died after consuming it) or *unmerged* (at the end).

The syncer keeps it from the pushes it accepts and from what learners say. On a fragment the tokens of one
incarnation form a line 0 … consumed. A landing settles everything up to a point of that line; an accepted
push covers a stretch of it. Stretches and landings may become known in either order, since they travel on
different channels.

In gossip nothing is overwritten: a round's tokens stay in their peer's own weights, and the fate says how
they reached the others. They end as *merged* (the round's exchange was mixed in), *late* (it came after the
round was settled, and was applied then), *skipped* (no partner came), *alone* (the topology gave none; both
reach others with the next exchange), *lost* (the peer died before it settled their round) or *unmerged* (of a
round that was not settled at the end). A peer's account has one line.

Invariants: per learner and fragment, once its incarnation is closed, consumed = merged + overwritten + absent
+ lost + unmerged; no token is merged twice; what a learner says is checked against what it said before.
Memory: twelve numbers per learner and fragment.
"""

from collections.abc import Container
from typing import Any, Literal, NamedTuple

from msgspec import Struct

SKIPPED_KEPT = 64  # newest skipped rounds of a peer, which may yet be late
FATES = ("merged", "overwritten", "absent", "lost", "unmerged")
GOSSIP_FATES = ("merged", "late", "skipped", "alone", "lost", "unmerged")


class Stretch(NamedTuple):
    """Tokens start … end of one incarnation, carried by one push."""

    incarnation: str
    start: int
    end: int

    @property
    def tokens(self) -> int:
        """How many it carries."""
        return self.end - self.start


class Line(Struct):
    """One learner, one fragment. `settled`: the point up to which updates have landed.

    `start` … `end`: the stretch of the last accepted push, until the landing that follows it; `version`: what
    that push goes into.
    """

    merged: int = 0
    overwritten: int = 0
    absent: int = 0
    lost: int = 0
    unmerged: int = 0
    late: int = 0
    skipped: int = 0
    alone: int = 0
    settled: int = 0
    start: int = 0
    end: int = 0
    version: int = -1

    @property
    def carried(self) -> int:
        """Tokens that are merged, or about to be, but not settled."""
        return self.end - self.start

    def land(self, total: int, version: int) -> None:
        """Settle the line up to `total`; a stretch below is merged already."""
        covered = self.carried if self.start < total else 0
        rest = total - self.settled - covered
        if version == self.version:
            self.overwritten += rest
        else:
            self.absent += rest
        self.settled = total
        if covered:
            self.start = self.end = total

    def may_land(self, total: int) -> bool:
        """Whether a landing at `total` fits what is known: not before the last one, not inside a stretch."""
        return self.settled <= total and not self.start < total < self.end


class Account(Struct):
    """One learner, by name, over all its incarnations."""

    lines: list[Line]
    incarnation: str = ""
    consumed: int = 0  # tokens of closed incarnations
    current: int = 0  # tokens of this incarnation, as last reported
    open: bool = False
    tail_unknown: int = 0  # incarnations that died without their last data position becoming known

    def rest(self, line: Line) -> int:
        """Return the tokens of this incarnation that have no fate on the fragment yet."""
        return self.current - line.settled - line.carried


class Ledger(Struct):
    """Accounts of all learners that ever joined."""

    fragments: int
    accounts: dict[str, Account] = {}
    kind: Literal["sync", "gossip"] = "sync"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The fates there are."""
        return FATES if self.kind == "sync" else GOSSIP_FATES

    def begin(self, worker: str, incarnation: str) -> None:
        """A new incarnation starts at 0 tokens; the one before it, if still open, is lost."""
        account = self.accounts.setdefault(worker, Account([Line() for _ in range(self.fragments)]))
        if account.open:
            self.lose(worker)
        account.incarnation, account.open, account.current = incarnation, True, 0
        for line in account.lines:
            line.settled, line.start, line.end, line.version = 0, 0, 0, -1

    def reported(self, worker: str, tokens: int) -> None:
        """The incarnation has consumed `tokens` in all."""
        self.accounts[worker].current = max(self.accounts[worker].current, tokens)

    # ---- pushes ----

    def admits(self, worker: str, fragment: int, stretch: Stretch) -> bool:
        """Whether a push carries only tokens that no push before it did, and no landing lies inside them."""
        line = self.accounts[worker].lines[fragment]
        if stretch.start >= line.settled:
            return not line.carried or stretch.start >= line.end
        # A landing that overtook the push: it came down after the copy was made, its tokens count as absent.
        return line.end <= stretch.start and stretch.end <= line.settled and stretch.tokens <= line.absent

    def accepted(self, worker: str, fragment: int, stretch: Stretch, version: int) -> None:
        """A push went into the round that will produce `version`."""
        assert self.admits(worker, fragment, stretch)
        self.reported(worker, stretch.end)
        line = self.accounts[worker].lines[fragment]
        if stretch.start < line.settled:
            line.absent -= stretch.tokens
            line.start = line.end = line.settled
        else:
            line.start, line.end = stretch.start, stretch.end
        line.merged += stretch.tokens
        line.version = version

    def returned(self, worker: str, fragment: int, stretch: Stretch) -> None:
        """The push was rejected after all, or its round came to nothing: its tokens are where they were."""
        account = self.accounts[worker]
        line = account.lines[fragment]
        line.merged -= stretch.tokens
        if not account.open or account.incarnation != stretch.incarnation:
            line.lost += stretch.tokens
            return
        line.version = -1  # the version it was meant for will come without it
        if line.carried:
            assert (line.start, line.end) == (stretch.start, stretch.end)
            line.end = line.start
        else:
            line.absent += stretch.tokens

    # ---- rounds of gossip ----

    def settled(self, worker: str) -> int:
        """Return up to where the incarnation's tokens have a fate, on the first line."""
        return self.accounts[worker].lines[0].settled

    def settle(self, worker: str, total: int, fate: str) -> None:
        """A peer's round is over: what it consumed since the last one, up to `total`, has this fate."""
        assert self.kind == "gossip" and fate in GOSSIP_FATES, (self.kind, fate)
        line = self.accounts[worker].lines[0]
        setattr(line, fate, getattr(line, fate) + max(total - line.settled, 0))
        line.settled = max(line.settled, total)

    def settle_round(self, worker: str, number: int, total: int, fate: str, skipped: dict[int, int]) -> None:
        """A peer's round is over, as `settle`; or, "late", the exchange of a skipped one came after all.

        skipped: rounds that were, with the tokens of each; the caller keeps it, one for each incarnation.
        """
        if fate == "late":
            line = self.accounts[worker].lines[0]
            moved = min(skipped.pop(number, 0), line.skipped)
            line.skipped, line.late = line.skipped - moved, line.late + moved
            return
        before = self.settled(worker)
        self.settle(worker, total, fate)
        if fate == "skipped":
            skipped[number] = self.settled(worker) - before
            while len(skipped) > SKIPPED_KEPT:
                skipped.pop(next(iter(skipped)))

    # ---- landings ----

    def landed(self, worker: str, fragment: int, total: int, version: int) -> bool:
        """An update came down when `total` tokens were consumed; return False if that cannot be."""
        account = self.accounts[worker]
        line = account.lines[fragment]
        if not line.may_land(total) or total > account.current:
            return False
        line.land(total, version)
        return True

    def resumed(self, worker: str, total: int, open_tokens: list[int], versions: list[int]) -> None:
        """The same incarnation is back: make good the landings it could not report while it was away."""
        self.reported(worker, total)
        for fragment, (tokens, version) in enumerate(zip(open_tokens, versions, strict=True)):
            if total - tokens > self.accounts[worker].lines[fragment].settled:
                self.landed(worker, fragment, total - tokens, version)

    # ---- ends ----

    def left(self, worker: str, tokens: int, unmerged: list[int]) -> None:
        """Orderly end: what is on the fragments now stays unmerged."""
        account = self.accounts[worker]
        if len(unmerged) == self.fragments:
            self.resumed(worker, tokens, unmerged, [line.version for line in account.lines])
        self.reported(worker, tokens)
        self._keep(account)

    def lose(self, worker: str) -> None:
        """The incarnation is dead: what no update has landed on and no push has carried is lost."""
        account = self.accounts[worker]
        for line in account.lines:
            line.lost += account.rest(line)
        account.tail_unknown += 1
        self._close(account)

    def tail(self, worker: str, tokens: int) -> None:
        """The data position shows that the dead incarnation consumed `tokens` after its last report."""
        account = self.accounts[worker]
        account.consumed += tokens
        account.tail_unknown = max(account.tail_unknown - 1, 0)
        for line in account.lines:
            line.lost += tokens

    def end(self, present: Container[str]) -> None:
        """The run is over: whoever is present keeps its tokens as unmerged, those of the others are lost."""
        for worker, account in self.accounts.items():
            if account.open and worker in present:
                self._keep(account)
            elif account.open:
                self.lose(worker)

    def _keep(self, account: Account) -> None:
        for line in account.lines:
            line.unmerged += account.rest(line)
        self._close(account)

    def _close(self, account: Account) -> None:
        account.consumed += account.current
        account.open, account.current = False, 0

    # ---- reading it ----

    def fates(self, worker: str) -> dict[str, int]:
        """Return one learner's tokens by fate, summed over fragments; open tokens count as unmerged."""
        account = self.accounts[worker]
        by_line = [self._fates(account, line) for line in account.lines]
        sums = {fate: sum(fates[fate] for fates in by_line) for fate in self.kinds}
        return {"consumed": self.fragments * (account.consumed + account.current), **sums}

    def _fates(self, account: Account, line: Line) -> dict[str, int]:
        fates: dict[str, int] = {fate: getattr(line, fate) for fate in self.kinds}
        if account.open:
            fates["unmerged"] += account.rest(line)
        return fates

    def table(self) -> dict[str, Any]:
        """Return tokens by fate: summed, per fragment, per learner; and whose last tokens are unknown."""
        per_learner = {worker: self.fates(worker) for worker in self.accounts}
        per_fragment = []
        for fragment in range(self.fragments):
            rows = [self._fates(account, account.lines[fragment]) for account in self.accounts.values()]
            per_fragment.append({fate: sum(row[fate] for row in rows) for fate in self.kinds})
        total = {key: sum(fates[key] for fates in per_learner.values()) for key in ("consumed", *self.kinds)}
        unknown = {w: a.tail_unknown for w, a in self.accounts.items() if a.tail_unknown}
        return {**total, "per_learner": per_learner, "per_fragment": per_fragment, "tail_unknown": unknown}

    def closes(self) -> bool:
        """Return whether every learner's tokens add up, fragment by fragment, and no fate is negative."""
        return all(
            min(fates.values()) >= 0 and sum(fates.values()) == account.consumed + account.current
            for account in self.accounts.values()
            for fates in (self._fates(account, line) for line in account.lines)
        )
