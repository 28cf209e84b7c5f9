"""What each merge was made of: how old the outer gradients were, and how long ticks waited for stragglers.

Fed along the syncer's tape. Invariant: memory does not grow with the run.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..protocol import messages as m
from ..tape.record import Record
from .collect import Round
from .pace import Sample

VERSIONS_KEPT = 16  # per fragment, whose ticks are remembered; bases are at most one or two versions back


@dataclass
class Staleness:
    """How old the outer gradients are that are merged, in versions and in ticks."""

    versions: Counter[int] = field(default_factory=Counter)
    age_ticks: Sample = field(default_factory=Sample)
    flight_ticks: Sample = field(default_factory=Sample)
    _published: dict[int, dict[int, int]] = field(default_factory=dict)  # fragment -> version -> round's tick
    _bases: dict[int, dict[str, int]] = field(default_factory=dict)  # fragment in flight -> worker -> base

    def take(self, record: Record) -> None:
        """Take the syncer's next record, before it is known which round it closes."""
        match record.event:
            case m.Rejected(fragment=fragment, worker=worker):
                self._bases.get(fragment, {}).pop(worker, None)
        for action in record.actions:
            match action:
                case m.Fold(fragment=fragment, worker=worker, base=base):
                    self._bases.setdefault(fragment, {})[worker] = base
                case m.Discard(fragment=fragment):
                    self._bases.pop(fragment, None)

    def closed(self, round_: Round, tick: int) -> None:
        """A round's result was published while `tick` was the newest closed tick."""
        published = self._published.setdefault(round_.fragment, {0: 0})
        for base in self._bases.pop(round_.fragment, {}).values():
            self.versions[round_.version - 1 - base] += 1
            self.flight_ticks.add(tick - round_.tick)
            if base in published:
                self.age_ticks.add(tick - published[base])
        published[round_.version] = round_.tick
        published.pop(round_.version - VERSIONS_KEPT, None)

    def restart(self) -> None:
        """Another syncer process: what was in flight is gone."""
        self._bases.clear()

    def table(self) -> dict[str, Any] | None:
        """Return the three figures; None before anything was merged."""
        pushes = self.versions.total()
        if not pushes:
            return None
        mean = sum(age * count for age, count in self.versions.items()) / pushes
        return {
            "versions": {
                "mean": round(mean, 6),
                "greatest": max(self.versions),
                "pushes": {str(age): self.versions[age] for age in sorted(self.versions)},
            },
            "age_ticks": self.age_ticks.table(),
            "flight_ticks": self.flight_ticks.table(),
        }


@dataclass
class Grace:
    """What ticks waited for stragglers, from the K-th report on (eq. 3)."""

    waited_s: Sample = field(default_factory=Sample)
    window_s: Sample = field(default_factory=Sample)
    to_the_end: int = 0  # ticks that closed because their window was over

    def take(self, tally: m.Tally) -> None:
        """A tick closed."""
        self.waited_s.add(tally.used_s)
        self.window_s.add(tally.window_s)
        self.to_the_end += 0 < tally.window_s <= tally.used_s * (1 + 1e-9)

    def table(self) -> dict[str, Any] | None:
        """Return the waits; None before a tick closed."""
        waits = self.waited_s.table()
        if waits is None:
            return None
        window = self.window_s.mean or 0.0
        total = round(self.waited_s.total, 6)
        return {"waited_s": {**waits, "total": total}, "window_mean_s": round(window, 6),
                "windows_used_up": self.to_the_end}  # fmt: skip
