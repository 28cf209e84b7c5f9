"""Every type that crosses a boundary: messages between workers, events into a machine, actions out of it.

A machine is `handle(now, event) -> list[Action]`. Its host supplies the network and the clock, a compute port
supplies tensors (see `Network` and `Compute` at the end). Payloads are opaque here: a message that carries a
fragment names it and the host moves the bytes beside it.

Invariants: all types are frozen; worker names are strings; times are seconds on the host's clock; `version`
of a fragment is the number of merges it has been through; `tick` is the syncer's global step, 1-based.
"""

from typing import Any, Literal, Protocol

from .gossip import GossipAction, GossipEvent, GossipMessage
from .roots import PROTOCOL_VERSION, Action, Event, Message, TensorSpec

__all__ = ["PROTOCOL_VERSION", "Action", "Event", "Message", "TensorSpec"]  # beside what is defined here

SYNCER = "syncer"


# ---- messages, learner to syncer ----


class Join(Message, frozen=True):
    """The first message on a channel. An observer receives updates and is never counted."""

    run: str  # run identity; "" accepts whatever run the syncer serves
    role: Literal["learner", "observer"]
    incarnation: str  # one per process start: tells a restart from a reconnection
    schema: tuple[TensorSpec, ...] = ()  # empty on the first contact of a worker that has no settings yet
    epoch: int = 0  # the syncer's epoch those versions belong to
    versions: tuple[int, ...] = ()  # fragment versions held; empty: none
    step: int = 0  # inner steps of this incarnation
    tokens: int = 0  # tokens of this incarnation
    shard: int = -1  # shard this worker name last read, -1 if unknown
    position: int = -1  # tokens this worker name has drawn from that shard, -1 if unknown
    counters: tuple[tuple[int, int], ...] = ()  # (steps, tokens) per fragment since the last update landed
    protocol: int = PROTOCOL_VERSION


class Progress(Message, frozen=True):
    """One inner step is done. Counters of every fragment grew by one step and these tokens (Algorithm 1)."""

    step: int
    tokens: int  # tokens of this incarnation so far
    step_s: float  # seconds of computation in the last step, waiting left out


class Push(Message, frozen=True):
    """Answer to a pull; payload: the outer gradient `base version − weights`, or the weights in full."""

    fragment: int
    tick: int
    base: int  # version the outer gradient is relative to
    step: int  # inner step the snapshot was taken at
    steps: int  # c_steps of the fragment at that step
    tokens: int  # c_tokens of the fragment at that step
    total: int  # tokens of this incarnation at that step
    full: bool = False


class Nothing(Message, frozen=True):
    """Answer to a pull that has no payload: no step since an update landed on the fragment."""

    fragment: int
    tick: int


class Arrived(Message, frozen=True):
    """An update reached the learner's courier (the end of ξ_sync)."""

    fragment: int
    version: int


class Landed(Message, frozen=True):
    """An update was written over the learner's fragment when its incarnation had consumed `total` tokens."""

    fragment: int
    version: int
    step: int
    total: int


class Heartbeat(Message, frozen=True):
    """Nothing else to say, still here."""


class Leave(Message, frozen=True):
    """Orderly goodbye, with what the ledger needs to close."""

    tokens: int  # tokens of this incarnation in all
    unmerged: tuple[int, ...] = ()  # c_tokens per fragment
    reason: str = ""


# ---- messages, syncer to learner ----


class Welcome(Message, frozen=True):
    """The worker is a member. The fragments in `follow` come as updates; it counts once it holds them all."""

    run: str
    epoch: int  # grows by one each time the syncer resumes from a checkpoint
    settings: dict[str, Any]  # the run's options; the worker adopts them
    shard: int
    position: int  # tokens of the shard that are already taken
    tick: int
    versions: tuple[int, ...]
    follow: tuple[int, ...]  # fragments whose update follows
    credit: int = 0  # steps of the worker that still count, at τ = 0


class Refused(Message, frozen=True):
    """A join or a push was turned down. `final`: trying again as you are cannot help."""

    reason: str
    final: bool = False
    fragment: int = -1


class Pull(Message, frozen=True):
    """Push this fragment now, from the newest snapshot. `full`: send the weights, not the outer gradient."""

    fragment: int
    tick: int
    version: int
    full: bool = False


class TickClosed(Message, frozen=True):
    """Tick `tick` is closed; the receiver was counted with its report of step `counted` (-1: it was not).

    Or, with `abandoned`: the round of this fragment, begun at this tick, came to nothing. No update of it
    will come, and a report that is named in `counted` counts again.
    """

    tick: int
    counted: int = -1
    abandoned: int = -1


class Update(Message, frozen=True):
    """Payload: the weights of a fragment. `tokens`: of the receiver's own push that was merged into it."""

    fragment: int
    version: int
    tick: int
    tokens: int = 0


class Done(Message, frozen=True):
    """The global step reached its end: stop, say `Leave`."""

    tick: int
    reason: str = ""
    versions: tuple[int, ...] = ()  # the final ones: an observer waits for them


AnyMessage = (
    Join | Progress | Push | Nothing | Arrived | Landed | Heartbeat | Leave
    | Welcome | Refused | Pull | TickClosed | Update | Done | GossipMessage
)  # fmt: skip


# ---- events ----


class Connected(Event, frozen=True):
    """A channel to or from `worker` is open."""

    worker: str


class Disconnected(Event, frozen=True):
    """The channel to or from `worker` is gone."""

    worker: str
    reason: str = ""


