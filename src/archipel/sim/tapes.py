"""Tapes of a simulated run, as live workers write them: one per process, from its first record to its end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..protocol import messages as m
from ..tape.record import Header, tape_path
from ..tape.tape import TapeWriter


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
    _writers: dict[int, TapeWriter] = field(default_factory=dict)  # by the machine's identity
    _machines: list[m.Machine] = field(default_factory=list)  # kept, so that no identity is used twice

    def record(self, worker: str, now: float, event: m.Event, actions: list[m.Action]) -> None:
        """Append a record to the tape of the worker's present process."""
        machine = self.machine(worker)
        writer = self._writers.get(id(machine))
        if writer is None:
            writer = self._writers[id(machine)] = self._open(worker, machine)
            self._machines.append(machine)
        writer.write(now, event, actions)

    def _open(self, worker: str, machine: m.Machine) -> TapeWriter:
        opening = self.opening(worker, machine)
        header = Header(self.run, worker, opening.role, opening.incarnation, 0.0, opening.settings)
        return TapeWriter(tape_path(self.folder, worker, opening.incarnation), header)

    def close(self) -> None:
        """End every tape."""
        for writer in self._writers.values():
            writer.close("end of the simulation")
