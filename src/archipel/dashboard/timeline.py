"""Who did what when, in a window of a run: what the timeline picture draws (in kind, the paper's figure 6).

Read from the tapes, simulated or live. A learner's own tape gives its steps, the moments its fragments were
pushed and updates landed; where that tape is elsewhere, its reports to the syncer do. The syncer's tape gives
ticks with their grace windows, and rounds from the first pull to the publication.

Invariants: memory grows with the window, not with the run; times are the hosts' clocks.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from ..errors import ConfigError
from ..protocol import gossip as g
from ..protocol import messages as m
from ..protocol.messages import SYNCER
from ..protocol.quorum import lower_median
from ..tape.record import Record
from .pace import STALLED, Sample, useful_s
from .reading import Process, Reading

STEPS_SHOWN = 24  # of a run whose window nobody chose
STEPS_BEFORE = 6  # of those, before the first fault
_MOMENT = re.compile(r"(\d+(?:\.\d+)?)(t|s)?")


class Step(Struct, frozen=True):
    """One inner step. What it stood still is taken to come first: start … steps_from … end."""

    start: float
    steps_from: float
    end: float


class Pushed(Struct, frozen=True):
    """A fragment left a learner, and `merged`: it was folded into its round. In gossip an offer left for a
    partner."""

    at: float
    fragment: int
    merged: bool


class Landed(Struct, frozen=True):
    """An update was written over a fragment; in gossip a round was settled, `fragment` its number."""

    at: float
    fragment: int


class Ticked(Struct, frozen=True):
    """A tick closed; waited: from the K-th report on, of a window granted."""

    tick: int
    at: float
    waited_s: float
    window_s: float


class Merging(Struct, frozen=True):
    """A round of a fragment, from its first pull to its publication.

    `version` -1: it came to nothing; 0: it was under way at the end of what was read.
    """

    fragment: int
    tick: int
    start: float
    end: float
    version: int
    workers: tuple[str, ...] = ()


@dataclass
class Row:
    """One worker in the window. `absent`: without a process, from … to; `died`: when one did not end in
    order."""

    worker: str
    steps: list[Step] = field(default_factory=list)
    pushed: list[Pushed] = field(default_factory=list)
    landed: list[Landed] = field(default_factory=list)
    absent: list[tuple[float, float]] = field(default_factory=list)
    died: list[float] = field(default_factory=list)


@dataclass
class Window:
    """From when to when, on the tapes' clock. `zero`: where the run began; `whole_s`: how long it is."""

    start: float
    end: float
    zero: float
    whole_s: float


@dataclass
class Scene:
    """All that happened in a window."""

    window: Window
    rows: list[Row]
    syncer: Row
    ticks: list[Ticked]
    rounds: list[Merging]
    gossip: bool = False  # peers, no syncer

    @property
    def crowd(self) -> int:
        """Steps of the learner that took most of them in the window."""
        return max((len(row.steps) for row in self.rows), default=0)


# ---- which window ----


@dataclass
class _Extent:
    """How a run lies in time: its ends, its ticks that somebody asked for, its first fault, its steps."""

    asked: frozenset[int]
    start: float | None = None
    first_step: float | None = None
    end: float = 0.0
    fault: float | None = None
    ticks: dict[int, float] = field(default_factory=dict)
    steps: Sample = field(default_factory=Sample)

    def take(self, process: Process, record: Record) -> None:
        if process.worker != SYNCER and not process.learns:
            return
        self.start = record.t if self.start is None else self.start
        self.end = max(self.end, record.t)
        match record.event:
            case m.StepCompleted(step_s=step_s) | m.Received(message=m.Progress(step_s=step_s)):
                self.first_step = record.t if self.first_step is None else self.first_step
                self.steps.add(step_s)
            case m.Disconnected() if self.fault is None and process.worker == SYNCER:
                self.fault = record.t
        for action in record.actions:
            if isinstance(action, m.Tally) and action.tick in self.asked:
                self.ticks.setdefault(action.tick, record.t)


def window_of(run_dir: str | Path, since: str = "", until: str = "") -> Window:
    """Return the window that `since` and `until` mean: seconds from the run's start, or ticks as in `40t`.

    Without either it is the whole run if that is short, else the steps around the first lost channel, else
    those in the middle. ConfigError where a moment cannot be read, lies outside the run, or they are the
    wrong way round.
    """
    moments = [_moment(text) for text in (since, until)]
    extent = _Extent(frozenset(int(value) for value, unit in filter(None, moments) if unit == "t"))
    for process, record in Reading(run_dir):
        extent.take(process, record)
    zero, whole_s = extent.start or 0.0, extent.end - (extent.start or 0.0)
    start, end = _chosen(extent)
    if moments[0] is not None:
        start = _at(extent, moments[0])
        end = min(start + STEPS_SHOWN * (extent.steps.median or whole_s), extent.end)
    if moments[1] is not None:
        end = min(_at(extent, moments[1]), extent.end)
        start = start if moments[0] is not None else zero
    if not zero <= start < end:
        raise ConfigError(
            f"from {start - zero:g} s to {end - zero:g} s is no window of this run of {whole_s:g} s: "
            "give --from below --to, both within it"
        )
    return Window(start, end, zero, whole_s)