class Received(Event, frozen=True):
    """A message came in. A payload, if any, has been checked for length and checksum by the host."""

    sender: str
    message: AnyMessage


class Woke(Event, frozen=True):
    """The moment asked for with `Wake` has come."""


class StepCompleted(Event, frozen=True):
    """The compute port finished an inner step and copied these fragments, before anything was applied."""

    step: int
    tokens: int  # of this step
    step_s: float
    copied: tuple[int, ...] = ()
    tick: int = 0  # the global tick that the step's learning rate followed


class Applied(Event, frozen=True):
    """The compute port wrote this version over its fragment, at the boundary after `step`."""

    fragment: int
    version: int
    step: int


class Prepared(Event, frozen=True):
    """A learner's compute port is ready to adopt weights: the model is built to the settings received."""

    schema: tuple[TensorSpec, ...]
    environment: dict[str, Any] = {}  # noqa: RUF012 (of the computing process: what could change a bit)


class Folded(Event, frozen=True):
    """A push was checked and added to its round."""

    fragment: int
    worker: str


class Rejected(Event, frozen=True):
    """A push was found unusable and left no trace."""

    fragment: int
    worker: str
    reason: str


class Merged(Event, frozen=True):
    """The outer step of a round is done: the fragment now has this version."""

    fragment: int
    version: int
    digest: str = ""


class MergeFailed(Event, frozen=True):
    """The outer step would have produced unusable weights and was not taken."""

    fragment: int
    reason: str


class StopRequested(Event, frozen=True):
    """The user, a signal or the program asks for an orderly stop."""

    reason: str = ""


AnyEvent = (
    Connected | Disconnected | Received | Woke | StepCompleted | Applied | Prepared
    | Folded | Rejected | Merged | MergeFailed | StopRequested | GossipEvent
)  # fmt: skip


# ---- actions ----


class Send(Action, frozen=True):
    """Give `message` to the network; the payload of a Push or an Update travels beside it."""

    to: str
    message: AnyMessage


class Close(Action, frozen=True):
    """Cut the channel to a worker."""

    worker: str
    reason: str = ""


class Wake(Action, frozen=True):
    """Send `Woke` at this time. A machine has one alarm: the newest replaces any other."""

    at: float


class Prepare(Action, frozen=True):
    """Build the model and fragments to these settings, then say `Prepared`."""

    settings: dict[str, Any]
    shard: int
    position: int


class Copy(Action, frozen=True):
    """From the next inner step on, copy these fragments at each step's end."""

    fragments: tuple[int, ...]


class Apply(Action, frozen=True):
    """Write the received version over the fragment at the next step boundary."""

    fragment: int
    version: int


class Hold(Action, frozen=True):
    """Start no further inner step until `Resume`."""


class Resume(Action, frozen=True):
    """Go on with inner steps."""


class Stop(Action, frozen=True):
    """Start no further inner step; the compute port answers `StopRequested` once it has ended."""

    reason: str


class Tally(Action, frozen=True):
    """A tick closed: who was counted, after which wait. For tape and view; a host has nothing to do."""

    tick: int
    workers: tuple[str, ...]
    step_s: float  # ξ_step
    quorum_s: float  # ξ_quorum
    sync_s: float  # ξ_sync
    window_s: float  # grace window granted, eq. 3
    used_s: float  # from the K-th report to the close


class Fold(Action, frozen=True):
    """Check the push of `worker`, relative to version `base`, and add it to its round with this weight."""

    fragment: int
    worker: str
    weight: float
    base: int
    full: bool = False


class Merge(Action, frozen=True):
    """Turn what was folded into one outer gradient, take the outer step, and call the result `version`."""

    fragment: int
    version: int


class Discard(Action, frozen=True):
    """Forget what was folded for this fragment."""

    fragment: int


class Save(Action, frozen=True):
    """Write a checkpoint of everything this worker holds."""

    round: int


class Notice(Action, frozen=True):
    """One line for the people who watch: `key=value` words."""

    text: str
    level: Literal["info", "warning"] = "info"


class Finish(Action, frozen=True):
    """This worker's part is over. `complete`: the run reached its end."""

    reason: str
    complete: bool = True


AnyAction = (
    Send | Close | Wake | Prepare | Copy | Apply | Hold | Resume | Stop
    | Tally | Fold | Merge | Discard | Save | Notice | Finish | GossipAction
)  # fmt: skip


# ---- the two ports ----


class Machine(Protocol):
    """What every host drives."""

    def handle(self, now: float, event: Event) -> list[Action]:
        """Return the actions this event calls for. `now`: seconds, never decreasing."""
        ...


class Network(Protocol):
    """Channels between workers, first in first out, and the clock."""

    def send(self, to: str, message: Message, payload: Any | None) -> None: ...

    def wake(self, at: float) -> None: ...


class Compute(Protocol):
    """Tensors, or costs that stand for them. Results come back as events, in the order asked."""

    def prepare(self, settings: dict[str, Any], shard: int, position: int) -> None: ...

    def copy(self, fragments: tuple[int, ...]) -> None: ...

    def snapshot(self, fragment: int, step: int, *, full: bool) -> Any: ...

    def apply(self, fragment: int, version: int, payload: Any) -> None: ...

    def fold(self, action: Fold, payload: Any) -> None: ...

    def merge(self, fragment: int, version: int) -> None: ...

    def discard(self, fragment: int) -> None: ...

    def payload(self, fragment: int, version: int) -> Any: ...

    def save(self, round: int) -> None: ...
