"""One round's exchange as a peer sees it, and what a peer remembers of others' pace (GASLoC, sections 2-5).

Invariants: a partner has failed, or its model is here, or it is waited for; a model is sent at most once a
round to each listener, and only after a handshake that matched.
"""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field

from . import gossip as g
from .topology import Row

RECENT = 8  # rounds whose transfer times are remembered: a slow partner now and then moves no median
OUTLIER = 1.5  # a partner whose transfers take so many times the usual has a slow line of its own
SLACK = 0.05  # a peer late by less than this share of H keeps all its local steps


@dataclass
class Exchange:
    """A round, from its first local step until it is settled, and a while longer for models that are late."""

    round: int
    ordinal: int  # rounds this peer had settled before
    epoch: int
    view: str  # digest
    row: Row
    began_at: float
    local_steps: int  # H_i
    offered_at: float | None = None
    met: dict[str, None] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # partner -> why
    received: dict[str, float] = field(default_factory=dict)  # partner -> when
    sent: dict[str, float] = field(default_factory=dict)
    got: dict[str, float] = field(default_factory=dict)  # listener -> when it had our model
    corrected: dict[str, None] = field(default_factory=dict)

    @property
    def partners(self) -> tuple[str, ...]:
        """All whom this peer hears or is heard by, sorted."""
        return tuple(sorted({*self.row.partners, *self.row.listeners}))

    @property
    def missing(self) -> tuple[str, ...]:
        """Whose model should come and has not."""
        return tuple(name for name in self.row.partners if name not in self.received)

    def awaited(self) -> tuple[str, ...]:
        """Return whose model, or whose handshake, is still worth waiting for."""
        unheard = [name for name in self.missing if name not in self.failed]
        untold = [name for name in self.row.listeners if name not in self.sent and name not in self.failed]
        return tuple(dict.fromkeys([*unheard, *untold]))

    def weight(self, partner: str) -> float:
        """Return the partner's weight in this peer's row."""
        return self.row.weights[self.row.partners.index(partner)]

    def correctable(self, partner: str) -> bool:
        """Whether the partner's late model may still be applied: it has ours, or will have."""
        return partner in self.missing and partner in self.sent and partner not in self.corrected

    @property
    def acknowledged(self) -> bool:
        """Whether all that was sent has arrived."""
        return bool(self.sent) and all(name in self.got for name in self.sent)

    def transfer_s(self, others_lines: Container[str] = ()) -> float | None:
        """Return the time from the first model sent to the last one acknowledged; None while that is open.

        others_lines: listeners whose own lines are the slow ones, and tell nothing of ours.
        """
        counted = [name for name in self.sent if name not in others_lines]
        if not counted or any(name not in self.got for name in counted):
            return None
        return max(self.got[name] for name in counted) - min(self.sent[name] for name in counted)

    @property
    def fate(self) -> g.Fate:
        """What became of the round's tokens, should it be settled now."""
        if not self.row.partners:
            return "alone"
        return "merged" if self.received else "skipped"


@dataclass
class Pace:
    """A peer's own averages."""

    step_s: float = 0.0
    wait_s: float | None = None
    transfers: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def stepped(self, seconds: float) -> None:
        """Take the time of one inner step into the moving average."""
        self.step_s = seconds if not self.step_s else 0.9 * self.step_s + 0.1 * seconds

    def waited(self, seconds: float) -> None:
        """Take in how long a partner's model was waited for, whether or not it was in time."""
        self.wait_s = seconds if self.wait_s is None else 0.7 * self.wait_s + 0.3 * seconds

    @property
    def transfer_s(self) -> float:
        """Lower median of recent transfers; 0 before there is one."""
        recent = sorted(self.transfers)
        return recent[(len(recent) - 1) // 2] if recent else 0.0


@dataclass(frozen=True)
class Others:
    """What a peer said of itself in its newest handshake."""

    round: int
    step_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True)
class Identity:
    """What a peer brings to every handshake."""

    name: str
    run: str
    schema: str
    form: str


def meeting(exchange: Exchange, own: Identity, partner: str, pace: Pace) -> g.Meet:
    """Return the handshake for a partner of the round."""
    return g.Meet(
        run=own.run,
        epoch=exchange.epoch,
        round=exchange.round,
        view=exchange.view,
        schema=own.schema,
        form=own.form,
        partner=partner,
        step_s=pace.step_s,
        transfer_s=pace.transfer_s,
        local_steps=exchange.local_steps,
    )


def mismatch(exchange: Exchange, own: Identity, sender: str, meet: g.Meet) -> str:
    """Return what the partner says otherwise than we do, or ""."""
    facts = (
        ("run", meet.run, own.run),
        ("epoch", meet.epoch, exchange.epoch),
        ("view", meet.view, exchange.view),
        ("model", meet.schema, own.schema),
        ("form", meet.form, own.form),
        ("partner", meet.partner, own.name),
    )
    for what, theirs, ours in facts:
        if theirs != ours:
            return f"{what} {theirs} there, {ours} here"
    return "" if sender in exchange.partners else f"{sender} is no partner of this round here"


def target_s(options: g.GossipOptions, paces: list[tuple[float, float]]) -> float:
    """Return how long a round of most peers takes: the lower median of H steps and a transfer.

    paces: (step_s, transfer_s) of the peers whose pace is known.
    """
    times = sorted(options.local_steps * step_s + transfer_s for step_s, transfer_s in paces)
    return times[(len(times) - 1) // 2] if times else 0.0


def adapted_steps(options: g.GossipOptions, own: Pace, target: float) -> int:
    """Return H_i: as many steps as let this peer's round end when the others' do, at least 1, at most H.

    With equal steps this is H − k·c·(1/r − 1) of the specification's section 3.
    """
    if not (options.adapt and own.step_s and own.transfers and target):
        return options.local_steps
    steps = (target - own.transfer_s) / own.step_s
    if steps >= options.local_steps * (1 - SLACK):
        return options.local_steps
    return max(1, int(steps + SLACK))  # a hair late is not worth a step


def timeout_s(options: g.GossipOptions, own: Pace) -> float:
    """Return how long to wait for a partner, from the end of one's own local steps."""
    if own.wait_s is None:
        return options.timeout_s_max
    return min(max(options.patience * own.wait_s, options.timeout_s_min), options.timeout_s_max)
