"""`archipel replay`: a run's recorded decisions with real tensors, bit for bit or with one thing changed.

What the tapes record decides everything but the bits of a float, and those depend on torch, the CPU's
instructions and the number of threads (which is taken from the tape): `conditions` says where this process
differs. A replay that takes long keeps in a work folder what it would go on from (`roles.resuming`).
"""

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..errors import ArchipelError
from ..protocol import messages as m
from ..tape.follow import Follower, Ports, starts
from ..tape.order import ordered
from ..tape.record import Record
from ..tape.tape import TapeFile, read, workers
from ..tape.tape import digest as tape_digest
from ..train import models
from ..train.evaluate import evaluate
from .followed import Difference, FollowedLearners, FollowedSyncer, device_here
from .resuming import Keeper, Work

Progress = Callable[[int, int], None]  # records done, newest tick


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
    began = time.monotonic()
    replaying = Replaying(run_dir, overrides)
    keeper = None if work is None else Keeper(work, replaying)
    if keeper is not None:
        keeper.begin()
    replaying.run(progress, stopped, keeper)
    found = replaying.result(evaluated=evaluated or bool(overrides))
    if keeper is not None:
        keeper.clear()
    return msgspec.structs.replace(found, seconds=round(time.monotonic() - began, 3))


class Replaying:
    """One replay on its way."""

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

    def run(
        self, progress: Progress | None, stopped: Callable[[], object], keeper: Keeper | None = None
    ) -> None:
        """Take every record that was not taken yet."""
        tick = 0
        for item in islice(ordered(self._run_dir), self.follower.records, None):
            self.follower.take(item)
            tick = _tick(item.record, tick)
            if progress is not None:
                progress(self.follower.records, tick)
            if keeper is not None and keeper.due():
                keeper.save()
            if stopped():
                kept = keeper.save() if keeper is not None else ""
                raise ReplayStopped(f"the replay was stopped after {self.follower.records} records; {kept}")
        self.follower.close(self._facts().get("versions", ()))

    def result(self, *, evaluated: bool) -> Replayed:
        """Return what came out."""
        digest, recorded = self.syncer.outer.digest(), str(self._facts().get("digest", ""))
        at = self.syncer.at
        return Replayed(
            equal=at.first is None and at.compared > 0 and recorded in ("", digest),
            digest=digest,
            recorded_digest=recorded,
            tape_digest=self.tape,
            records=self.follower.records,
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


def _tick(record: Record, tick: int) -> int:
    return max([tick, *(action.tick for action in record.actions if isinstance(action, m.Tally))])


# ---- conditions ----


def conditions(run_dir: Path) -> list[str]:
    """Return what recorded processes had otherwise than this one, of what can change a bit of a result."""
    found: dict[str, list[str]] = {}
    for file in workers(run_dir):
        for line in _differing(_environment(file)):
            found.setdefault(line, []).append(file.worker)
    return [f"{line} ({', '.join(dict.fromkeys(names))})" for line, names in sorted(found.items())]


def _environment(file: TapeFile) -> dict[str, Any]:
    """Return what a process said of itself: a learner when it was prepared, the syncer in its header."""
    tape = read(file.path)
    for record in tape:
        assert tape.header is not None
        if tape.header.role == m.SYNCER:
            return tape.header.environment
        if tape.header.role != "learner":
            return {}
        if isinstance(record.event, m.Prepared):
            return record.event.environment
    return {}


def _differing(recorded: dict[str, Any]) -> list[str]:
    computed_here = device_here(recorded)
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
