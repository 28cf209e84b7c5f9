"""The token ledger: for every fragment, every token has one fate, and the sums close.

A token a learner consumed counts once for each fragment. It ends as *merged* (in a push that was folded in),
*overwritten* (an update of a round its learner took part in landed on it), *absent* (an update of a round without
its learner landed on it), *lost* (its learner died after consuming it) or *unmerged* (at the end of the run).

The syncer keeps it from what it folds and from what learners say. On a fragment the tokens of one incarnation form
a line 0 … consumed. A landing settles everything up to a point of that line; a folded push covers a stretch of it.
Stretches and landings may become known in either order, since they travel on different channels.
Invariant, per learner and fragment, once its incarnation is closed: consumed = merged + overwritten + absent + lost +
unmerged. Memory: nine numbers per learner and fragment.
"""

from typing import Any

from msgspec import Struct

FATES = ("merged", "overwritten", "absent", "lost", "unmerged")


class Line(Struct):
    """One learner, one fragment. `settled`: the point up to which updates have landed.

    `start` … `end`: the stretch of the last folded push, until the landing that follows it; `version`: what that
    push went into.
    """

    merged: int = 0
    overwritten: int = 0
    absent: int = 0
    lost: int = 0
    unmerged: int = 0
    settled: int = 0
    start: int = 0
    end: int = 0
    version: int = -1

    @property
    def folded(self) -> int:
        """Tokens that are merged but not settled."""
        return self.end - self.start


class Account(Struct):
    """One learner, by name, over all its incarnations."""

    lines: list[Line]
    incarnation: str = ""
    consumed: int = 0  # tokens of closed incarnations
    current: int = 0  # tokens of this incarnation, as last reported
    open: bool = False
    tail_unknown: int = 0  # incarnations that died without their last data position becoming known


class Ledger(Struct):
    """Accounts of all learners that ever joined."""

    fragments: int
    accounts: dict[str, Account] = {}

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

    def admits(self, worker: str, fragment: int, start: int) -> bool:
        """Whether a push whose stretch begins at `start` is of tokens no landing has settled."""
        return start >= self.accounts[worker].lines[fragment].settled

    def folded(self, worker: str, fragment: int, stretch: tuple[int, int], version: int) -> None:
        """A push covering tokens start … end went into the round that will produce `version`."""
        line = self.accounts[worker].lines[fragment]
        line.start, line.end = stretch
        line.version = version
        line.merged += line.folded

    def unfolded(self, worker: str, fragment: int, tokens: int) -> None:
        """The round came to nothing: its tokens are where they were."""
        account = self.accounts[worker]
        line = account.lines[fragment]
        line.merged -= tokens
        if not account.open:
            line.lost += tokens
        elif line.folded:
            line.end = line.start
        else:
            line.absent += tokens

    def landed(self, worker: str, fragment: int, total: int, version: int) -> None:
        """An update came down when `total` tokens were consumed; a folded stretch below is merged already."""
        line = self.accounts[worker].lines[fragment]
        covered = line.folded if line.start < total else 0
        rest = total - line.settled - covered
        if version == line.version:
            line.overwritten += rest
        else:
            line.absent += rest
        line.settled = total
        if covered:
            line.start = line.end = total

    def returned(self, worker: str, total: int, open_tokens: list[int], versions: list[int]) -> None:
        """The same incarnation is back: make good the landings it could not report while it was away."""
        self.reported(worker, total)
        for fragment, (tokens, version) in enumerate(zip(open_tokens, versions, strict=True)):
            if total - tokens > self.accounts[worker].lines[fragment].settled:
                self.landed(worker, fragment, total - tokens, version)

    def left(self, worker: str, tokens: int, unmerged: list[int]) -> None:
        """Orderly end: what is on the fragments now stays unmerged."""
        account = self.accounts[worker]
        if unmerged:
            self.returned(worker, tokens, unmerged, [line.version for line in account.lines])
        self.reported(worker, tokens)
        for line in account.lines:
            line.unmerged += account.current - line.settled - line.folded
        self._close(account)

    def lose(self, worker: str) -> None:
        """The incarnation is dead: what no update has landed on and no push has carried is lost."""
        account = self.accounts[worker]
        for line in account.lines:
            line.lost += account.current - line.settled - line.folded
        account.tail_unknown += 1
        self._close(account)

    def tail(self, worker: str, tokens: int) -> None:
        """The data position shows that the dead incarnation consumed `tokens` after its last report."""
        account = self.accounts[worker]
        account.consumed += tokens
        account.tail_unknown = max(account.tail_unknown - 1, 0)
        for line in account.lines:
            line.lost += tokens

    def end(self) -> None:
        """The run is over: whoever is still here without having left keeps its tokens as unmerged."""
        for account in self.accounts.values():
            if account.open:
                for line in account.lines:
                    line.unmerged += account.current - line.settled - line.folded
                self._close(account)

    def _close(self, account: Account) -> None:
        account.consumed += account.current
        account.open, account.current = False, 0

    def fates(self, worker: str) -> dict[str, int]:
        """Return one learner's tokens by fate, summed over fragments; open tokens count as unmerged."""
        account = self.accounts[worker]
        sums = {fate: sum(getattr(line, fate) for line in account.lines) for fate in FATES}
        if account.open:
            sums["unmerged"] += sum(account.current - line.settled - line.folded for line in account.lines)
        return {"consumed": self.fragments * (account.consumed + account.current), **sums}

    def table(self) -> dict[str, Any]:
        """Return tokens by fate: summed, per fragment, per learner; and whose last tokens are unknown."""
        per_learner = {worker: self.fates(worker) for worker in self.accounts}
        per_fragment = [
            {fate: sum(getattr(a.lines[p], fate) for a in self.accounts.values()) for fate in FATES}
            for p in range(self.fragments)
        ]
        total = {key: sum(fates[key] for fates in per_learner.values()) for key in ("consumed", *FATES)}
        unknown = {w: a.tail_unknown for w, a in self.accounts.items() if a.tail_unknown}
        return {**total, "per_learner": per_learner, "per_fragment": per_fragment, "tail_unknown": unknown}

    def closes(self) -> bool:
        """Return whether every learner's tokens add up, fragment by fragment, for closed accounts."""
        return all(
            account.open
            or all(sum(getattr(line, fate) for fate in FATES) == account.consumed for line in account.lines)
            for account in self.accounts.values()
        )
