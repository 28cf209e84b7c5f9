"""Who is live, with what identity, on which shard.

A worker is known by its name; each process start is a new incarnation of it. A name keeps its shard for ever, so
that no two workers read the same data; a new name takes the number it ends in when that is free, else the lowest
free one. Invariant: a learner counts only while it is connected, has joined and holds a full, current model.
"""

from dataclasses import dataclass, field

from .messages import Join, TensorSpec
from .quorum import MovingAverage, Report


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
    awaiting: set[int] = field(default_factory=set)  # fragments it must hold before it may report
    heard_at: float = 0.0
    quiet_since: float = 0.0
    step: int = 0
    tokens: int = 0
    reports: int = 0
    counted: int = 0  # step of the report it was last counted with
    credit: int = 0  # reports not yet counted; matters at τ = 0
    step_s: MovingAverage = field(default_factory=MovingAverage)
    transfer_s: MovingAverage = field(default_factory=MovingAverage)
    landed: dict[int, int] = field(default_factory=dict)  # fragment -> version it holds
    folded: dict[int, int] = field(default_factory=dict)  # fragment -> version its last folded push went into

    @property
    def live(self) -> bool:
        """A learner that may be counted and pulled from."""
        return self.role == "learner" and self.connected and self.joined and not (self.awaiting or self.left)

    def fresh(self, overlap: int) -> bool:
        """At τ ≥ 1 the newest report counts and a surplus is forgotten; at τ = 0 every step counts once."""
        return self.step > self.counted if overlap else self.credit > 0

    def report(self, overlap: int) -> Report:
        """Return what the quorum needs to know."""
        return Report(self.name, self.fresh(overlap), self.reports, self.quiet_since, self.step_s.value)

    def settled(self, fragment: int) -> bool:
        """Whether its last merged push of the fragment has been answered by an update that landed."""
        return self.landed.get(fragment, 0) >= self.folded.get(fragment, 0)


def choose_shard(name: str, join: Join, taken: dict[str, int], shards: int) -> int | None:
    """Return the shard of a worker: its old one, the one its name ends in, or the lowest free; None if all gone.

    taken: worker name -> shard, for every name that ever joined. shards: how many the data is cut into.
    """
    if name in taken:
        return taken[name]
    used = set(taken.values())
    if 0 <= join.shard < shards and join.shard not in used:
        return join.shard
    digits = name.rsplit("-", 1)[-1]
    if digits.isdecimal() and int(digits) < shards and int(digits) not in used:
        return int(digits)
    return next((shard for shard in range(shards) if shard not in used), None)


def schema_difference(ours: tuple[TensorSpec, ...], theirs: tuple[TensorSpec, ...]) -> str:
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
