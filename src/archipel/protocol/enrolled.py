"""A rendezvous's peers, one by one; the consensus error they tell; and what of it all outlives its process.

Parts of `rendezvous`. Invariant: an entry's tokens are those of its incarnation, whatever became of its
account in the ledger.
"""

import math
from dataclasses import dataclass, field

from msgspec import Struct

from . import gossip as g
from .ledger import Ledger


class RendezvousState(Struct):
    """What a rendezvous that is started again needs."""

    epoch: int
    taken: dict[str, int]
    positions: dict[str, int]
    ledger: Ledger
    schema: str = ""
    concluded: g.Concluded | None = None
    attempts: int = 0
    bases: dict[str, int] = {}


@dataclass
class Entry:
    """One peer as the rendezvous sees it."""

    name: str
    incarnation: str
    address: str
    start: int  # data position where this incarnation began
    donor: str = ""  # whose state it was told to clone
    round: int = -1
    ready: bool = False
    kept: bool = False
    connected: bool = True
    lost_at: float = 0.0
    left: bool = False
    lost: bool = False  # given up, without a goodbye
    at_end: bool = False
    waiting: bool = False  # whole, but too late for the end that is under way
    tokens: int = 0
    base: int = 0  # of these, counted before the ledger gave this incarnation up
    settled_at: float = 0.0  # when it was last heard to get on
    round_s: float = 0.0  # its last round took
    skipped: dict[int, int] = field(default_factory=dict)  # newest rounds that were -> tokens of each

    @property
    def live(self) -> bool:
        """Connected, or not yet given up."""
        return not self.left

    @property
    def paired(self) -> bool:
        """May stand in a view."""
        return self.live and self.ready


@dataclass
class Consensus:
    """The consensus error as exchanges tell it, and whether it keeps rising."""

    errors: dict[int, list[float]] = field(default_factory=dict)  # round -> relative squared distances
    rising: int = 0
    last: float = math.inf
    newest: float | None = None

    def take(self, report: g.Report, peers: int) -> None:
        """Take what a report says: E_pairs ‖z_i − z_j‖² · (n−1)/(2n) over ‖z‖² (gasloc.md, section 5)."""
        sound = math.isfinite(report.distance) and math.isfinite(report.norm)
        if not sound or report.distance < 0 or report.norm <= 0 or peers < 2:
            return
        self.errors.setdefault(report.round, []).append(
            (peers - 1) / (2 * peers) * report.distance / report.norm
        )

    def close(self, number: int) -> float | None:
        """Return the error of a round that all have settled; count whether it rose."""
        found = self.errors.pop(number, None)
        for old in [old for old in self.errors if old < number]:
            del self.errors[old]
        if not found:
            return None
        error = math.sqrt(math.fsum(found) / len(found))
        self.rising = self.rising + 1 if error > self.last else 0
        self.last = self.newest = error
        return error
