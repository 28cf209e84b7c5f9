"""The virtual network of peers: everybody has a line of its own and can reach everybody over it.

A worker's line has an uplink and a downlink of equal rate. Each serves one payload after the other, in the
order they come to it: an uplink in the order of sending, a downlink in the order in which payloads begin to
leave their senders. A payload passes the downlink while it still leaves the uplink, so a transfer takes
`bytes / rate` of the narrower of the two when both are free. Only the narrow end is held up by a narrow line:
a fast sender's uplink is free again when the payload has left it. Control messages take the latency only and
do not wait for payloads. This is the model of gossip rounds in `sim.rounds`.

Invariants: nothing overtakes within a direction and kind; what is on its way when a connection is lost is
lost, though the lines stay taken as long as they were; a cut that heals before anybody noticed only delays.
"""

from dataclasses import dataclass, field

from .network import LinkOptions, Parcel

Pair = tuple[str, str]  # sorted


def pair_of(one: str, other: str) -> Pair:
    """Return the two as the key of their connection."""
    return (one, other) if one < other else (other, one)


@dataclass
class Connection:
    """`number` grows with every new one between the two; `up`: as both believe until they notice."""

    number: int = 0
    up: bool = False
    held: list[Parcel] = field(default_factory=list)  # arrived at a cut
    last: dict[tuple[str, bool], float] = field(default_factory=dict)  # (sender, payload?) -> newest arrival


@dataclass
class Mesh:
    """Lines and connections by worker. One without a line of its own, the rendezvous, has an ideal one."""

    lines: dict[str, LinkOptions] = field(default_factory=dict)
    connections: dict[Pair, Connection] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)  # workers that nothing reaches and nothing leaves
    bytes_sent: dict[str, float] = field(default_factory=dict)  # payloads that began to leave, by sender
    _uplinks: dict[str, float] = field(default_factory=dict)  # worker -> when it is free
    _downlinks: dict[str, float] = field(default_factory=dict)

    def between(self, one: str, other: str) -> Connection:
        """Return the connection of two workers, up or not."""
        key = pair_of(one, other)
        found = self.connections.get(key)
        if found is None:
            found = self.connections[key] = Connection()
        return found

    def of(self, worker: str) -> list[tuple[str, Connection]]:
        """Return (other end, connection) of all that are up at a worker, by name."""
        found = [
            (two if one == worker else one, connection)
            for (one, two), connection in self.connections.items()
            if connection.up and worker in (one, two)
        ]
        return sorted(found, key=lambda item: item[0])

    def line(self, one: str, other: str) -> LinkOptions:
        """Return the line that says how long news of one's end takes: that of whoever has one."""
        return self.lines.get(one) or self.lines.get(other) or LinkOptions()

    def broken(self, one: str, other: str) -> bool:
        """Whether nothing passes between the two."""
        return one in self.cut or other in self.cut

    def latency_s(self, one: str, other: str) -> float:
        """Return how long a control message takes: the longer of the two lines'."""
        return max(self.lines[name].latency_s for name in (one, other) if name in self.lines)

    def leaves(self, now: float, sender: str, nbytes: float) -> tuple[float, float]:
        """Put a payload on its sender's uplink; return when it begins to leave and when it has left."""
        begins = max(now, self._uplinks.get(sender, 0.0))
        left = self._uplinks[sender] = begins + nbytes / self.lines[sender].bytes_per_s
        return begins, left

    def arrives(self, now: float, receiver: str, nbytes: float, left: float) -> float:
        """A payload begins to arrive; return when it is there, with nothing more to come after `left`."""
        opens = max(now, self._downlinks.get(receiver, 0.0))
        there = max(left, opens + nbytes / self.lines[receiver].bytes_per_s)
        self._downlinks[receiver] = there
        return there

    def in_order(self, parcel: Parcel, *, bulk: bool, at: float) -> float:
        """Return when a parcel is delivered that is there at this time: not before what was sent earlier."""
        last = self.between(parcel.sender, parcel.receiver).last
        key = (parcel.sender, bulk)
        last[key] = max(at, last.get(key, 0.0))
        return last[key]

    def connect(self, one: str, other: str) -> Connection:
        """Begin a new connection."""
        connection = self.between(one, other)
        connection.number += 1
        connection.up = True
        connection.held.clear()
        connection.last.clear()
        return connection

    def lose(self, one: str, other: str) -> bool:
        """Forget a connection and what is on its way; return whether there was one."""
        connection = self.between(one, other)
        was_up, connection.up = connection.up, False
        connection.held.clear()
        return was_up

    def passes(self, parcel: Parcel) -> bool:
        """Whether a parcel that is due now gets through; at a cut it is held."""
        connection = self.between(parcel.sender, parcel.receiver)
        if not connection.up or connection.number != parcel.connection:
            return False
        if self.broken(parcel.sender, parcel.receiver):
            connection.held.append(parcel)
            return False
        return True
