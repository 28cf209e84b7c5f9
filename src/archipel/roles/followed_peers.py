"""A gossip run carried out again from its tapes, with real tensors, in one process (for GASLoC).

A peer's decisions are on its tape; what its trainer did with them, and when, is told by the events that
answer: an action is carried out where its answer stands, behind every action before it, and one without an
answer as soon as none before it waits. Payloads are made again by their senders. Each offer, mixed model and
correction carries a digest, and all are compared.

Invariants: nothing is taken from a clock; a peer's actions keep their order; a payload is made before it is
used, since a message comes after the record that sent it; `kept` and `restore` change no bit of what follows.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from ..errors import TapeError
from ..protocol import gossip as g
from ..protocol import messages as m
from ..tape.order import Ordered
from ..tape.record import Header
from ..tape.tape import digest as tape_digest
from ..tape.tape import read, workers
from ..train.held import Held
from .followed import FollowedLearners, Joined, changed
from .gossiping import LocalPeer, Saved
from .local import compute_on
from .replaying import Progress, carry_out, conditions
from .resuming import Arrays, Work, apart, together

SAVES_KEPT = 3  # checkpoints of a peer that a later process of it may start from
ANSWERS: dict[type[m.Event], type[m.Action]] = {
    g.Offered: g.Offer,
    g.Mixed: g.Mix,
    g.Corrected: g.Correct,
    g.Captured: g.Capture,
    g.Adopted: g.Adopt,
    g.Submitted: g.Submit,
    g.Gathered: g.Gather,
    g.Averaged: g.Average,
}
WITH_ANSWER = tuple(ANSWERS.values())
TENSORS = (g.Take, g.Drop, g.Accept, m.Save, *WITH_ANSWER)
Schema = tuple[m.TensorSpec, ...]
Payload = np.ndarray | None
Decided = tuple[g.GossipAction | m.Save, Payload]  # with what came in the event that it answers
Key = tuple[str, str, str, int]  # sender, receiver, kind of message, its round or attempt


class PeerDifference(msgspec.Struct, frozen=True):
    """The first place where a peer's tensors came out otherwise. `what`: the event with the digest."""

    worker: str
    record: int
    round: int
    what: str
    recorded: str
    replayed: str


class ReplayedGossip(msgspec.Struct, frozen=True):
    """What `archipel replay` reports of a gossip run. `compared`: offers, models and means with a digest."""

    equal: bool
    digest: str  # of the mean of all peers' models
    recorded_digest: str
    tape_digest: str
    records: int
    compared: int
    first_difference: PeerDifference | None
    conditions: list[str]  # of the recorded run that do not hold here
    resumed_at: int  # record from which this process went on after an earlier one
    seconds: float = 0.0


@dataclass
class Process:
    """One process of a peer on its way through its tape."""

    header: Header
    port: LocalPeer | None = None
    prepare: m.Prepare | None = None
    prepared: m.Prepared | None = None
    queue: deque[Decided] = field(default_factory=deque)  # not carried out

    @property
    def joined(self) -> Joined:
        """What its port is made from."""
        assert self.prepare is not None and self.prepared is not None
        return Joined(self.prepare, self.prepared)

    def driven(self) -> LocalPeer:
        """Return its port, with as many threads to compute on as the recorded process had."""
        assert self.port is not None
        compute_on(self.joined.prepared.environment.get("threads", 1))
        return self.port


class ProcessAt(msgspec.Struct):
    """Where a process stands between two records. Without `held` it has no tensors yet."""

    worker: str
    incarnation: str
    prepare: m.Prepare
    prepared: m.Prepared | None
    queue: list[Decided]
    position: int = 0  # of its data
    held: Held | None = None


class PeersAt(msgspec.Struct):
    """Where the whole replay stands between two records."""

    records: int
    compared: int
    first: PeerDifference | None
    mean: str
    means: dict[str, str]
    processes: list[ProcessAt]  # that go on
    payloads: list[tuple[Key, Payload]]
    saved: dict[str, dict[int, Saved]]


