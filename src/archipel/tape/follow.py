"""The replay that guards the mathematics: recorded decisions, real tensors, one process (appendix E.1).

`Follower` gives compute ports the recorded decisions in an order that respects cause and effect: who stepped
over how many tokens, what was copied, pushed, folded (in which order, with which weight), merged and applied
when; who joined, died and came back, the syncer too. Whatever the hardware does, the weights come out as they
did. With other ports it is another experiment under the same storm.

A push is folded and a round merged where the tape says that it *was* done, not where it was asked for: what
was rejected then is left out now. Until then its payload is held, so that between two records nothing is half
done, and `state` may be taken there.

Invariants: no clock is read; a message is matched with the payload that travelled beside it, not with a later
one of the same fragment; what is held is what was in flight then: a learner's tensors go when its tape ends,
a message's payload when it was received, overtaken or lost with its channel.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from ..errors import TapeError
from ..protocol import messages as m
from ..protocol.syncer import SyncerMachine
from .order import Ordered
from .record import Header, Record
from .replay import machine_of
from .tape import read, workers


class LearnerPort(Protocol):
    """A learner's tensors, as they are driven here."""

    def rows(self, tokens: int) -> int:
        """Return the windows or images that a step over so many tokens had. TapeError if none explains it."""
        ...

    def step(self, number: int, tick: int, rows: int | None = None) -> tuple[int, tuple[int, ...]]:
        """Take an inner step and copy what is watched; return its tokens and what was copied."""
        ...

    def copy(self, fragments: tuple[int, ...]) -> None: ...

    def snapshot(self, fragment: int, step: int, *, full: bool) -> Any: ...

    def apply(self, fragment: int, version: int, payload: Any) -> None: ...


class SyncerPort(Protocol):
    """The syncer's tensors, as they are driven here."""

    def start(self, number: int) -> None:
        """The syncer's process number … began: the first from initial weights, a later one from what an
        earlier one had saved."""
        ...

    def fold(self, action: m.Fold, payload: Any) -> None: ...

    def merge(self, fragment: int, version: int, digest: str) -> None:
        """Take the outer step. digest: of what came out then, "" if that is not recorded."""
        ...

    def payload(self, fragment: int, version: int) -> Any: ...


@dataclass(frozen=True)
class Ports:
    """Where the ports come from: one for the syncer, one for each process of a learner, ready to adopt."""

    learner: Callable[[str, m.Prepare, m.Prepared], LearnerPort]
    syncer: SyncerPort


class Start(Struct, frozen=True):
    """How one process of the syncer began. `versions`: of the checkpoint it resumed from, saved in `epoch`;
    empty for the first."""

    header: Header
    epoch: int = 0
    versions: tuple[int, ...] = ()


def starts(run_dir: str | Path) -> tuple[Start, ...]:
    """Return the syncer's processes of a run, in order. TapeError if the run cannot be followed."""
    found = []
    for file in workers(run_dir):
        if file.worker != m.SYNCER:
            continue
        tape = read(file.path)
        next(iter(tape), None)
        if tape.header is not None:
            found.append(_start(tape.header))
        tape.close()
    if not found or found[0].versions:
        what = "its first syncer went on from a checkpoint" if found else "it has no tape of a syncer"
        raise TapeError(
            f"{run_dir} cannot be followed: {what}, and a run can be followed from its beginning only; "
            "`--verify-only` works on any"
        )
    return tuple(found)


def _start(header: Header) -> Start:
    machine = machine_of(header)
    assert isinstance(machine, SyncerMachine)
    resumed = machine.epoch > 1
    return Start(header, machine.epoch - 1, tuple(machine.versions)) if resumed else Start(header)


class Parcel(Struct, eq=False):
    """A message with the payload that travels beside it; in a saved state, the payload's number."""

    message: m.Push | m.Update
    payload: Any


class Ready(Struct):
    """A round whose pushes are here. `version`: what it is about to become, -1 while they are collected."""

    pushes: list[tuple[m.Fold, Any]] = field(default_factory=list)
    version: int = -1


class FollowState(Struct):
    """Where a follower stands between two records. Payloads stand apart, under their numbers."""

    records: int = 0
    processes: int = 0  # of the syncer, begun so far
    process: str = ""  # incarnation of the one that runs
    open: dict[str, str] = field(default_factory=dict)  # a worker's process whose tape goes on -> worker
    preparing: dict[str, m.Prepare] = field(default_factory=dict)  # process -> what its model is built to
    pushes: dict[str, list[Parcel]] = field(default_factory=dict)  # from this worker, not received
    updates: dict[str, list[Parcel]] = field(default_factory=dict)  # to this worker, not received
    landing: dict[str, list[Parcel]] = field(default_factory=dict)  # process -> received, not applied
    rounds: dict[int, Ready] = field(default_factory=dict)  # by fragment
    newest: dict[int, Parcel] = field(default_factory=dict)  # by fragment: the update as it is sent to all


