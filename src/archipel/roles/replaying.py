"""`archipel replay`: a run's recorded decisions with real tensors, bit for bit or with one thing changed.

What the tapes record decides everything but the bits of a float, and those depend on torch, the CPU's
instructions and the number of threads (which is taken from the tape): `conditions` says where this process
differs. A replay that takes long keeps in a work folder what it would go on from (`roles.resuming`).
`carry_out` drives any replay; `Replaying` is that of a run with a syncer, gossip's is in
`roles.followed_peers`.
"""

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from ..errors import ArchipelError
from ..protocol import messages as m
from ..tape.follow import Follower, LearnerPort, Ports, starts
from ..tape.order import Ordered, ordered
from ..tape.record import Record
from ..tape.tape import TapeFile, read, workers
from ..tape.tape import digest as tape_digest
from ..train import models
from ..train.evaluate import evaluate
from .followed import Difference, FollowedLearners, FollowedSyncer, Joined, SyncerAt, device_here
from .local import LocalLearner
from .resuming import Arrays, Keeper, Resumable, Work

Progress = Callable[[int, int], None]  # records done, newest tick
Found = TypeVar("Found", bound=msgspec.Struct)
TRAINING = ("learner", "peer")  # roles whose processes have tensors of their own


class Replayed(msgspec.Struct, frozen=True):
    """What `archipel replay` reports. `first_difference`: the first merge whose weights came out
    otherwise."""

    equal: bool
    digest: str
    recorded_digest: str  # of the run's final weights, "" if it left none
    tape_digest: str
    records: int
    merges: int  # compared with a recorded digest
    first_difference: Difference | None
    conditions: list[str]  # of the recorded run that do not hold here
    val_loss: float | None
    resumed_at: int  # record from which this process went on after an earlier one
    seconds: float = 0.0


class ReplayStopped(ArchipelError):
    """A replay was asked to stop before its end."""


def replay(
    run_dir: Path,
    overrides: list[str],
    *,
    work: Work | None = None,
    progress: Progress | None = None,
    stopped: Callable[[], object] = lambda: False,
    evaluated: bool = False,
) -> Replayed:
    """Carry out a run's recorded decisions; with overrides, an ablation under the same storm.

    work: where to keep what a later call goes on from; None: nowhere. stopped: asked between records; once it
    says so, the replay is kept and ReplayStopped raised. evaluated: give the validation loss though nothing
    was changed.
    """
    replaying = Replaying(run_dir, overrides)

    def found() -> Replayed:
        return replaying.result(evaluated=evaluated or bool(overrides))

    return carry_out(replaying, run_dir, found, work=work, progress=progress, stopped=stopped)


def carry_out(
    replaying: Resumable,
    run_dir: Path,
    result: Callable[[], Found],
    *,
    work: Work | None,
    progress: Progress | None,
    stopped: Callable[[], object],
) -> Found:
    """Take every record that was not taken yet; return the result, with the seconds that this process took.

    work, progress, stopped: as `replay` takes them. What is kept goes once the result is there.
    """
    began = time.monotonic()
    keeper = None if work is None else Keeper(work, replaying)
    if keeper is not None:
        keeper.begin()
    tick = 0
    for item in islice(ordered(run_dir), replaying.records, None):
        replaying.take(item)
        tick = _tick(item.record, tick)
        if progress is not None:
            progress(replaying.records, tick)
        if keeper is not None and keeper.due():
            keeper.save()
        if stopped():
            kept = keeper.save() if keeper is not None else ""
            raise ReplayStopped(f"the replay was stopped after {replaying.records} records; {kept}")
    found = result()
    if keeper is not None:
        keeper.clear()
    return msgspec.structs.replace(found, seconds=round(time.monotonic() - began, 3))


def _tick(record: Record, tick: int) -> int:
    """Return the newest tick: the syncer tells it, a peer counts it by itself."""
    stepped = [record.event.tick] if isinstance(record.event, m.StepCompleted) else []
    return max([tick, *stepped, *(action.tick for action in record.actions if isinstance(action, m.Tally))])


class Kept(msgspec.Struct):
    """Where a replay stands between two records; payloads and tensors stand apart."""

    follower: bytes  # of `Follower.state`
    payloads: int
    syncer: SyncerAt
    learners: list[tuple[str, int, Joined]]  # process, position of its data, what it was made from