def _moment(text: str) -> tuple[float, str] | None:
    if not text:
        return None
    found = _MOMENT.fullmatch(text)
    if found is None or (found[2] == "t" and "." in found[1]):
        raise ConfigError(f"moment {text!r} is neither seconds, as in 12.5, nor a tick, as in 40t")
    return float(found[1]), found[2] or "s"


def _at(extent: _Extent, moment: tuple[float, str]) -> float:
    value, unit = moment
    if unit == "s":
        return (extent.start or 0.0) + value
    if int(value) not in extent.ticks:
        raise ConfigError(f"tick {value:.0f} did not close in this run: see `archipel tape RUN` for its last")
    return extent.ticks[int(value)]


def _chosen(extent: _Extent) -> tuple[float, float]:
    """Return the window for a run of which nothing was asked."""
    start, step_s = extent.start or 0.0, extent.steps.median
    if step_s is None or extent.end - start <= 1.5 * STEPS_SHOWN * step_s:
        return start, extent.end
    length_s = STEPS_SHOWN * step_s
    middle = extent.first_step or start
    middle += (extent.end - middle - length_s) / 2
    fault = extent.fault if extent.fault is not None and extent.fault < extent.end - 2 * step_s else None
    begin = middle if fault is None else fault - STEPS_BEFORE * step_s
    begin = max(start, min(begin, extent.end - length_s))
    return begin, begin + length_s


# ---- what happened in it ----


