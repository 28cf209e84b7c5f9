"""Two replays of a tape: `verify` guards the protocol, `follow` the mathematics (appendix E.1).

`verify` gives a fresh machine the recorded events and demands the recorded actions: same events, same
decisions. It needs nothing but the tape, of a live run or a simulated one. `follow` gives compute ports the
recorded decisions, in an order that respects cause and effect: who stepped, what was copied, folded (in which
order, with which weight), merged and applied when. Whatever the hardware does, the weights come out as they
did.

Invariants: neither reads a clock; a divergence is reported once, at the first record where it shows, with
both versions.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from ..errors import TapeError
from ..protocol import messages as m
from ..protocol.learner import LearnerMachine
from ..protocol.schedule import SyncOptions
from ..protocol.syncer import SyncerMachine, SyncerState
from . import order
from .record import Header, Record
from .tape import TapeTail, read, workers


class MachineSeed(Struct, frozen=True):
    """What a machine is made from; a tape's header carries it under `machine`, so that the tape is enough."""

    role: str
    name: str
    run: str = ""
    incarnation: str = ""
    shard: int = -1
    position: int = -1
    schema: tuple[m.TensorSpec, ...] = ()
    shards: int = 0
    state: SyncerState | None = None  # what a resumed syncer was restored from


def seed_of(machine: LearnerMachine | SyncerMachine, state: SyncerState | None = None) -> dict[str, Any]:
    """Return what a header must carry so that the machine can be made again; call it before any event."""
    if isinstance(machine, SyncerMachine):
        seed = MachineSeed(
            m.SYNCER, m.SYNCER, machine.run, schema=machine.schema, shards=machine.shards, state=state
        )
    else:
        seed = MachineSeed(
            machine.role, machine.name, machine.run, machine.incarnation, machine.shard, machine.position
        )
    return {"machine": msgspec.to_builtins(seed)}


def machine_of(header: Header) -> LearnerMachine | SyncerMachine:
    """Return the machine of a tape as it was before its first record."""
    if "machine" not in header.settings:
        raise TapeError(f"the tape of {header.worker} has no machine in its header: it cannot be replayed")
    seed = msgspec.convert(header.settings["machine"], MachineSeed)
    if seed.role != m.SYNCER:
        return LearnerMachine(
            seed.name, seed.incarnation, seed.run, seed.shard, seed.position, role=seed.role
        )
    settings = {key: value for key, value in header.settings.items() if key != "machine"}
    options = msgspec.convert(settings["sync"], SyncOptions)
    machine = SyncerMachine(seed.run, options, seed.schema, settings, seed.shards)
    if seed.state is not None:
        machine.restore(seed.state)
    return machine


# ---- verify ----


class Difference(Struct, frozen=True):
    """The first place where a machine decides otherwise than its tape says."""

    worker: str
    record: int
    t: float
    event: str
    recorded: str
    replayed: str


class Verified(Struct, frozen=True):
    """What `verify` found."""

    equal: bool
    records: int
    first_difference: Difference | None = None


_ENCODER = msgspec.json.Encoder(order="deterministic")


def verify(path: str | Path) -> Verified:
    """Replay every tape of a run folder, or one tape. TapeError if a tape is damaged."""
    path = Path(path)
    files = [file.path for file in workers(path)] if path.is_dir() else [path]
    if not files:
        raise TapeError(f"{path} has no tape: give a run folder (the one with `tape/` in it) or a tape file")
    count = 0
    for file in files:
        tape = read(file)
        difference, records = verify_records(tape)
        count += records
        if difference is not None:
            return Verified(False, count, difference)
    return Verified(True, count)


def verify_records(tape: TapeTail) -> tuple[Difference | None, int]:
    """Replay one tape; return the first difference, if any, and the records looked at."""
    records = iter(tape)
    first = next(records, None)
    if first is None:
        return None, 0
    assert tape.header is not None
    machine = machine_of(tape.header)
    worker, count = tape.header.worker, 0
    for record in _chain(first, records):
        count += 1
        replayed = _encode(machine, record)
        recorded = _ENCODER.encode(record.actions)
        if replayed != recorded:
            event = _ENCODER.encode(record.event).decode()
            return Difference(worker, record.i, record.t, event, recorded.decode(), replayed.decode()), count
    return None, count


def _encode(machine: m.Machine, record: Record) -> bytes:
    """Return the machine's decisions as the tape would hold them."""
    try:
        return _ENCODER.encode(tuple(machine.handle(record.t, record.event)))
    except (AssertionError, KeyError, IndexError) as error:
        return _ENCODER.encode(f"the machine fails: {type(error).__name__}: {error}")


