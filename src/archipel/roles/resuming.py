"""What a replay keeps on disk, so that one which was interrupted goes on with the same result.

Kept between two records: how far the tapes were taken, every payload in flight, the syncer's weights and
momentum with the versions that a later process of it begins with, and of each learner its weights, the
optimizer's moments, copies, bases, residuals and data position. What is read from the tapes is not kept.

Invariants: written as a checkpoint is (`runtime.checkpoint`: atomic, checksummed, a kill changes nothing); it
is used for the same tape with the same changes only.
"""

import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..errors import CheckpointError
from ..runtime import checkpoint
from ..tape.follow import LearnerPort
from .followed import Joined, SyncerAt
from .local import LocalLearner

if TYPE_CHECKING:
    from .replaying import Replaying

log = logging.getLogger("archipel")

MARK = "a replay"  # what its checkpoints say they are of
EVERY_S = 60.0


@dataclass(frozen=True)
class Work:
    """Where and how often a replay keeps what it would go on from. `resume`: go on from what is there."""

    folder: Path
    resume: bool = False
    every_s: float = EVERY_S


class Saved(msgspec.Struct):
    """The state of a replay; its arrays stand apart, payloads under their numbers."""

    tape: str
    overrides: list[str]
    follower: str  # of `Follower.state`
    payloads: int
    syncer: SyncerAt
    learners: list[tuple[str, int, Joined]]  # process, position of its data, what it was made from


class Keeper:
    """Keeps one replay's state in a folder."""

    def __init__(self, work: Work, replaying: "Replaying") -> None:
        self._work, self._replaying = work, replaying
        self._saved_at = time.monotonic()

    def begin(self) -> None:
        """Go on from what is kept, if asked to; else clear it away. CheckpointError if it is of another."""
        found = checkpoint.load_newest(self._work.folder, run=MARK) if self._work.folder.is_dir() else None
        if found is None:
            return
        if not self._work.resume:
            self.clear()
            return
        self._restore(found)
        log.info("replay goes on path=%s records=%d", found.path, found.step)
        self._saved_at = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to save again."""
        return time.monotonic() - self._saved_at >= self._work.every_s

    def save(self) -> str:
        """Keep the state as it is; return what to tell the user. Failing is a warning: the replay goes on."""
        folder = self._work.folder
        try:
            self._write()
        except (CheckpointError, OSError) as error:
            log.warning("the replay cannot be kept, and would begin anew: %s", error)
            return f"it could not be kept in {folder}"
        finally:
            self._saved_at = time.monotonic()
        return f"it goes on from {folder} with --resume"

    def clear(self) -> None:
        """Remove what was kept, and the folder if there is nothing else in it."""
        for path in self._work.folder.glob("step-*"):
            shutil.rmtree(path, ignore_errors=True)
        try:
            self._work.folder.rmdir()
        except OSError:
            return  # not there, or the user's

    # ---- there ----

    def _write(self) -> None:
        replaying = self._replaying
        follower, payloads = replaying.follower.state()
        at, tensors = replaying.syncer.state()
        arrays = {"payloads": {str(number): np.asarray(item) for number, item in enumerate(payloads)}}
        arrays["syncer"] = tensors
        learners = []
        for number, (process, port) in enumerate(replaying.follower.learners.items()):
            assert isinstance(port, LocalLearner)
            arrays[f"learner-{number}"] = port.state()
            learners.append((process, port.position, replaying.learners.joined[process]))
        saved = Saved(replaying.tape, replaying.overrides, follower.decode(), len(payloads), at, learners)
        checkpoint.save(
            self._work.folder,
            replaying.follower.records,
            {file: named for file, named in arrays.items() if named},
            msgspec.json.encode(saved),
            run=MARK,
            keep=1,
        )

    # ---- and back ----

    def _restore(self, found: checkpoint.Checkpoint) -> None:
        saved = self._checked(found)
        replaying = self._replaying
        arrays: dict[str, dict[str, Any]] = {file: found.arrays(file) for file in found.files}
        replaying.syncer.load(saved.syncer, arrays.get("syncer", {}))
        learners: dict[str, LearnerPort] = {}
        for number, (process, position, joined) in enumerate(saved.learners):
            port = replaying.learners.again(process, joined, position)
            port.load(arrays[f"learner-{number}"])
            learners[process] = port
        payloads = [arrays["payloads"][str(number)] for number in range(saved.payloads)]
        replaying.follower.restore(saved.follower.encode(), payloads, learners)
        replaying.resumed_at = replaying.follower.records

    def _checked(self, found: checkpoint.Checkpoint) -> Saved:
        """Return what is kept. CheckpointError if it is of another tape, or of another ablation."""
        remedy = "name another --work folder, or start anew without --resume and --work"
        try:
            saved = msgspec.json.decode(found.state, type=Saved)
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{found.path} does not fit this release ({error}): {remedy}") from None
        if saved.tape != self._replaying.tape:
            raise CheckpointError(
                f"{found.path} is of a replay of other tapes (digest {saved.tape}, here "
                f"{self._replaying.tape}): {remedy}"
            )
        if saved.overrides != self._replaying.overrides:
            theirs, ours = (
                " ".join(f"--set {text}" for text in overrides) or "no --set"
                for overrides in (saved.overrides, self._replaying.overrides)
            )
            raise CheckpointError(f"{found.path} is of a replay with {theirs}, this one has {ours}: {remedy}")
        return saved
