"""What a trainer and its courier say to each other over the channel between them (DESIGN.md, section 1).

Trainer to courier: `Ready`, `Stepped`, `Wrote`, `Ended`. Courier to trainer: the rest. Tensors never travel
here: a frame names a slot of the shared region. Each slot has one owner at a time, and a frame that names it
passes it on. A gossip peer's `Asked` and `Answered` carry actions of its machine and their events as they
are, and name stretches of shared memory, which `Free` gives back.

Invariant: frames of one direction are handled in the order sent, so that what the courier knows of snapshots
and landings is exactly what the trainer did, step by step.
"""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from ..protocol.gossip import GossipAction, GossipEvent
from ..protocol.messages import Save, TensorSpec
from ..protocol.schedule import SyncOptions
from .shared import ALIGNMENT, SlotPool


class Layout(Struct, frozen=True):
    """How the shared region is cut: copies of fragments first, then updates; both pools float32."""

    numels: tuple[int, ...]  # elements of each fragment
    snapshot_slots: int
    update_slots: int

    @property
    def slot_numel(self) -> int:
        """Elements of the largest fragment; at least 1, so that a pool of empty fragments has an address."""
        return max(1, *self.numels)

    @property
    def updates_offset(self) -> int:
        """Byte at which the pool of updates begins."""
        return SlotPool.bytes_needed(self.snapshot_slots, self.slot_numel)

    @property
    def nbytes(self) -> int:
        """Size of the region."""
        return max(ALIGNMENT, self.updates_offset + SlotPool.bytes_needed(self.update_slots, self.slot_numel))


class Frame(Struct, frozen=True, tag=True, array_like=True):
    """Root of all frames."""


class Rounded(Struct, frozen=True, array_like=True):
    """Elements start … stop of a fragment that the trainer keeps in less than float32."""

    fragment: int
    start: int
    stop: int
    dtype: Literal["bfloat16", "float16"]


class Ready(Frame, frozen=True):
    """The model is built. The descriptor of a learner's region comes with this frame."""

    schema: tuple[TensorSpec, ...]
    layout: Layout = Layout((), 0, 0)  # of a learner's region
    rounded: tuple[Rounded, ...] = ()
    environment: dict[str, Any] = {}  # versions, threads, device: for the tape


class Stepped(Frame, frozen=True):
    """An inner step is done; `copies`: (fragment, snapshot slot) taken before anything is applied."""

    step: int
    tokens: int
    step_s: float
    copies: tuple[tuple[int, int], ...] = ()
    tick: int = 0  # the global tick that the step's learning rate followed


class Wrote(Frame, frozen=True):
    """The update in `slot` was written over the fragment; the slot goes back."""

    fragment: int
    version: int
    slot: int
    step: int


class Ended(Frame, frozen=True):
    """No further step will come."""

    reason: str


class Build(Frame, frozen=True):
    """The run's settings: build the model and fragments to them, then say `Ready`."""

    run: str
    settings: dict[str, Any]
    shard: int
    position: int


class Watch(Frame, frozen=True):
    """Copy these fragments at the end of each step from now on."""

    fragments: tuple[int, ...]


class Write(Frame, frozen=True):
    """Write the update in `slot` over the fragment at the next boundary."""

    fragment: int
    version: int
    slot: int


class Free(Frame, frozen=True):
    """The snapshot in this slot, or the stretch of this number, is not needed any more."""

    slot: int


class Stretch(Struct, frozen=True, array_like=True):
    """Shared memory that the sender lends. Its descriptor comes with the frame that names it."""

    number: int
    nbytes: int


class Asked(Frame, frozen=True):
    """Carry this out between two steps. `stretch`: the payload that came for it."""

    action: GossipAction | Save
    stretch: Stretch | None = None


class Answered(Frame, frozen=True):
    """This was done. `stretch`: the payload for the messages that follow from it."""

    event: GossipEvent
    stretch: Stretch | None = None


class Pace(Frame, frozen=True):
    """Hold: start no further step. Otherwise: go on."""

    hold: bool


class Settled(Frame, frozen=True):
    """Said where `paced`: whatever this step calls for, a `Pace` or a `Watch`, was said before."""

    step: int


class News(Frame, frozen=True):
    """The newest tick the learner has heard of."""

    tick: int


class Halt(Frame, frozen=True):
    """The run is over for this trainer. Not complete: it was turned away, and the reason says why."""

    reason: str
    complete: bool


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(
    Ready
    | Stepped
    | Wrote
    | Ended
    | Build
    | Watch
    | Write
    | Free
    | Pace
    | Settled
    | News
    | Halt
    | Asked
    | Answered
)


def encode(frame: Frame) -> bytes:
    """Return the frame as bytes."""
    return _ENCODER.encode(frame)


def decode(data: bytes) -> Frame:
    """Return the frame that these bytes are."""
    return _DECODER.decode(data)


def paced(options: SyncOptions) -> bool:
    """Return whether a trainer may be told to wait after a step, and so must hear of each before the next.

    At τ ≥ 1 without `max_lead_steps` it never waits, not even for its courier.
    """
    return options.overlap_steps == 0 or options.max_lead_steps is not None


def layout(numels: tuple[int, ...], overlap_steps: int) -> Layout:
    """Return a layout with room for the copies of two steps and one more, and for the updates in flight."""
    watched = min(len(numels), 2 * overlap_steps + 1)  # what may be pulled next, and what was pulled already
    return Layout(numels, snapshot_slots=2 * watched + 1, update_slots=min(len(numels), overlap_steps + 2))