def _chain(first: Record, rest: Iterator[Record]) -> Iterator[Record]:
    yield first
    yield from rest


# ---- follow ----


class LearnerPort(Protocol):
    """A learner's tensors, as `follow` drives them."""

    def prepare(self, settings: dict[str, Any], shard: int, position: int) -> None: ...

    def step(self, number: int, tick: int) -> tuple[int, tuple[int, ...]]:
        """Take an inner step and copy what is watched; return its tokens and what was copied."""
        ...

    def copy(self, fragments: tuple[int, ...]) -> None: ...

    def snapshot(self, fragment: int, step: int, *, full: bool) -> Any: ...

    def apply(self, fragment: int, version: int, payload: Any) -> None: ...


class SyncerPort(Protocol):
    """The syncer's tensors, as `follow` drives them."""

    def fold(self, action: m.Fold, payload: Any) -> None: ...

    def merge(self, fragment: int, version: int) -> None: ...

    def discard(self, fragment: int) -> None: ...

    def payload(self, fragment: int, version: int) -> Any: ...


@dataclass(frozen=True)
class Ports:
    """Where `follow` gets its ports: one per learner incarnation, one for the syncer."""

    learner: Callable[[str], LearnerPort]
    syncer: SyncerPort


class Follower:
    """Carries out a run's recorded decisions. Feed it (worker, record) in an order that respects causes."""

    def __init__(self, ports: Ports, *, versions_kept: int = 64) -> None:
        self.records = 0
        self._ports = ports
        self._learners: dict[str, LearnerPort] = {}
        self._pushes: dict[tuple[str, int], Any] = {}  # (worker, fragment) -> payload on its way
        self._updates: dict[tuple[int, int], Any] = {}  # (fragment, version) -> payload
        self._kept = versions_kept

    def take(self, worker: str, record: Record) -> None:
        """Do what was done at this record."""
        self.records += 1
        if worker == m.SYNCER:
            for action in record.actions:
                self._syncer(action)
            return
        self._learner_event(worker, record)
        for action in record.actions:
            self._learner(worker, action)

    def _syncer(self, action: m.Action) -> None:
        match action:
            case m.Fold(fragment=fragment, worker=worker):
                self._ports.syncer.fold(action, self._pushes.pop((worker, fragment)))
            case m.Merge(fragment=fragment, version=version):
                self._ports.syncer.merge(fragment, version)
            case m.Discard(fragment=fragment):
                self._ports.syncer.discard(fragment)
            case m.Send(message=m.Update(fragment=fragment, version=version)):
                if (fragment, version) not in self._updates:
                    self._updates[fragment, version] = self._ports.syncer.payload(fragment, version)
                    self._updates.pop((fragment, version - self._kept), None)

    def _learner_event(self, worker: str, record: Record) -> None:
        if worker not in self._learners:
            return
        match record.event:
            case m.StepCompleted(step=step, tokens=tokens, copied=copied, tick=tick):
                port = self._learners[worker]
                port.copy(copied)
                done, _ = port.step(step, tick)
                if done != tokens:
                    raise TapeError(
                        f"record {record.i} of {worker}: step {step} had {tokens} tokens, here it has "
                        f"{done}: data.batch or the data differ from the recorded run's"
                    )
            case m.Applied(fragment=fragment, version=version):
                payload = self._updates.get((fragment, version))
                if payload is None:
                    raise TapeError(
                        f"record {record.i} of {worker}: version {version} of fragment {fragment} landed, "
                        "but no tape shows it being sent; are all tapes of the run here?"
                    )
                self._learners[worker].apply(fragment, version, payload)

    def _learner(self, worker: str, action: m.Action) -> None:
        match action:
            case m.Prepare(settings=settings, shard=shard, position=position) if shard >= 0:
                # Without a shard it is an observer: nothing comes from it.
                self._learners[worker] = self._ports.learner(worker)
                self._learners[worker].prepare(settings, shard, position)
            case m.Send(message=m.Push(fragment=fragment, step=step, full=full)):
                payload = self._learners[worker].snapshot(fragment, step, full=full)
                self._pushes[worker, fragment] = payload


def follow(records: Iterable[tuple[str, Record]], ports: Ports) -> Follower:
    """Carry out recorded decisions to their end; the ports then hold the run's weights."""
    follower = Follower(ports)
    for worker, record in records:
        follower.take(worker, record)
    return follower


def in_order(run_dir: str | Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of all workers of a run, causes before effects."""
    return order.merge(run_dir)
