"""What a replay keeps on disk, so that one which was interrupted goes on with the same result.

Kept between two records: how far the tapes were taken, every payload in flight, and all tensors that a later
step, merge or exchange depends on. What they are is the replay's own affair (`roles.replaying` of a run with
a syncer, `roles.followed_peers` of gossip): it hands over bytes and named arrays, and takes them back. What
is read from the tapes is not kept.

Invariants: written as a checkpoint is (`runtime.checkpoint`: atomic, checksummed, a kill changes nothing); it
is used for the same tape with the same changes only.
"""

import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError
from ..runtime import checkpoint
from ..tape.order import Ordered

log = logging.getLogger("archipel")

MARK = "a replay"  # what its checkpoints say they are of
EVERY_S = 60.0
REMEDY = "name another --work folder, or start anew without --resume and --work"
Arrays = dict[str, dict[str, np.ndarray]]  # file -> name -> array
T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """Where and how often a replay keeps what it would go on from. `resume`: go on from what is there."""

    folder: Path
    resume: bool = False
    every_s: float = EVERY_S


class Saved(msgspec.Struct):
    """The state of a replay; its arrays stand apart. `state`: as `Resumable.kept` returned it."""

    tape: str
    overrides: list[str]
    state: bytes


class Resumable(Protocol):
    """A replay on its way. `tape`: digest of the run's tapes. `resumed_at`: records that were done before."""

    tape: str
    overrides: list[str]
    resumed_at: int

    @property
    def records(self) -> int:
        """Records taken so far."""
        ...

    def take(self, item: Ordered) -> None:
        """Do what was done at the next record."""
        ...

    def kept(self) -> tuple[bytes, Arrays]:
        """Return all that is needed to go on from between these two records; the arrays need no copy."""
        ...

    def restore(self, state: bytes, arrays: Arrays) -> None:
        """Go on from `kept`. msgspec.DecodeError if the state is of another release."""
        ...


class Keeper:
    """Keeps one replay's state in a folder."""

    def __init__(self, work: Work, replaying: Resumable) -> None:
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

    # ---- there and back ----

    def _write(self) -> None:
        replaying = self._replaying
        state, arrays = replaying.kept()
        saved = Saved(replaying.tape, replaying.overrides, state)
        checkpoint.save(
            self._work.folder,
            replaying.records,
            {file: named for file, named in arrays.items() if named},
            msgspec.msgpack.encode(saved),
            run=MARK,
            keep=1,
        )

    def _restore(self, found: checkpoint.Checkpoint) -> None:
        try:
            saved = msgspec.msgpack.decode(found.state, type=Saved)
            self._check(found.path, saved)
            self._replaying.restore(saved.state, {file: found.arrays(file) for file in found.files})
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{found.path} does not fit this release ({error}): {REMEDY}") from None
        self._replaying.resumed_at = self._replaying.records

    def _check(self, path: Path, saved: Saved) -> None:
        """Raise CheckpointError if what is kept is of another tape, or of another ablation."""
        if saved.tape != self._replaying.tape:
            raise CheckpointError(
                f"{path} is of a replay of other tapes (digest {saved.tape}, here "
                f"{self._replaying.tape}): {REMEDY}"
            )
        if saved.overrides != self._replaying.overrides:
            theirs, ours = (
                " ".join(f"--set {text}" for text in overrides) or "no --set"
                for overrides in (saved.overrides, self._replaying.overrides)
            )
            raise CheckpointError(f"{path} is of a replay with {theirs}, this one has {ours}: {REMEDY}")


# ---- values with tensors in them ----


def apart(value: Any) -> tuple[bytes, dict[str, np.ndarray]]:
    """Return a value of structs and dataclasses as bytes, and by number the arrays in it, each once."""
    arrays: dict[str, np.ndarray] = {}
    numbers: dict[int, int] = {}

    def number(held: Any) -> int:
        if not isinstance(held, np.ndarray | Tensor):
            raise NotImplementedError(f"a {type(held).__name__} cannot be kept")
        if id(held) not in numbers:
            numbers[id(held)] = len(arrays)
            arrays[str(len(arrays))] = held if isinstance(held, np.ndarray) else held.numpy()
        return numbers[id(held)]

    return msgspec.msgpack.encode(value, enc_hook=number), arrays


def together(state: bytes, kind: type[T], arrays: dict[str, np.ndarray]) -> T:
    """Return the value of this kind that `apart` took apart."""

    def held(wanted: type, number: Any) -> Any:
        array = arrays[str(number)]
        return torch.from_numpy(array) if wanted is Tensor else array

    return msgspec.msgpack.decode(state, type=kind, dec_hook=held)
