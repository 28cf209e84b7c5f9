"""The virtual network: what a message costs on its way, and when a broken channel is noticed.

Every learner has one channel to the syncer. Each direction has a lane for control messages and a lane for
payloads, both first in, first out; they do not wait for each other (runtime.transport has two streams for the
same reason). A payload takes `bytes / bytes_per_s` on its lane, one after the other, plus the latency.

Invariants: nothing overtakes within a lane; what is on its way when a channel is lost is lost; a cut that
heals before anybody noticed only delays what was sent meanwhile.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from ..errors import ConfigError
from ..protocol import messages as m


class LinkOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Option `sim.link`: one learner's line to the syncer, the same both ways."""

    latency_s: float = 0.01
    bytes_per_s: float = 1e9
    notice_death_s: float = 0.05  # a process that died: the connection is reset
    notice_cut_s: float = 4.7  # a silent line or a frozen process: keepalive fails
    retry_s: float = 1.0  # pause between attempts to connect

    def __post_init__(self) -> None:
        """ConfigError names the first number that no line has."""
        require_numbers("sim.link", self, ("retry_s",), ("latency_s", "notice_death_s", "notice_cut_s"))
        if not self.bytes_per_s > 0:
            raise ConfigError(
                f"sim.link.bytes_per_s={self.bytes_per_s} is not positive: nothing would ever arrive; cut a "
                'line with a fault of kind "partition"'
            )


def require_numbers(section: str, options: Struct, positive: Sequence[str], natural: Sequence[str]) -> None:
    """ConfigError where a number is not finite and above 0, or, of the second names, not 0 or more."""
    for name in (*positive, *natural):
        value = getattr(options, name)
        if not math.isfinite(value) or value < 0 or (value == 0 and name in positive):
            least = "above 0" if name in positive else "of 0 or more"
            raise ConfigError(f"{section}.{name}={value} makes no sense: use a finite value {least}")


@dataclass(slots=True)
class Lane:
    """One direction, one kind of traffic. `free_at`: when its line is idle; `last_at`: its newest arrival."""

    free_at: float = 0.0
    last_at: float = 0.0

    def arrival(self, now: float, nbytes: float, link: LinkOptions) -> float:
        """Return when something of this size that is sent now is there."""
        self.free_at = max(self.free_at, now) + nbytes / link.bytes_per_s
        self.last_at = max(self.last_at, self.free_at + link.latency_s)
        return self.last_at


@dataclass(slots=True)
class Parcel:
    """A message on its way, with its payload."""

    sender: str
    receiver: str
    message: m.AnyMessage
    payload: Any
    connection: int  # the connection it was sent on


@dataclass(slots=True)
class Channel:
    """The line between a learner and the syncer. `connection`: grows with every new one.

    `up`: connected, as both ends believe until they notice otherwise. `cut`: nothing passes.
    """

    learner: str
    link: LinkOptions
    connection: int = 0
    up: bool = False
    cut: bool = False
    lanes: dict[tuple[str, bool], Lane] = field(default_factory=dict)
    held: list[Parcel] = field(default_factory=list)  # arrived at the cut

    def connect(self) -> None:
        """Begin a new connection; its lanes are empty."""
        self.connection += 1
        self.up = True
        self.lanes.clear()
        self.held.clear()

    def lose(self) -> None:
        """Forget the connection and all that is on its way."""
        self.up = False
        self.held.clear()

    def send(self, now: float, parcel: Parcel, nbytes: float) -> float:
        """Put a parcel on its lane; return when it arrives if nothing breaks."""
        key = (parcel.sender, nbytes > 0)
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane()
        return lane.arrival(now, nbytes, self.link)

    def passes(self, parcel: Parcel) -> bool:
        """Whether a parcel that is due now gets through; at a cut it is held."""
        if not self.up or parcel.connection != self.connection:
            return False
        if self.cut:
            self.held.append(parcel)
            return False
        return True

    def heal(self) -> list[Parcel]:
        """Mend the cut; return what was held, in the order it came."""
        self.cut = False
        held, self.held = self.held, []
        return held
