"""What only a gossip run has among its figures: exchanges, waits for partners, the rendezvous' ledger.

Fed the rendezvous' tape, whose machine decides again along it, and the peers'. Invariant: memory does not
grow with the run.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..protocol import gossip as g
from ..protocol import messages as m
from ..protocol.rendezvous import RendezvousMachine
from ..tape.record import Header, Record
from ..tape.replay import machine_of
from .pace import Sample


@dataclass
class Gossip:
    """What the rendezvous counted, and what peers did in their rounds."""

    machine: RendezvousMachine | None = None
    complete: bool = False
    rounds: int = 0  # settled by at least one peer
    settled: Counter[str] = field(default_factory=Counter)  # peer -> rounds it settled
    partners: Counter[int] = field(default_factory=Counter)  # offers mixed in -> how often
    round_s: Sample = field(default_factory=Sample)  # between two rounds that a peer settled
    wait_s: Sample = field(default_factory=Sample)  # for partners, of each round, as peers report
    transfer_s: Sample = field(default_factory=Sample)
    _settled_at: dict[str, tuple[int, float]] = field(default_factory=dict)

    def begin(self, header: Header) -> None:
        """A process of the rendezvous starts."""
        machine = machine_of(header)
        self.machine = machine if isinstance(machine, RendezvousMachine) else None

    def rendezvous(self, record: Record) -> None:
        """Take the next record of the rendezvous."""
        if self.machine is not None:
            self.machine.handle(record.t, record.event)
        match record.event:
            case m.Received(message=g.Report(wait_s=wait_s, transfer_s=transfer_s)):
                self.wait_s.add(wait_s)
                self.transfer_s.add(transfer_s)
        for action in record.actions:
            if isinstance(action, m.Finish):
                self.complete = action.complete

    def peer(self, worker: str, record: Record) -> None:
        """Take a peer's next record."""
        match record.event:
            case g.Mixed(round=number):
                self.rounds = max(self.rounds, number + 1)
                self.settled[worker] += 1
                last = self._settled_at.get(worker)
                if last is not None and last[0] == number - 1:
                    self.round_s.add(record.t - last[1])
                self._settled_at[worker] = number, record.t
        for action in record.actions:
            if isinstance(action, g.Mix):
                self.partners[len(action.workers)] += 1

    @property
    def fates(self) -> dict[str, Any]:
        """The rendezvous' ledger: tokens by fate; empty without one."""
        return self.machine.ledger.table() if self.machine is not None else {}

    def table(self) -> dict[str, Any] | None:
        """Return the figures of exchanges; None where there were none."""
        exchanges = self.partners.total()
        if not exchanges:
            return None
        mean = sum(count * often for count, often in self.partners.items()) / exchanges
        return {
            "partners": {
                "mean": round(mean, 4),
                "exchanges": {str(count): self.partners[count] for count in sorted(self.partners)},
            },
            "round_s": self.round_s.table(),
            "wait_s": self.wait_s.table(),
            "transfer_s": self.transfer_s.table(),
        }
