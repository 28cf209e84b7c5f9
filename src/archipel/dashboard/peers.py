"""A gossip run as its rendezvous' tape tells it, while it runs: peers, rounds, fates, consensus error.

The rendezvous' machine decides again along its tape, so that this view has no count of its own. Invariant:
memory does not grow with the run.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..protocol import gossip as g
from ..protocol import messages as m
from ..protocol.rendezvous import Entry, RendezvousMachine
from ..tape.record import Header, Record
from ..tape.replay import machine_of
from .collect import RECENT, Line
from .terminal import LINES_SHOWN, clean, number, seconds, share


class PeerSeries:
    """What a view of a gossip run shows. `take_all` records in order; read the fields whenever you like."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started_at: float | None = None
        self.reports: dict[str, g.Report] = {}  # the newest of each peer
        self.cloning: dict[str, str] = {}  # peer -> whose state it was told to clone while the run went on
        self.back: set[str] = set()  # of these, who settled a round after that
        self.lines: deque[Line] = deque(maxlen=RECENT)
        self.line_count = 0
        self.val_loss_first: float | None = None
        self.val_loss: float | None = None
        self.machine: RendezvousMachine | None = None

    def mirror(self, header: Header) -> None:
        """Follow this process of the rendezvous; before its tape's first record."""
        machine = machine_of(header)
        self.machine = machine if isinstance(machine, RendezvousMachine) else None

    @property
    def tick(self) -> int:
        """The round that the first peer stands at."""
        return max((entry.round for entry in self._entries()), default=0)

    def _entries(self) -> list[Entry]:
        return list(self.machine.entries.values()) if self.machine is not None else []

    def take_all(self, records: Iterable[Record]) -> None:
        """Take the next records of the rendezvous' tape."""
        for record in records:
            self.now = max(self.now, record.t)
            self.started_at = record.t if self.started_at is None else self.started_at
            if self.machine is not None:
                self.machine.handle(record.t, record.event)
            self._take(record)

    def _take(self, record: Record) -> None:
        match record.event:
            case m.Received(sender=sender, message=g.Report() as report) if report.fate != "late":
                self.reports[sender] = report
                if sender in self.cloning:
                    self.back.add(sender)
        for action in record.actions:
            match action:
                case m.Send(to=to, message=g.Admitted(donor=donor)) if donor and self.reports:
                    self.cloning[to] = donor
                    self.back.discard(to)
                case m.Notice(text=text, level=level):
                    self.lines.append(Line(record.t, g.RENDEZVOUS, text, level))
                    self.line_count += 1
                case _:
                    pass

    # ---- shown ----

    def show(self) -> Group:
        """Return the table of peers, the lines of the run and its newest notices."""
        table = Table(box=None, header_style="bold", pad_edge=False)
        for head in ("peer", "state", "round", "tokens", "step", "H", "transfer", "wait", "fate"):
            table.add_column(head, justify="left" if head in ("peer", "state", "fate") else "right")
        for entry in self._entries():
            table.add_row(*map(clean, self._row(entry)))
        styles = {"warning": "yellow"}
        newest = list(self.lines)[-LINES_SHOWN:]
        notices = [Text(clean(line.text), styles.get(line.level, "dim")) for line in newest]
        return Group(table, *map(Text, self.words()), *notices)

    def _row(self, entry: Entry) -> list[str]:
        state = "left" if entry.left else "lost" if not entry.connected else "joining"
        if state == "joining" and entry.ready:
            state = "live"
        report = self.reports.get(entry.name)
        cells = [entry.name, state, str(entry.round), number(entry.tokens)]
        if report is None:
            return [*cells, *["–"] * 5]
        times = (report.step_s, report.transfer_s, report.wait_s)
        step, transfer, wait = map(seconds, times)
        return [*cells, step, str(report.local_steps), transfer, wait, report.fate]

    def words(self) -> list[str]:
        """Return what is to say of the run as a whole."""
        entries, machine = self._entries(), self.machine
        if machine is None:
            return []
        live = sum(entry.paired and entry.connected for entry in entries)
        error = machine.consensus.newest
        found = f"round {self.tick} of {machine.options.rounds}  epoch {machine.epoch}  live {live}"
        found += f"  consensus error {error:.2%}" if error is not None else ""
        table: dict[str, Any] = machine.ledger.table()
        consumed = table["consumed"]
        if not consumed:
            return [found]
        fates = "  ".join(f"{fate} {share(table[fate] / consumed)}" for fate in machine.ledger.kinds)
        return [found, f"tokens {number(consumed)}: {fates}"]

    def status(self) -> str:
        """Return the run in one plain line."""
        return clean(f"{seconds(self.now - (self.started_at or self.now))}  {'  '.join(self.words())}")