class Timeline:
    """Fed a run's records by time, it keeps what lies in the window."""

    def __init__(self, window: Window, own_tape: set[str]) -> None:
        self.window = window
        self.rows: dict[str, Row] = {}
        self.syncer = Row(SYNCER)
        self.ticks: list[Ticked] = []
        self.rounds: list[Merging] = []
        self._own = own_tape
        self._heard_to = window.start
        self._current: dict[str, Process] = {}
        self._steps: dict[str, list[tuple[float, float]]] = {}  # of the present process, (ended, took)
        self._flying: dict[int, tuple[int, float]] = {}  # fragment -> tick, first pull
        self._folded: dict[int, list[str]] = {}
        self._asked: dict[tuple[str, int], float] = {}  # (worker, fragment) -> when its push left
        self._lives: dict[str, str] = {}  # of learners without a tape here: incarnation
        self._gone: dict[str, float] = {}  # and since when they are not heard of

    def take(self, process: Process, record: Record) -> None:
        """Take the next record of the run."""
        worker = process.worker
        if worker != SYNCER and not process.learns:
            return
        self._heard_to = max(self._heard_to, record.t)
        if self._current.get(worker) is not process:
            self._begin(process, record.t)
        if worker == SYNCER:
            self._syncer(record)
        else:
            self._learner(worker, record)

    def _row(self, worker: str) -> Row:
        return self.syncer if worker == SYNCER else self.rows.setdefault(worker, Row(worker))

    def _inside(self, start: float, end: float | None = None) -> bool:
        return start <= self.window.end and (start if end is None else end) >= self.window.start

    def _begin(self, process: Process, now: float) -> None:
        """Another process: where the one before did not end in order, it died."""
        before, row = self._current.get(process.worker), self._row(process.worker)
        self._current[process.worker] = process
        self._steps_over(process.worker)
        if process.worker == SYNCER:
            self._flying.clear()
            self._folded.clear()
        if before is not None and before.last_s is not None:
            self._absent(row, before, min(now, self.window.end))

    def _absent(self, row: Row, process: Process, until: float) -> None:
        since = process.last_s
        if since is not None and self._inside(since, until) and since < until:
            row.absent.append((max(since, self.window.start), until))
            if not process.ended and since >= self.window.start:
                row.died.append(since)

    # ---- learners ----

    def _learner(self, worker: str, record: Record) -> None:
        row = self._row(worker)
        match record.event:
            case m.StepCompleted(step_s=step_s):
                self._step(worker, record.t, step_s)
            case m.Applied(fragment=fragment) if self._inside(record.t):
                row.landed.append(Landed(record.t, fragment))
            case g.Mixed(round=number) if self._inside(record.t):
                row.landed.append(Landed(record.t, number))
        for action in record.actions:
            match action:
                case m.Send(message=m.Push(fragment=fragment)):
                    self._left(worker, fragment, record.t)
                case m.Send(message=g.Model(round=number)) if self._inside(record.t):
                    row.pushed.append(Pushed(record.t, number, True))

    def _step(self, worker: str, ended: float, took: float) -> None:
        steps = self._steps.setdefault(worker, [])
        steps.append((ended, took))
        if len(steps) >= 3:
            self._place(worker, steps[-3][1], steps[-2], steps[-1][1])
            del steps[:-2]
        elif len(steps) == 2:
            self._place(worker, None, steps[0], took)

    def _steps_over(self, worker: str) -> None:
        """No step follows in this process."""
        steps = self._steps.pop(worker, [])
        if steps:
            self._place(worker, steps[-2][1] if len(steps) > 1 else None, steps[-1], None)

    def _place(
        self, worker: str, before: float | None, step: tuple[float, float], after: float | None
    ) -> None:
        ended, took = step
        if self._inside(ended - took, ended):
            useful = useful_s(before, took, after)
            self._row(worker).steps.append(Step(ended - took, ended - useful, ended))

    def _left(self, worker: str, fragment: int, now: float) -> None:
        """A push left its learner; whether it is merged, the syncer will say."""
        self._unmerged(worker, fragment)
        self._asked[worker, fragment] = now

    def _unmerged(self, worker: str, fragment: int) -> None:
        at = self._asked.pop((worker, fragment), None)
        if at is not None and self._inside(at):
            self._row(worker).pushed.append(Pushed(at, fragment, False))

    # ---- the syncer ----

    def _syncer(self, record: Record) -> None:
        now = record.t
        match record.event:
            case m.Received(sender=sender, message=message) if sender not in self._own:
                self._reported(now, sender, message)
            case m.Merged(fragment=fragment, version=version):
                self._merged(now, fragment, version)
            case m.Disconnected(worker=worker) if worker in self._lives:
                self._gone.setdefault(worker, self._steps[worker][-1][0] if worker in self._steps else now)
                self._steps_over(worker)
        for action in record.actions:
            match action:
                case m.Tally() if self._inside(now - action.used_s, now):
                    self.ticks.append(Ticked(action.tick, now, action.used_s, action.window_s))
                case m.Send(message=m.Pull(fragment=fragment, tick=tick)):
                    self._flying.setdefault(fragment, (tick, now))
                case m.Fold(fragment=fragment, worker=worker):
                    self._folded.setdefault(fragment, []).append(worker)
                case m.Discard(fragment=fragment):
                    self._merged(now, fragment, -1)

    def _reported(self, now: float, sender: str, message: m.Message) -> None:
        match message:
            case m.Join(incarnation=incarnation, role="learner"):
                row, before = self._row(sender), self._lives.setdefault(sender, incarnation)
                since = self._gone.setdefault(sender, now) if before != incarnation else now
                if before != incarnation and self._inside(since):
                    row.died.append(since)
                self._lives[sender] = incarnation
            case m.Progress(step_s=step_s) if sender in self._lives:
                self._back(sender, now - step_s)
                self._step(sender, now, step_s)
            case m.Push(fragment=fragment):
                self._left(sender, fragment, now)
            case m.Landed(fragment=fragment) if sender in self._lives and self._inside(now):
                self._row(sender).landed.append(Landed(now, fragment))

    def _back(self, worker: str, now: float) -> None:
        """A learner without a tape here was not heard of until now."""
        since = self._gone.pop(worker, now)
        if since < now and self._inside(since, now):
            start, end = max(since, self.window.start), min(now, self.window.end)
            self._row(worker).absent.append((start, end))

    def _merged(self, now: float, fragment: int, version: int) -> None:
        tick, start = self._flying.pop(fragment, (-1, now))
        workers = tuple(self._folded.pop(fragment, ()))
        for worker in workers:
            at = self._asked.pop((worker, fragment), None)
            if at is not None and self._inside(at):
                self._row(worker).pushed.append(Pushed(at, fragment, version >= 0))
        if self._inside(start, now):
            self.rounds.append(Merging(fragment, tick, start, now, version, workers))

    # ---- the end ----

    def scene(self) -> Scene:
        """Return what lies in the window; what is under way at its end is drawn up to there."""
        for worker in list(self._steps):
            self._steps_over(worker)
        for worker in list(self._gone):
            self._back(worker, self.window.end)
        for worker, fragment in list(self._asked):
            self._unmerged(worker, fragment)
        for fragment, (tick, start) in self._flying.items():
            if self._inside(start):
                self.rounds.append(Merging(fragment, tick, start, self.window.end, 0))
        for worker, process in self._current.items():
            row = self._row(worker)
            patience_s = STALLED * (lower_median([step.end - step.steps_from for step in row.steps]) or 1.0)
            if process.last_s is not None and process.last_s < self._heard_to - patience_s:
                self._absent(row, process, self.window.end)
        rows = sorted(self.rows.values(), key=lambda row: _natural(row.worker))
        gossip = any(p.header is not None and p.header.role == "peer" for p in self._current.values())
        return Scene(self.window, rows, self.syncer, self.ticks, self.rounds, gossip)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that puts learner-2 before learner-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def scene_of(run_dir: str | Path, window: Window) -> Scene:
    """Return the scene in a window of a run."""
    reading = Reading(run_dir)
    timeline = Timeline(window, reading.own_tape)
    beyond = window.end + max(window.end - window.start, 1.0)  # for steps and rounds under way at its end
    for process, record in _until(reading, beyond):
        timeline.take(process, record)
    return timeline.scene()


def _until(reading: Reading, end: float) -> Iterator[tuple[Process, Record]]:
    for process, record in reading:
        if record.t > end:
            return
        yield process, record