class Follower:
    """Carries out a run's recorded decisions. `taped`: workers that have a tape; None: all of them."""

    def __init__(self, ports: Ports, begun: Iterable[Start] = (), taped: Iterable[str] | None = None) -> None:
        self.at = FollowState()
        self.learners: dict[str, LearnerPort] = {}  # by process
        self._ports = ports
        self._begun = tuple(begun)
        self._taped = None if taped is None else frozenset(taped)

    @property
    def records(self) -> int:
        """Records taken so far."""
        return self.at.records

    def take(self, item: Ordered) -> None:
        """Do what was done at the next record."""
        self.at.records += 1
        worker, record = item.worker, item.record
        if worker == m.SYNCER:
            self._syncer(item.incarnation, record)
            return
        process = f"{worker}.{item.incarnation}"
        self.at.open[process] = worker
        self._event(process, worker, record)
        for action in record.actions:
            self._act(process, worker, action)
        if item.last:
            self._gone(process, worker)

    def close(self, versions: Iterable[int] = ()) -> None:
        """End: merge what the run counted as merged, though no record says so. versions: the run's last."""
        self._catch_up(versions)

    # ---- the syncer ----

    def _syncer(self, incarnation: str, record: Record) -> None:
        if incarnation != self.at.process:
            self._begin(incarnation)
        arrived = self._arrived(record.event)
        self._outcome(record.event)
        for action in record.actions:
            if isinstance(action, m.Fold):
                self._collect(record, action, arrived)
            else:
                self._decided(action)

    def _arrived(self, event: m.Event) -> Parcel | None:
        """Take a push that arrives off its way, folded or not."""
        if not isinstance(event, m.Received) or not isinstance(event.message, m.Push):
            return None
        return _matched(self.at.pushes.get(event.sender, []), event.message)

    def _collect(self, record: Record, fold: m.Fold, arrived: Parcel | None) -> None:
        if arrived is None:
            raise TapeError(
                f"record {record.i} of {m.SYNCER}: a push of {fold.worker} is folded, but no tape shows it "
                "being sent; are all tapes of the run here?"
            )
        self.at.rounds.setdefault(fold.fragment, Ready()).pushes.append((fold, arrived.payload))

    def _begin(self, incarnation: str) -> None:
        """Another process of the syncer: what the one before had not saved is gone."""
        number = self.at.processes
        if number < len(self._begun):
            self._catch_up(self._begun[number].versions)
        self.at.process, self.at.processes = incarnation, number + 1
        self.at.pushes.clear()
        self.at.rounds.clear()
        self.at.newest.clear()
        self._ports.syncer.start(number)

    def _catch_up(self, versions: Iterable[int]) -> None:
        """Take the outer steps that were taken and saved before their word came back."""
        for fragment, version in enumerate(versions):
            ready = self.at.rounds.get(fragment)
            if ready is not None and ready.version == version:
                self._merge(fragment, version, "")

    def _outcome(self, event: m.Event) -> None:
        match event:
            case m.Rejected(fragment=fragment, worker=worker):
                pushes = self.at.rounds.setdefault(fragment, Ready()).pushes
                pushes[:] = [(fold, payload) for fold, payload in pushes if fold.worker != worker]
            case m.Merged(fragment=fragment, version=version, digest=digest):
                self._merge(fragment, version, digest)
            case m.MergeFailed(fragment=fragment):
                self.at.rounds.pop(fragment, None)
            case m.Disconnected(worker=worker):
                self.at.pushes.pop(worker, None)
                if worker not in self.at.open.values():
                    self.at.updates.pop(worker, None)

    def _merge(self, fragment: int, version: int, digest: str) -> None:
        for fold, payload in self.at.rounds.pop(fragment, Ready()).pushes:
            self._ports.syncer.fold(fold, payload)
        self._ports.syncer.merge(fragment, version, digest)

    def _decided(self, action: m.Action) -> None:
        match action:
            case m.Merge(fragment=fragment, version=version):
                self.at.rounds.setdefault(fragment, Ready()).version = version
            case m.Discard(fragment=fragment):
                self.at.rounds.pop(fragment, None)
            case m.Send(to=worker, message=m.Welcome()):
                self.at.updates.pop(worker, None)  # what came on an earlier channel came before this
            case m.Send(to=worker, message=m.Update() as update):
                if self._taped is None or worker in self._taped:
                    payload = self._update(update.fragment, update.version)
                    self.at.updates.setdefault(worker, []).append(Parcel(update, payload))

    def _update(self, fragment: int, version: int) -> Any:
        held = self.at.newest.get(fragment)
        if held is None or _version(held) != version:
            payload = self._ports.syncer.payload(fragment, version)
            held = self.at.newest[fragment] = Parcel(m.Update(fragment, version, 0), payload)
        return held.payload

    # ---- learners ----

    def _event(self, process: str, worker: str, record: Record) -> None:
        match record.event:
            case m.Received(message=m.Update() as update):
                parcel = _matched(self.at.updates.get(worker, []), update)
                if parcel is not None and process in self.learners:
                    self.at.landing.setdefault(process, []).append(parcel)
            case m.Prepared() as prepared if process in self.at.preparing:
                prepare = self.at.preparing.pop(process)
                self.learners[process] = self._ports.learner(process, prepare, prepared)
            case m.StepCompleted() as step if process in self.learners:
                self._step(self.learners[process], process, record.i, step)
            case m.Applied(fragment=fragment, version=version) if process in self.learners:
                payload = self._landed(process, record.i, fragment, version)
                self.learners[process].apply(fragment, version, payload)

    def _step(self, port: LearnerPort, process: str, number: int, step: m.StepCompleted) -> None:
        place = f"record {number} of {process}: step {step.step} had {step.tokens} tokens"
        try:
            rows = port.rows(step.tokens)
        except TapeError as error:
            raise TapeError(f"{place}: {error}") from None
        port.copy(step.copied)
        done, _ = port.step(step.step, step.tick, rows)
        if done != step.tokens:
            raise TapeError(f"{place}, here it has {done}: the data differs from the recorded run's")

    def _landed(self, process: str, number: int, fragment: int, version: int) -> Any:
        """Return the payload of a version that landed; what it overtook never will."""
        waiting = self.at.landing.get(process, [])
        mine = [parcel for parcel in waiting if parcel.message.fragment == fragment]
        # The newest: of two with one number, the later is that of a syncer that was started again.
        found = next((parcel for parcel in reversed(mine) if _version(parcel) == version), None)
        if found is None:
            raise TapeError(
                f"record {number} of {process}: version {version} of fragment {fragment} landed, "
                "but no tape shows it being sent; are all tapes of the run here?"
            )
        over = mine[: mine.index(found) + 1]
        waiting[:] = [parcel for parcel in waiting if parcel not in over]
        return found.payload

    def _act(self, process: str, worker: str, action: m.Action) -> None:
        match action:
            case m.Prepare(shard=shard) if shard >= 0:
                # Without a shard it is an observer: nothing comes from it.
                self.at.preparing[process] = action
            case m.Send(message=m.Push(fragment=fragment, step=step, full=full) as push):
                payload = self.learners[process].snapshot(fragment, step, full=full)
                self.at.pushes.setdefault(worker, []).append(Parcel(push, payload))

    def _gone(self, process: str, worker: str) -> None:
        """The process's tape is at its end. What it has pushed may still be on its way."""
        for held in (self.at.open, self.at.preparing, self.at.landing, self.learners):
            held.pop(process, None)
        if worker not in self.at.open.values():
            self.at.updates.pop(worker, None)

    # ---- stopping on the way ----

    def state(self) -> tuple[bytes, list[Any]]:
        """Return JSON for `restore`, and the payloads it refers to by number, each once."""
        payloads: list[Any] = []
        numbers: dict[int, int] = {}

        def number(payload: Any) -> int:
            if id(payload) not in numbers:
                numbers[id(payload)] = len(payloads)
                payloads.append(payload)
            return numbers[id(payload)]

        return msgspec.json.encode(_with_payloads(self.at, number)), payloads

    def restore(self, state: bytes, payloads: list[Any], learners: dict[str, LearnerPort]) -> None:
        """Go on where `state` was taken: the next record to `take` is number `records`."""
        at = msgspec.json.decode(state, type=FollowState)
        self.at = _with_payloads(at, lambda number: payloads[number])
        self.learners = learners


