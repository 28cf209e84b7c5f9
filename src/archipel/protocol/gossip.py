"""Gossip's own messages, events and actions, and its options (GASLoC; the faults are our design).

A peer trains H_i local steps, makes its *offer* z, exchanges offers with the partners that the topology names
for the round, and mixes. The *rendezvous* is a small process that says who is a member and since when; it
carries no weights. Payloads travel beside `Model`, `State`, `Final` and `Mean`.

Invariants: `round` counts exchanges, from 0, and is the same number for all peers; a payload is the whole
model, one flat vector; a peer's own offer of a round is made once.
"""

from typing import Any, Literal

from msgspec import Struct, convert

from .roots import PROTOCOL_VERSION, Action, Event, Message
from .topology import Scheme

RENDEZVOUS = "rendezvous"
Fate = Literal["merged", "late", "skipped", "alone"]
Phase = Literal["gathering", "whole", "running", "ended", "over", "left"]
Form = Literal["mixed", "local", "postmix", "drift"]
DEFAULT_MOMENTUM = {"one_peer": 0.5, "one_peer_exponential": 0.3}  # all others 0.7


class GossipOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `[gossip]`: the rendezvous' word; every peer adopts it when it enrols."""

    peers: int = 4  # n the run is planned for; more may join
    rounds: int = 100  # exchanges of the run
    local_steps: int = 30  # H: inner steps of a round
    scheme: Scheme = "two_peer"
    form: Form = "mixed"  # where the outer momentum acts
    outer_lr: float = 0.7  # η
    outer_momentum: float | None = None  # γ; None: 0.7, on random pairs 0.5
    alpha: float = 1.0  # share of the mixing that is done; below 1 damps
    codec: Literal["float32", "bf16"] = "float32"  # what offers travel as
    adapt: bool = True  # a peer that would be late takes fewer local steps (H_i)
    patience: float = 3.0  # how many times its average wait a peer waits for a partner
    timeout_s_min: float = 0.5
    timeout_s_max: float = 30.0  # also the wait before any average is known
    suspect_rounds: int = 3  # failed in a row: a partner that is not there when asked is not waited for
    start_s_max: float = 60.0  # the first round begins without planned peers that have not come by then
    lease_s: float = 5.0  # a peer that the rendezvous has lost for so long leaves the view
    alarm_rounds: int = 6  # consensus error rising over so many rounds raises an alarm
    checkpoint_rounds: int = 20  # rounds between two checkpoints of a peer; 0: none

    @property
    def momentum(self) -> float:
        """γ, by default what is stable for the scheme."""
        if self.outer_momentum is not None:
            return self.outer_momentum
        return DEFAULT_MOMENTUM.get(self.scheme, 0.7)


def gossip_of(settings: dict[str, Any]) -> GossipOptions:
    """Return the gossip options among a run's settings."""
    return convert(settings["gossip"], GossipOptions)


class Address(Struct, frozen=True, array_like=True):
    """A peer and where it listens."""

    name: str
    address: str


# ---- messages: peer and rendezvous ----


class Enrol(Message, frozen=True):
    """A peer's first message to the rendezvous, and again whenever the channel is new."""

    run: str  # "" accepts whatever run the rendezvous serves
    incarnation: str
    address: str  # where partners reach it
    round: int = -1  # the round it stands at; -1: it has no state of this run
    schema: str = ""  # digest of its model; "" until it is built
    tokens: int = 0  # of this incarnation
    shard: int = -1
    position: int = -1
    kept: bool = False  # its state is of a checkpoint: stale, if the others are further
    protocol: int = PROTOCOL_VERSION


class Admitted(Message, frozen=True):
    """The peer is a member. `donor`: whose state to clone before it may be paired; "": its own will do."""

    run: str
    settings: dict[str, Any]
    shard: int
    position: int
    donor: str = ""
    donor_address: str = ""


class Guest(Message, frozen=True):
    """This peer, no member yet, will ask the receiver for its state; it is reached there."""

    name: str
    address: str


class View(Message, frozen=True):
    """From this round on these peers, sorted by name, are paired under this epoch."""

    epoch: int
    round: int
    members: tuple[Address, ...]


class Report(Message, frozen=True):
    """A peer has settled a round. `tokens`: of this incarnation up to the round's end."""

    round: int
    tokens: int
    fate: Fate
    local_steps: int  # H_i of the round
    step_s: float
    transfer_s: float
    wait_s: float
    distance: float = -1.0  # ‖z_i − z_j‖², mean over partners; -1: none came
    norm: float = 0.0  # ‖z_i‖²


class Ready(Message, frozen=True):
    """The peer holds a full state and stands at this round: it may be paired."""

    round: int
    schema: str


class AtEnd(Message, frozen=True):
    """The peer has settled the last round."""

    round: int
    tokens: int


class Conclude(Message, frozen=True):
    """All live peers are at the end: send your model to `writer`, who makes the mean of these members."""

    writer: str
    members: tuple[str, ...]
    attempt: int = 1


class Concluded(Message, frozen=True):
    """The writer has the mean model and its figures."""

    digest: str
    figures: dict[str, Any]
    attempt: int = 1