@dataclass
class FollowedPeers:
    """All peers of a run: a replay on its way (`resuming.Resumable`)."""

    run_dir: Path
    overrides: list[str] = field(default_factory=list)
    records: int = 0
    compared: int = 0
    first: PeerDifference | None = None
    mean: str = ""  # the newest made
    means: dict[str, str] = field(default_factory=dict)  # its digest as recorded -> as made here
    resumed_at: int = 0

    def __post_init__(self) -> None:
        self.tape = tape_digest(self.run_dir)
        self._data = FollowedLearners(self.overrides)
        self._processes: dict[tuple[str, str], Process] = {}
        self._payloads: dict[Key, Payload] = {}  # in flight, in the order sent
        self._saved: dict[str, dict[int, Saved]] = {}
        for header in _peers(self.run_dir):
            self._processes[header.worker, header.incarnation] = Process(header)

    def take(self, item: Ordered) -> None:
        """Do what was done at this record."""
        self.records += 1
        process = self._processes.get((item.worker, item.incarnation))
        if process is None:
            return  # the rendezvous: it holds no tensors
        event, arrived = item.record.event, None
        match event:
            case m.Received(sender=sender, message=message):
                arrived = self._arrived(_key(sender, item.worker, message))
            case m.Prepared() if process.prepare is not None:
                self._prepare(process, event)
            case m.StepCompleted():
                self._step(process, item, event)
            case _ if type(event) in ANSWERS:
                self._answer(process, item, event)
        for action in item.record.actions:
            self._decided(process, item.worker, action, arrived)
        self._unanswered(process)
        if item.last:
            self._ended(process)

    def _arrived(self, key: Key) -> Payload:
        """Take a payload off its way, and what was sent before it on its channel: that was lost."""
        if key not in self._payloads:
            return None
        mine = [other for other in self._payloads if other[:3] == key[:3]]
        for lost in mine[: mine.index(key)]:
            del self._payloads[lost]
        return self._payloads.pop(key)

    def _ended(self, process: Process) -> None:
        """The process's tape is at its end: what it saved last, a later process may have started from."""
        while any(isinstance(action, m.Save) for action, _ in process.queue):
            self._act(process, *process.queue.popleft())
        process.port = process.prepare = process.prepared = None
        process.queue.clear()

    def _decided(self, process: Process, worker: str, action: m.Action, arrived: Payload) -> None:
        match action:
            case m.Prepare():
                process.prepare = action
            case m.Send(to=to, message=g.Model() | g.State() | g.Final() | g.Mean() as message):
                key = _key(worker, to, message)
                self._payloads.pop(key, None)  # lost, since it is sent again: the new one is the latest
                self._payloads[key] = process.driven().payload(to, message)
            case _ if isinstance(action, TENSORS):
                process.queue.append((action, arrived))
        if isinstance(action, g.Accept):
            self._flush(process)

    def _prepare(self, process: Process, prepared: m.Prepared) -> None:
        process.prepared, worker = prepared, process.header.worker
        kept = int(process.header.settings.get("machine", {}).get("kept", -1))
        saved = self._saved.get(worker, {}).get(kept)
        if kept >= 0 and saved is None:
            raise TapeError(
                f"{worker} started from a checkpoint of round {kept} that no tape here shows "
                "being made: a run can be followed from its beginning only; `--verify-only` works on any"
            )
        prepare = process.joined.prepare
        process.port, schema = self._built(process.joined, prepare.position, saved)
        if schema != prepared.schema and not changed(self.overrides, "model."):
            raise TapeError(
                f"{worker} trained another model than the run's [model] describes, one of "
                "its user's own: it cannot be followed; `--verify-only` works on any run"
            )

    def _built(self, joined: Joined, position: int, saved: Saved | None = None) -> tuple[LocalPeer, Schema]:
        config, settings = self._data.config(joined), joined.prepare.settings
        compute_on(joined.prepared.environment.get("threads", 1))
        port = LocalPeer(config, self._data.corpus(config, settings))
        return port, port.prepare(settings, joined.prepare.shard, position, saved).schema

    def _step(self, process: Process, item: Ordered, step: m.StepCompleted) -> None:
        port = process.driven()
        rows, rest = divmod(step.tokens, port.sequence)
        if rest or not rows:
            raise TapeError(
                f"record {item.record.i} of {item.worker}: step {step.step} had {step.tokens} tokens, no "
                f"whole number of windows of {port.sequence}: its peer had data of its own"
            )
        port.step(step.step, step.tick, rows)

    def _answer(self, process: Process, item: Ordered, event: m.Event) -> None:
        """Carry out what was decided up to the action that this event answers."""
        wanted = ANSWERS[type(event)]
        while process.queue:
            action, payload = process.queue.popleft()
            found = self._act(process, action, payload)
            if isinstance(action, wanted):
                self._compare(item, event, found)
                return
        raise TapeError(
            f"record {item.record.i} of {item.worker} answers an action that its tape does not hold: "
            "`--verify-only` says whether the tape is whole"
        )

    def _flush(self, process: Process) -> None:
        while process.queue:
            self._act(process, *process.queue.popleft())

    def _unanswered(self, process: Process) -> None:
        """Carry out what nothing will answer, as far as nothing before it waits for its answer.

        A trainer saves before its next step; had it waited here for the next answer, the optimizer's moments
        would be those of later steps.
        """
        while process.queue and not isinstance(process.queue[0][0], WITH_ANSWER):
            self._act(process, *process.queue.popleft())

    def _act(self, process: Process, action: m.Action, payload: Payload) -> m.Event | None:
        port = process.driven()
        if isinstance(action, m.Save):
            kept = self._saved.setdefault(process.header.worker, {})
            kept.pop(action.round, None)  # of an earlier process: the new one is the latest
            kept[action.round] = port.save(action.round)
            while len(kept) > SAVES_KEPT:
                kept.pop(next(iter(kept)))
            return None
        if isinstance(action, g.Accept):
            # The one made here; where it is another, that was compared already.
            action = g.Accept(self.means.get(action.digest, self.mean))
        return port.act(action, payload)

    def _compare(self, item: Ordered, recorded: m.Event, found: m.Event | None) -> None:
        theirs, ours = getattr(recorded, "digest", ""), getattr(found, "digest", "")
        if isinstance(found, g.Averaged):
            self.mean = self.means[theirs] = ours
        if not theirs:
            return
        self.compared += 1
        if theirs != ours and self.first is None:
            number, what = getattr(recorded, "round", -1), type(recorded).__name__
            self.first = PeerDifference(item.worker, item.record.i, number, what, theirs, ours)

    def result(self) -> ReplayedGossip:
        """Return what came out."""
        path = self.run_dir / "rendezvous.json"
        facts = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
        recorded = str(facts.get("digest", ""))
        made = self.means.get(recorded, self.mean)
        equal = self.first is None and self.compared > 0 and recorded in ("", made)
        return ReplayedGossip(
            equal=equal,
            digest=made,
            recorded_digest=recorded,
            tape_digest=self.tape,
            records=self.records,
            compared=self.compared,
            first_difference=self.first,
            conditions=conditions(self.run_dir),
            resumed_at=self.resumed_at,
        )

    # ---- stopping on the way ----

    def kept(self) -> tuple[bytes, Arrays]:
        """Return the state; arrays are those in it by number, and each peer's model and optimizer."""
        arrays: Arrays = {}
        processes = []
        for process in self._processes.values():
            if process.prepare is None:
                continue  # it has not begun, or has ended
            known = process.header.worker, process.header.incarnation, process.prepare, process.prepared
            at = ProcessAt(*known, list(process.queue))
            if process.port is not None:
                at.position, at.held = process.port.position, process.port.state.held()
                arrays[f"peer-{len(processes)}"] = process.port.trained()
            processes.append(at)
        payloads = list(self._payloads.items())
        figures = self.records, self.compared, self.first, self.mean, self.means
        state, arrays["held"] = apart(PeersAt(*figures, processes, payloads, self._saved))
        return state, arrays

    def restore(self, state: bytes, arrays: Arrays) -> None:
        """Go on from `kept`."""
        at = together(state, PeersAt, arrays.get("held", {}))
        self.records, self.compared, self.first = at.records, at.compared, at.first
        self.mean, self.means = at.mean, at.means
        self._payloads, self._saved = dict(at.payloads), at.saved
        for number, one in enumerate(at.processes):
            process = self._processes[one.worker, one.incarnation]
            process.prepare, process.prepared, process.queue = one.prepare, one.prepared, deque(one.queue)
            if one.held is not None:
                process.port, _ = self._built(process.joined, one.position)
                process.port.load(arrays[f"peer-{number}"], one.held)


def _key(sender: str, to: str, message: m.Message) -> Key:
    number = getattr(message, "attempt", getattr(message, "round", 0))
    return sender, to, type(message).__name__, number


def is_gossip(run_dir: Path) -> bool:
    """Return whether a run folder is a gossip run's, with a rendezvous or without."""
    rendezvous = any(file.worker == g.RENDEZVOUS for file in workers(run_dir))
    return rendezvous or next(_peers(run_dir), None) is not None


def _peers(run_dir: Path) -> Iterator[Header]:
    """Yield the headers of all peers' tapes."""
    for file in workers(run_dir):
        tape = read(file.path)
        next(iter(tape), None)
        if tape.header is not None and tape.header.role == "peer":
            yield tape.header


def replay_gossip(
    run_dir: Path,
    overrides: list[str],
    *,
    work: Work | None = None,
    progress: Progress | None = None,
    stopped: Callable[[], object] = lambda: False,
) -> ReplayedGossip:
    """Carry out a gossip run's recorded decisions; with overrides, an ablation under the same storm.

    work, progress, stopped: as `replaying.replay` takes them.
    """
    peers = FollowedPeers(run_dir, overrides)
    return carry_out(peers, run_dir, peers.result, work=work, progress=progress, stopped=stopped)
