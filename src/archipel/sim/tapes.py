"""Tapes of a simulated run, as live workers write them: one per process, from its first record to its end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..protocol import messages as m
from ..tape.record import Header, tape_path
from ..tape.tape import TapeWriter

HOLD_BYTES = 16_384  # written at once; nothing takes effect outside a simulation
REASON = "end of the simulation"


class Opening(Struct, frozen=True):
    """What the header of a process's tape says. `settings`: with what its machine is made again from."""

    role: str
    incarnation: str
    settings: dict[str, Any]


@dataclass
class Tapes:
    """Writes every process's tape. `opening`: of a worker's present machine, asked before it decides."""

    folder: Path
    run: str
    machine: Callable[[str], m.Machine]  # a worker's present one
    opening: Callable[[str, m.Machine], Opening]
    _open_now: dict[str, tuple[m.Machine, TapeWriter]] = field(default_factory=dict)  # by worker

    def record(self, worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        """Append a record to the tape of the worker's present process."""
        machine = self.machine(worker)
        found = self._open_now.get(worker)
        if found is None or found[0] is not machine:
            if found is not None:
                found[1].close(REASON)  # as many files are open as there are workers
            found = self._open_now[worker] = machine, self._open(worker, machine)
        found[1].write(now, event, actions)

    def _open(self, worker: str, machine: m.Machine) -> TapeWriter:
        opening = self.opening(worker, machine)
        header = Header(self.run, worker, opening.role, opening.incarnation, 0.0, opening.settings)
        path = tape_path(self.folder, worker, opening.incarnation)
        return TapeWriter(path, header, hold_bytes=HOLD_BYTES)

    def close(self) -> None:
        """End every tape."""
        for _, writer in self._open_now.values():
            writer.close(REASON)
