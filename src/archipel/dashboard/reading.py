"""A run folder, read once: the records of all its tapes by time, and the validation losses beside them.

Time is what the hosts' clocks say: on one machine and in a simulation the order is exact, across machines as
good as the clocks agree. Where cause and effect matter, use `tape.order` instead.

Invariants: one record of each worker is in memory, whatever the length of the run; one tape of each worker is
open; a damaged tape is read up to its damage, which its process then tells.
"""

import contextlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..errors import TapeError
from ..protocol import messages as m
from ..protocol.messages import SYNCER
from ..tape.record import Header, Record
from ..tape.tape import TapeFile, TapeTail, segments, workers


@dataclass(eq=False)
class Process:
    """One worker process: what its tape told so far."""

    file: TapeFile
    header: Header | None = None
    records: int = 0
    steps: int = 0
    first_s: float | None = None  # of its first and newest record, on its host's clock
    last_s: float | None = None
    ended: bool = False  # in order: it decided to finish
    end: str = ""  # how the tape ends, once it has been read
    damage: str = ""

    @property
    def worker(self) -> str:
        """Its name."""
        return self.file.worker

    @property
    def learns(self) -> bool:
        """Whether it takes inner steps: a learner or a peer."""
        return self.header is not None and self.header.role in ("learner", "peer")

    @property
    def size(self) -> int:
        """Bytes of its tape on disk."""
        return sum(part.stat().st_size for part in segments(self.file.path))

    def note(self, record: Record) -> None:
        """Take its next record."""
        self.first_s = record.t if self.first_s is None else self.first_s
        self.last_s = record.t
        self.records += 1
        self.steps += isinstance(record.event, m.StepCompleted)
        self.ended = self.ended or any(isinstance(action, m.Finish) for action in record.actions)


class Reading:
    """All tapes of a run. Loop over it once: (process, record), by time."""

    def __init__(self, run_dir: str | Path) -> None:
        """Find the tapes. Raises TapeError where there are none."""
        files = workers(run_dir)
        if not files:
            raise TapeError(f"{run_dir} holds no tape: has the run started, and is it the run's folder?")
        self.processes = [Process(file) for file in files]
        self._starts: dict[int, float] = {}
        for process in self.processes:
            self._peek(process)

    def __iter__(self) -> Iterator[tuple[Process, Record]]:
        by_worker: dict[str, list[Process]] = {}
        for process in self.processes:
            by_worker.setdefault(process.worker, []).append(process)
        lanes = [self._lane(processes) for processes in by_worker.values()]
        return heapq.merge(*lanes, key=lambda item: item[1].t)

    @property
    def own_tape(self) -> set[str]:
        """Names of the workers that step and have a tape here."""
        return {process.worker for process in self.processes if process.learns}

    @property
    def syncers(self) -> list[Process]:
        """The syncer's processes, in the order they ran."""
        found = [process for process in self.processes if process.worker == SYNCER]
        return sorted(found, key=self._start)

    @property
    def start_s(self) -> float | None:
        """When the run began: the first record of its syncer, a learner or a peer; None without any."""
        firsts = (self._starts.get(id(p)) for p in self.processes if p.worker == SYNCER or p.learns)
        return min((first for first in firsts if first is not None), default=None)

    def _start(self, process: Process) -> float:
        return self._starts.get(id(process), float("inf"))

    def _peek(self, process: Process) -> None:
        with contextlib.suppress(TapeError):  # it is told when the tape is read
            tape = TapeTail(process.file.path)
            process.header = tape.header
            for record in tape:
                self._starts[id(process)] = record.t
                break
            tape.close()

    def _lane(self, processes: list[Process]) -> Iterator[tuple[Process, Record]]:
        """Yield the records of one worker's processes, one after the other."""
        # By first record: a simulated process has no wall time that tells which of two came first.
        for process in sorted(processes, key=self._start):
            yield from self._read(process)

    def _read(self, process: Process) -> Iterator[tuple[Process, Record]]:
        try:
            tape = TapeTail(process.file.path)
            for record in tape:
                process.note(record)
                yield process, record
            process.end = _end(tape)
            tape.close()
        except TapeError as error:
            process.damage = str(error)
            process.end = f"DAMAGED: {error}"


def _end(tape: TapeTail) -> str:
    if tape.closed is not None:
        return tape.closed or "closed"
    return f"no end, {tape.torn_bytes} bytes torn" if tape.torn_bytes else "no end: running, or killed"


# ---- validation losses ----


@dataclass(frozen=True)
class Loss:
    """A validation of the merged model. `time`: on the clock of whoever made it, as on the tapes."""

    time: float
    loss: float
    round: int = 0


def losses_from_start(run_dir: str | Path) -> list[tuple[float, float]]:
    """Return (seconds from the run's start, loss) of each validation.

    The start is that of the tapes, as in the run's figures; without tapes the first validation's time.
    """
    found, start = list(losses(run_dir)), None
    with contextlib.suppress(TapeError):
        start = Reading(run_dir).start_s
    zero = found[0].time if found and start is None else start or 0.0
    return [(max(0.0, each.time - zero), each.loss) for each in found]


def losses(run_dir: str | Path) -> Iterator[Loss]:
    """Yield the validations in a run's `metrics.jsonl`, in the order they were made.

    Without that file there are none; a line that a loss of power has torn is passed over.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if b'"kind":"validation"' in line:
                with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError, ValueError):
                    yield _loss(msgspec.json.decode(line))


def _loss(line: dict[str, Any]) -> Loss:
    return Loss(float(line["time"]), float(line["loss"]), int(line.get("round", 0)))
