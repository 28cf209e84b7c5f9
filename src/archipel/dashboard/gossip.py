"""What only a gossip run has among its figures: exchanges, waits for partners, the ledger.

Fed the rendezvous' tape, whose machine decides again along it, and the peers'. Where no rendezvous has a tape
(the members stand in a list), the ledger is that of the peers whose tapes are here. Invariant: memory does
not grow with the run.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..protocol import gossip as g
from ..protocol import messages as m
from ..protocol.ledger import Ledger
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
    ledger: Ledger = field(default_factory=lambda: Ledger(1, kind="gossip"))  # as peers' tapes have it
    _skipped: dict[str, dict[int, int]] = field(default_factory=dict)
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

    def peer_begins(self, worker: str, header: Header) -> None:
        """A process of a peer starts."""
        self.ledger.begin(worker, header.incarnation)
        self._skipped[worker] = {}
        told = self.ledger.fates(worker)["consumed"]
        position = int(header.settings.get("machine", {}).get("position", -1))
        if position > told:  # of the process before it, and not on its tape any more
            self.ledger.tail(worker, position - told)

    def peer_died(self, worker: str) -> None:
        """A process of a peer is gone without a goodbye."""
        account = self.ledger.accounts.get(worker)
        if account is not None and account.open:
            self.ledger.lose(worker)

    def peer(self, worker: str, record: Record) -> None:
        """Take a peer's next record."""
        match record.event:
            case m.StepCompleted(tokens=tokens) if worker in self.ledger.accounts:
                self.ledger.reported(worker, self.ledger.accounts[worker].current + tokens)
            case g.Mixed(round=number):
                self.rounds = max(self.rounds, number + 1)
                self.settled[worker] += 1
                last = self._settled_at.get(worker)
                if last is not None and last[0] == number - 1:
                    self.round_s.add(record.t - last[1])
                self._settled_at[worker] = number, record.t
        for action in record.actions:
            match action:
                case g.Mix(workers=workers):
                    self.partners[len(workers)] += 1
                case m.Send(to=g.RENDEZVOUS, message=message):
                    self._said(worker, message)
                case m.Finish(complete=complete) if self.machine is None:
                    self.complete = self.complete or complete

    def _said(self, worker: str, message: m.AnyMessage) -> None:
        """A peer tells a rendezvous, or its list, what became of its tokens."""
        if worker not in self.ledger.accounts:
            return
        match message:
            case g.Report(round=number, tokens=tokens, fate=fate):
                self.ledger.settle_round(worker, number, tokens, fate, self._skipped[worker])
                if self.machine is None and fate != "late":
                    self.wait_s.add(message.wait_s)
                    self.transfer_s.add(message.transfer_s)
            case m.Leave(tokens=tokens):
                self.ledger.left(worker, tokens, [])

    @property
    def fates(self) -> dict[str, Any]:
        """The ledger: tokens by fate; empty where no tape of a peer or a rendezvous is here."""
        ledger = self.machine.ledger if self.machine is not None else self.ledger
        return ledger.table() if ledger.accounts else {}

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