def _with_payloads(at: FollowState, put: Callable[[Any], Any]) -> FollowState:
    """Return the state with each payload replaced by what `put` makes of it."""

    def all_of(parcels: list[Parcel]) -> list[Parcel]:
        return [Parcel(parcel.message, put(parcel.payload)) for parcel in parcels]

    return replace(
        at,
        pushes={worker: all_of(parcels) for worker, parcels in at.pushes.items()},
        updates={worker: all_of(parcels) for worker, parcels in at.updates.items()},
        landing={process: all_of(parcels) for process, parcels in at.landing.items()},
        newest={fragment: all_of([parcel])[0] for fragment, parcel in at.newest.items()},
        rounds={
            fragment: Ready([(fold, put(payload)) for fold, payload in ready.pushes], ready.version)
            for fragment, ready in at.rounds.items()
        },
    )


def _matched(parcels: list[Parcel], message: m.AnyMessage) -> Parcel | None:
    """Take a received message off its way, and what was lost before it on the fragment's channel."""
    assert isinstance(message, m.Push | m.Update)
    mine = [parcel for parcel in parcels if parcel.message.fragment == message.fragment]
    found = next((parcel for parcel in mine if parcel.message == message), None)
    if found is not None:
        over = mine[: mine.index(found) + 1]
        parcels[:] = [parcel for parcel in parcels if parcel not in over]
    return found


def _version(parcel: Parcel) -> int:
    assert isinstance(parcel.message, m.Update)
    return parcel.message.version
