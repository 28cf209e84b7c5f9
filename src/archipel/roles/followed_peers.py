"""A gossip run carried out again from its tapes, with real tensors, in one process (for GASLoC).

A peer's decisions are on its tape; what its trainer did with them, and when, is told by the events that
answer: an action is carried out where its answer stands, behind every action before it. Payloads are made
again by their senders. Each offer, mixed model and correction carries a digest, and all are compared.

Invariants: nothing is taken from a clock; a peer's actions keep their order; a payload is made before it is
used, since a message comes after the record that sent it.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..errors import TapeError
from ..protocol import gossip as g
from ..protocol import messages as m
from ..tape.order import Ordered, ordered
from ..tape.record import Header, Record
from ..tape.tape import digest as tape_digest
from ..tape.tape import read, workers
from .ablation import ablated
from .followed import FollowedLearners
from .gossiping import LocalPeer, Saved

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
TENSORS = (g.Take, g.Drop, g.Accept, m.Save, *ANSWERS.values())
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
    seconds: float = 0.0


@dataclass
class Process:
    """One process of a peer on its way through its tape."""

    header: Header
    port: LocalPeer | None = None
    prepare: m.Prepare | None = None
    queue: deque[tuple[m.Action, Any]] = field(default_factory=deque)  # decided, not carried out


@dataclass
class FollowedPeers:
    """All peers of a run."""

    run_dir: Path
    overrides: list[str] = field(default_factory=list)
    records: int = 0
    compared: int = 0
    first: PeerDifference | None = None
    mean: str = ""

    def __post_init__(self) -> None:
        self._data = FollowedLearners(self.overrides)
        self._processes: dict[tuple[str, str], Process] = {}
        self._payloads: dict[Key, Any] = {}
        self._saved: dict[str, dict[int, Saved]] = {}
        for file in workers(self.run_dir):
            tape = read(file.path)
            next(iter(tape), None)
            if tape.header is not None and tape.header.role == "peer":
                self._processes[file.worker, tape.header.incarnation] = Process(tape.header)

    def take(self, item: Ordered) -> None:
        """Do what was done at this record."""
        self.records += 1
        process = self._processes.get((item.worker, item.incarnation))
        if process is None:
            return  # the rendezvous: it holds no tensors
        event, arrived = item.record.event, None
        match event:
            case m.Received(sender=sender, message=message):
                arrived = self._payloads.pop(_key(sender, item.worker, message), None)
            case m.Prepared() if process.prepare is not None:
                self._prepare(process, event)
            case m.StepCompleted():
                self._step(process, item, event)
            case _ if type(event) in ANSWERS:
                self._answer(process, item, event)
        for action in item.record.actions:
            self._decided(process, item.worker, action, arrived)
        if item.last:
            process.port = None

    def _decided(self, process: Process, worker: str, action: m.Action, arrived: Any) -> None:
        match action:
            case m.Prepare():
                process.prepare = action
            case m.Send(to=to, message=g.Model() | g.State() | g.Final() | g.Mean() as message):
                assert process.port is not None
                self._payloads[_key(worker, to, message)] = process.port.payload(to, message)
            case _ if isinstance(action, TENSORS):
                process.queue.append((action, arrived))
        if isinstance(action, g.Accept):
            self._flush(process)

    def _prepare(self, process: Process, prepared: m.Prepared) -> None:
        prepare = process.prepare
        assert prepare is not None
        config = ablated(prepare.settings, self.overrides)
        torch.set_num_threads(prepared.environment.get("threads", 1))
        process.port = LocalPeer(config, self._data.corpus(config, prepare.settings))
        kept = int(process.header.settings.get("machine", {}).get("kept", -1))
        saved = self._saved.get(process.header.worker, {}).get(kept)
        if kept >= 0 and saved is None:
            raise TapeError(
                f"{process.header.worker} started from a checkpoint of round {kept} that no tape here shows "
                "being made: a run can be followed from its beginning only; `--verify-only` works on any"
            )
        found = process.port.prepare(prepare.settings, prepare.shard, prepare.position, saved)
        if found.schema != prepared.schema:
            raise TapeError(
                f"{process.header.worker} trained another model than the run's [model] describes, one of "
                "its user's own: it cannot be followed; `--verify-only` works on any run"
            )

    def _step(self, process: Process, item: Ordered, step: m.StepCompleted) -> None:
        port = process.port
        assert port is not None
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

    def _act(self, process: Process, action: m.Action, payload: Any) -> m.Event | None:
        assert process.port is not None
        if isinstance(action, m.Save):
            kept = self._saved.setdefault(process.header.worker, {})
            kept[action.round] = process.port.save(action.round)
            while len(kept) > SAVES_KEPT:
                kept.pop(next(iter(kept)))
            return None
        if isinstance(action, g.Accept):
            action = g.Accept(self.mean)  # the one made here; where it is another, that was compared already
        return process.port.act(action, payload)

    def _compare(self, item: Ordered, recorded: m.Event, found: m.Event | None) -> None:
        theirs, ours = getattr(recorded, "digest", ""), getattr(found, "digest", "")
        if isinstance(found, g.Averaged):
            self.mean = ours
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
        equal = self.first is None and self.compared > 0 and recorded in ("", self.mean)
        return ReplayedGossip(
            equal, self.mean, recorded, tape_digest(self.run_dir), self.records, self.compared, self.first
        )


def _key(sender: str, to: str, message: m.Message) -> Key:
    number = getattr(message, "attempt", getattr(message, "round", 0))
    return sender, to, type(message).__name__, number


def is_gossip(run_dir: Path) -> bool:
    """Return whether a run folder is a gossip run's."""
    return any(file.worker == g.RENDEZVOUS for file in workers(run_dir))


def replay_gossip(run_dir: Path, overrides: list[str], progress: Any = None) -> ReplayedGossip:
    """Carry out a gossip run's recorded decisions; with overrides, an ablation under the same storm."""
    began = time.monotonic()
    peers = FollowedPeers(run_dir, overrides)
    for item in ordered(run_dir):
        peers.take(item)
        if progress is not None:
            progress(peers.records, _round(item.record))
    return msgspec.structs.replace(peers.result(), seconds=round(time.monotonic() - began, 3))


def _round(record: Record) -> int:
    return record.event.round if isinstance(record.event, g.Mixed) else 0