class Replaying:
    """One replay on its way, of a run with a syncer (`resuming.Resumable`)."""

    def __init__(self, run_dir: Path, overrides: list[str]) -> None:
        self.overrides = overrides
        self.tape = tape_digest(run_dir)
        self.begun = starts(run_dir)
        self.syncer = FollowedSyncer(self.begun, overrides)
        self.learners = FollowedLearners(overrides)
        self.resumed_at = 0
        taped = [file.worker for file in workers(run_dir)]
        self.follower = Follower(Ports(self.learners.make, self.syncer), self.begun, taped)
        self._run_dir = run_dir

    @property
    def records(self) -> int:
        """Records taken so far."""
        return self.follower.records

    def take(self, item: Ordered) -> None:
        """Do what was done at the next record."""
        self.follower.take(item)

    def result(self, *, evaluated: bool) -> Replayed:
        """Return what came out, when all records are taken."""
        self.follower.close(self._facts().get("versions", ()))
        digest, recorded = self.syncer.outer.digest(), str(self._facts().get("digest", ""))
        at = self.syncer.at
        return Replayed(
            equal=at.first is None and at.compared > 0 and recorded in ("", digest),
            digest=digest,
            recorded_digest=recorded,
            tape_digest=self.tape,
            records=self.records,
            merges=at.compared,
            first_difference=at.first,
            conditions=conditions(self._run_dir),
            val_loss=self._loss() if evaluated else None,
            resumed_at=self.resumed_at,
        )

    def _facts(self) -> dict[str, Any]:
        """Return what the syncer left when it ended; nothing if its last process did not."""
        path = self._run_dir / "syncer.json"
        facts: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
        return facts if facts.get("epoch") == self.syncer.at.epoch else {}

    def _loss(self) -> float:
        config = self.syncer.config
        corpus = self.learners.corpus(config, self.begun[0].header.settings)
        model = models.build(config.model)
        state = {name: torch.from_numpy(array) for name, array in self.syncer.outer.tensors().items()}
        model.load_state_dict(state, strict=False)
        return evaluate(model, corpus.validation(config.evaluate.batches, config.evaluate.batch)).loss

    # ---- stopping on the way ----

    def kept(self) -> tuple[bytes, Arrays]:
        """Return the state, and the arrays it refers to: payloads under their numbers."""
        follower, payloads = self.follower.state()
        at, tensors = self.syncer.state()
        arrays = {"payloads": {str(number): np.asarray(item) for number, item in enumerate(payloads)}}
        arrays["syncer"] = tensors
        learners = []
        for number, (process, port) in enumerate(self.follower.learners.items()):
            assert isinstance(port, LocalLearner)
            arrays[f"learner-{number}"] = port.state()
            learners.append((process, port.position, self.learners.joined[process]))
        return msgspec.msgpack.encode(Kept(follower, len(payloads), at, learners)), arrays

    def restore(self, state: bytes, arrays: Arrays) -> None:
        """Go on from `kept`."""
        kept = msgspec.msgpack.decode(state, type=Kept)
        self.syncer.load(kept.syncer, arrays.get("syncer", {}))
        learners: dict[str, LearnerPort] = {}
        for number, (process, position, joined) in enumerate(kept.learners):
            port = self.learners.again(process, joined, position)
            port.load(arrays[f"learner-{number}"])
            learners[process] = port
        payloads = [arrays["payloads"][str(number)] for number in range(kept.payloads)]
        self.follower.restore(kept.follower, payloads, learners)


# ---- conditions ----


def conditions(run_dir: Path) -> list[str]:
    """Return what recorded processes had otherwise than this one, of what can change a bit of a result."""
    found: dict[str, list[str]] = {}
    for file in workers(run_dir):
        for line in _differing(*_environment(file)):
            found.setdefault(line, []).append(file.worker)
    return [f"{line} ({', '.join(dict.fromkeys(names))})" for line, names in sorted(found.items())]


def _environment(file: TapeFile) -> tuple[str, dict[str, Any]]:
    """Return a role and what its process said of itself: the syncer in its header, others once prepared."""
    tape = read(file.path)
    for record in tape:
        assert tape.header is not None
        if tape.header.role == m.SYNCER:
            return m.SYNCER, tape.header.environment
        if tape.header.role not in TRAINING:
            return "", {}
        if isinstance(record.event, m.Prepared):
            return tape.header.role, record.event.environment
    return "", {}


def _differing(role: str, recorded: dict[str, Any]) -> list[str]:
    computed_here = "cpu" if role == "peer" else device_here(recorded)  # peers are followed on a CPU
    here = {
        "torch": str(torch.__version__),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if computed_here == "cuda" else computed_here,
    }
    if "transformers" in recorded:
        from importlib.metadata import version

        here["transformers"] = version("transformers")
    lines = [
        f"{name}: recorded {recorded[name]!r}, here {value!r}"
        for name, value in here.items()
        if name in recorded and recorded[name] != value
    ]
    if "device" in recorded and "batch" not in recorded:
        lines.append("loop: one of its user's own, here the built-in one")
    return lines