# ---- messages: peer and peer ----


class Standing(Message, frozen=True):
    """Where a member of a list stands (`roster`); said on every new channel, and whenever it changes."""

    run: str
    agreed: str  # digest of the list and the settings
    phase: Phase
    round: int = -1  # of its state
    root: str = ""  # whose weights it begins the run with, once that is decided
    writer: str = ""  # who makes the mean that it takes part in


class Meet(Message, frozen=True):
    """The handshake of a round: both must say the same, or both skip."""

    run: str
    epoch: int
    round: int
    view: str  # digest of the names
    schema: str
    form: str
    partner: str  # whom the sender expects: the receiver
    step_s: float = 0.0  # the sender's averages, from which H_i follow; 0: not known
    transfer_s: float = 0.0
    local_steps: int = 0


class Decline(Message, frozen=True):
    """There will be no exchange with the receiver in this round. `at`: the round the sender stands at."""

    round: int
    at: int
    reason: str


class Model(Message, frozen=True):
    """Payload: the sender's offer of the round."""

    round: int


class Got(Message, frozen=True):
    """The model of this round is here: the end of a transfer."""

    round: int


class Clone(Message, frozen=True):
    """Send me your whole state at your next round's start."""

    incarnation: str


class State(Message, frozen=True):
    """Payload: the sender's whole state as its round `round` starts."""

    round: int
    epoch: int


class Final(Message, frozen=True):
    """Payload: the sender's model after the last round. `loss`: on the validation data; -1: unknown."""

    attempt: int
    loss: float = -1.0


class Mean(Message, frozen=True):
    """Payload: the mean of all members' models, the run's result."""

    digest: str
    attempt: int


GossipMessage = (
    Enrol | Admitted | Guest | View | Report | Ready | AtEnd | Conclude | Concluded
    | Standing | Meet | Decline | Model | Got | Clone | State | Final | Mean
)  # fmt: skip


# ---- events: what the compute port has done ----


class Offered(Event, frozen=True):
    """The offer of the round is made and can be sent."""

    round: int
    digest: str = ""


class Mixed(Event, frozen=True):
    """The round is settled: the weights are the next round's anchor."""

    round: int
    distance: float = -1.0  # ‖z_i − z_j‖², mean over the partners mixed in
    norm: float = 0.0  # ‖z_i‖²
    digest: str = ""


class Corrected(Event, frozen=True):
    """A late model was applied."""

    round: int
    worker: str
    digest: str = ""


class Captured(Event, frozen=True):
    """The whole state is copied and can be sent to `worker`."""

    round: int
    worker: str


class Adopted(Event, frozen=True):
    """Another peer's state is in place. `reason`: why it could not be used, and nothing was changed."""

    round: int
    reason: str = ""


class Submitted(Event, frozen=True):
    """The final model is copied and can be sent."""

    attempt: int
    loss: float = -1.0


class Gathered(Event, frozen=True):
    """A member's final model was added to the sum."""

    attempt: int
    worker: str


class Averaged(Event, frozen=True):
    """The mean model is made, and can be sent."""

    attempt: int
    digest: str
    figures: dict[str, Any]


GossipEvent = Offered | Mixed | Corrected | Captured | Adopted | Submitted | Gathered | Averaged


# ---- actions: what is asked of the compute port ----


class Know(Action, frozen=True):
    """These are the peers one may have to reach; connections to all others can go."""

    members: tuple[Address, ...]


class Offer(Action, frozen=True):
    """Make the offer of the round from the weights reached; say `Offered`. No step until `Resume`."""

    round: int


class Take(Action, frozen=True):
    """Keep the payload that came with this event: the offer of `worker` for the round."""

    round: int
    worker: str


class Mix(Action, frozen=True):
    """Settle the round with these offers, in this order; none: alone. Say `Mixed`."""

    round: int
    workers: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()


class Correct(Action, frozen=True):
    """Apply a kept offer of an earlier round in delta form; `rounds`: settled since. Say `Corrected`."""

    round: int
    worker: str
    weight: float
    rounds: int


class Drop(Action, frozen=True):
    """Forget offers kept or made for rounds before this one."""

    round: int


class Capture(Action, frozen=True):
    """Copy the whole state, for `worker`; say `Captured`."""

    round: int
    worker: str


class Adopt(Action, frozen=True):
    """Replace the whole state by the payload that came with this event; say `Adopted`."""

    round: int


class Submit(Action, frozen=True):
    """Copy the final model; say `Submitted`."""

    attempt: int


class Gather(Action, frozen=True):
    """Add a member's final model (the payload of this event; one's own without) to the sum of the attempt."""

    attempt: int
    worker: str


class Average(Action, frozen=True):
    """Divide the sum by the members, keep the result as the run's model; say `Averaged`."""

    attempt: int
    members: tuple[str, ...]
    losses: tuple[float, ...] = ()


class Accept(Action, frozen=True):
    """Replace the weights by the mean model, the payload of this event (the writer's own without)."""

    digest: str


GossipAction = (
    Know | Offer | Take | Mix | Correct | Drop | Capture | Adopt | Submit | Gather | Average | Accept
)
