"""Checkpoints of a worker: atomic, checksummed, the newest few kept, the newest valid one loaded.

DESIGN.md section 5: nothing acknowledged is lost. A checkpoint is a directory `step-000000123` of safetensors
files, a state file and `manifest.json`, which names the run, the step and, for every file, length and xxh3.

Invariants: a name `step-…` appears by one rename, after everything in it is on disk; `save` returns after
that rename is on disk too. What `save` fails at, or is killed in, changes no older checkpoint; but where the
disk is full, all but the newest valid one make room for it. A save removes only checkpoints of earlier steps.
Every byte of a checkpoint is under a checksum, the manifest's own included. Nothing is unpickled. One process
writes to a directory at a time (`lease`), and needs room for `keep` + 1 checkpoints, at the least for two.
"""

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from archipel.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
LOCK = "syncer.lock"
EPOCH = "syncer.epoch"
STATE_FILES = {"json": "state.json", "bytes": "state.bin"}
FOREIGN_STALE_S = 86400.0  # a writer on another host cannot be asked; after a day it is taken for dead

_CHECKPOINT = re.compile(r"step-(\d{9,})(\.old)?")
_STAGING = re.compile(r"\.writing-(.+)-(\d+)-[0-9a-f]+")
_FILE_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OS_ERROR = re.compile(r"os error (\d+)")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_in_progress: set[str] = set()  # staging names of this process: a restarted container may reuse its pid
_log = logging.getLogger(__name__)


class CheckpointOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `[checkpoint]`."""

    keep: int = 3  # newest valid checkpoints kept on disk


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint as it was written."""

    name: str
    bytes: int
    xxh3: str


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """What a whole checkpoint must contain. `xxh3` is over this manifest with that field empty."""

    format: int
    run: str
    step: int
    state: Literal["json", "bytes"]
    files: tuple[FileEntry, ...]
    xxh3: str = ""


class Skipped(Struct, frozen=True):
    """A checkpoint that was passed over: the file at fault and the reason."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte has been verified; tensors are read when asked for."""

    path: Path
    step: int
    run: str
    state: Any  # the dict or the bytes given to `save`
    files: tuple[str, ...]  # keys of the `arrays` given to `save`
    skipped: tuple[Skipped, ...] = ()  # newer ones that were passed over

    def arrays(self, file: str) -> dict[str, np.ndarray]:
        """Return all tensors of one file by name."""
        return dict(self.tensors(file))

    def tensors(self, file: str) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, tensor) of one file, one tensor at a time, so that loading need not double memory."""
        path = self.path / _file_name(file)
        if file not in self.files:
            raise CheckpointError(f"checkpoint {self.path} has no file {file!r}; it has {list(self.files)}")
        try:
            with safe_open(path, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint file {path} cannot be read: {error}") from error


def save(
    directory: Path,
    step: int,
    arrays: Mapping[str, Mapping[str, np.ndarray]],
    state: dict[str, Any] | bytes,
    *,
    run: str,
    keep: int,
) -> Path:
    """Write one checkpoint, wait until it is on disk, prune older ones; return its directory.

    arrays: file key → tensor name → array of a bool, integer, float or complex64 type. Contiguous arrays are
    written without a copy. state: bytes, or a dict that JSON can hold (keys are strings, tuples return as
    lists). Where the disk is full, older checkpoints go, but for the newest valid one, and it is tried once
    more. Raises CheckpointError, with that one as it was, when it cannot be written.
    """
    assert step >= 0 and keep >= 1, (step, keep)
    target = Path(directory) / f"step-{step:09d}"
    for key in arrays:
        if not _FILE_KEY.fullmatch(key):
            raise CheckpointError(
                f"checkpoint file key {key!r} is not a plain name; use letters, digits, . _ -"
            )
    kind, state_bytes = _encode_state(state)
    draft = Manifest(FORMAT, run, step, kind, ())
    try:
        _make_directory(target.parent)
        _remove_stale(target.parent)
        try:
            _write(target, draft, arrays, state_bytes)
        except (OSError, SafetensorError) as error:
            if not (_for_lack_of_space(error) and _make_room(target, error)):
                raise
            _write(target, draft, arrays, state_bytes)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint of step {step} could not be written to {target}: {error}. The newest one is as it "
            f"was. Make room (for {keep + 1} checkpoints, at the least for two) or name another directory"
        ) from error
    _prune(target.parent, target, keep)
    return target


def _write(
    target: Path, draft: Manifest, arrays: Mapping[str, Mapping[str, np.ndarray]], state: bytes
) -> None:
    """Write a checkpoint under a staging name and give it its own. draft: its manifest without the files."""
    staging = target.with_name(f".writing-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")
    _in_progress.add(staging.name)
    try:
        staging.mkdir()
        files = [_write_tensors(staging / _file_name(key), tensors) for key, tensors in arrays.items()]
        files.append(_write_bytes(staging / STATE_FILES[draft.state], state))
        manifest = msgspec.structs.replace(draft, files=tuple(files))
        _write_bytes(staging / MANIFEST, _encode_manifest(manifest))
        _sync(staging)
        _publish(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        _in_progress.discard(staging.name)


def _for_lack_of_space(error: OSError | SafetensorError) -> bool:
    found = _OS_ERROR.search(str(error))  # safetensors tells it in words only
    return (int(found[1]) if found else getattr(error, "errno", None)) in _FULL


def _make_room(target: Path, error: Exception) -> bool:
    """Remove checkpoints of steps before `target` but for the newest valid one; return whether any went."""
    try:
        whole = [path for path in _candidates(target.parent) if (path / MANIFEST).exists()]
        newest = next((path for path in whole if isinstance(_verify(path, None), Manifest)), None)
        if newest is None:
            return False
        doomed = [path for path in whole if path != newest and _order(path) < _order(target)]
        for path in doomed:
            _remove(path)
    except (OSError, CheckpointError) as failure:
        _log.warning("checkpoint_prune_failed directory=%s reason=%s", target.parent, failure)
        return False
    if doomed:
        names = ",".join(path.name for path in doomed)
        _log.warning("checkpoint_disk_full removed=%s kept=%s reason=%r", names, newest.name, str(error))
    return bool(doomed)


def load_newest(directory: Path, *, run: str | None = None) -> Checkpoint | None:
    """Return the newest checkpoint whose every byte is as it was written, or None when there is none at all.

    One that is damaged is passed over with a warning that names the file; a directory without a manifest is
    no checkpoint and is ignored with a message. Raises CheckpointError when checkpoints exist but none is
    valid, so that a run never starts afresh over the remains of another, and when the newest belongs to
    another run.
    """
    directory = Path(directory)
    skipped: list[Skipped] = []
    damaged = False
    for path in _candidates(directory):
        if not (path / MANIFEST).exists():
            skipped.append(_skip(path, f"no {MANIFEST}: this is not a complete checkpoint"))
            continue
        found = _verify(path, run)
        if isinstance(found, Skipped):
            skipped.append(_skip(found.path, found.reason))
            damaged = True
            continue
        state = _decode_state(path, found.state)
        suffix = len(".safetensors")
        files = tuple(e.name[:-suffix] for e in found.files if e.name.endswith(".safetensors"))
        return Checkpoint(path, found.step, found.run, state, files, tuple(skipped))
    if damaged:
        reasons = "; ".join(f"{item.path}: {item.reason}" for item in skipped)
        raise CheckpointError(
            f"no checkpoint in {directory} is valid ({reasons}). "
            "Restore one, or name an empty directory to start anew"
        )
    return None


def digest_file(path: Path) -> str:
    """Return the 128-bit xxh3 of a file in hexadecimal, read in chunks of 1 MiB."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return str(digest.hexdigest())


class Lease:
    """The sole right to write a run directory; ends with `release` or with the process, whatever ends it.

    A forked child that outlives its parent keeps the lease: start children by exec.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Let another process have the directory. Twice is once. The file stays: removing it would race."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lease(directory: Path) -> Lease:
    """Take the lease of a run directory. Raises CheckpointError naming the holder when there is one."""
    path = Path(directory) / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(
            f"run directory {directory} cannot be locked: {error}; is it writable?"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid={os.getpid()} host={socket.gethostname()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip() or "an unnamed process"
        os.close(descriptor)
        raise CheckpointError(
            f"run directory {directory} already has a syncer ({holder}): one run has one syncer. "
            "Stop that one, or name another directory"
        ) from error
    except OSError as error:
        os.close(descriptor)
        raise CheckpointError(f"{path} cannot be locked: {error}; use a file system with flock") from error
    return Lease(path, descriptor)


def last_epoch(directory: Path) -> int:
    """Return the newest epoch a syncer of this run directory took; 0: none. CheckpointError if untold."""
    path = Path(directory) / EPOCH
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not hold the number of an epoch: {error}; write the highest this run had into it"
        ) from error


def take_epoch(directory: Path, epoch: int) -> None:
    """Note on disk that a syncer takes this epoch. Raises CheckpointError when it cannot be written."""
    path = Path(directory) / EPOCH
    try:
        _write_bytes(path.with_suffix(".tmp"), f"{epoch}\n".encode())
        os.rename(path.with_suffix(".tmp"), path)
        _sync(path.parent)
    except OSError as error:
        raise CheckpointError(f"epoch {epoch} cannot be noted in {path}: {error}; make room") from error


def _file_name(key: str) -> str:
    return f"{key}.safetensors"


def _encode_state(state: dict[str, Any] | bytes) -> tuple[Literal["json", "bytes"], bytes]:
    if isinstance(state, bytes):
        return "bytes", state
    try:
        # The standard library's JSON, because it keeps NaN and infinity, which msgspec turns into null.
        return "json", json.dumps(state).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint state does not fit JSON: {error}; convert it, or give bytes"
        ) from error


def _decode_state(path: Path, kind: Literal["json", "bytes"]) -> Any:
    try:
        data = (path / STATE_FILES[kind]).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint state {path / STATE_FILES[kind]} cannot be read: {error}"
        ) from error
    return json.loads(data) if kind == "json" else data


def _encode_manifest(manifest: Manifest) -> bytes:
    """Return the one encoding of a manifest: whatever differs from it by a byte is damaged."""
    body = msgspec.json.encode(msgspec.structs.replace(manifest, xxh3=""))
    sealed = msgspec.structs.replace(manifest, xxh3=str(xxhash.xxh3_128_hexdigest(body)))
    return bytes(msgspec.json.format(msgspec.json.encode(sealed), indent=1)) + b"\n"


def _write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> FileEntry:
    # safetensors writes from the arrays' own memory and would silently misread a strided one.
    save_file({name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}, path)
    _sync(path)
    return FileEntry(path.name, path.stat().st_size, digest_file(path))


def _write_bytes(path: Path, data: bytes) -> FileEntry:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, len(data), str(xxhash.xxh3_128_hexdigest(data)))


def _sync(path: Path) -> None:
    """Return when a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_directory(directory: Path) -> None:
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        _sync(directory.parent)


def _publish(staging: Path, target: Path) -> None:
    """Give a finished checkpoint its name. An older one of that step stays loadable until then."""
    old = target.with_name(f"{target.name}.old")
    if target.exists():
        _remove(old)
        os.rename(target, old)
    os.rename(staging, target)
    _sync(target.parent)
    _remove(old)


def _prune(directory: Path, written: Path, keep: int) -> None:
    """Keep `written` and the newest whole ones, `keep` in all; remove older ones. Failing is a warning."""
    kept = 1
    try:
        for path in _candidates(directory):
            if path == written or not (path / MANIFEST).exists():
                continue
            if kept < keep:
                # Lengths only: reading all of it again at every save would cost more than the save.
                kept += isinstance(_verify(path, None, checksums=False), Manifest)
            elif _order(path) < _order(written):
                _remove(path)
    except (OSError, CheckpointError) as error:
        _log.warning("checkpoint_prune_failed directory=%s reason=%s", directory, error)


def _remove(path: Path) -> None:
    """Remove a checkpoint under a staging name: killed half-way, nothing that looks like one is left."""
    if path.exists():
        doomed = path.with_name(f".writing-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _remove_stale(directory: Path) -> None:
    """Remove what writers left that are no more. Before a save, so that their room is free for it."""
    for path in directory.glob(".writing-*"):
        match = _STAGING.fullmatch(path.name)
        if match and path.name not in _in_progress and _dead(path, match[1], int(match[2])):
            shutil.rmtree(path, ignore_errors=True)


def _dead(path: Path, host: str, pid: int) -> bool:
    try:
        if host != socket.gethostname():
            return time.time() - path.stat().st_mtime > FOREIGN_STALE_S
        if pid == os.getpid():
            return True
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # not ours to signal, or just removed by its writer
        return False
    return False


def _candidates(directory: Path) -> list[Path]:
    """Return everything that is named like a checkpoint, newest first."""
    try:
        found = [path for path in directory.iterdir() if _CHECKPOINT.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoint directory {directory} cannot be read: {error}") from error
    return sorted(found, key=_order, reverse=True)


def _order(path: Path) -> tuple[int, bool]:
    match = _CHECKPOINT.fullmatch(path.name)
    assert match, path
    return int(match[1]), match[2] is None


def _verify(path: Path, run: str | None, *, checksums: bool = True) -> Manifest | Skipped:
    """Return the manifest of a whole checkpoint, or the file at fault. Raises if it is another run's."""
    manifest = _read_manifest(path)
    if isinstance(manifest, Skipped):
        return manifest
    if run is not None and manifest.run != run:
        raise CheckpointError(
            f"checkpoint {path} belongs to run {manifest.run!r}, not to {run!r}: name its own directory"
        )
    for entry in manifest.files:
        file = path / entry.name
        try:
            size = file.stat().st_size
            if size != entry.bytes:
                return Skipped(file, f"{size} bytes long, {entry.bytes} were written")
            if checksums and (digest := digest_file(file)) != entry.xxh3:
                return Skipped(file, f"xxh3 is {digest}, {entry.xxh3} was written")
        except OSError as error:
            return Skipped(file, f"unreadable: {error}")
    return manifest


def _read_manifest(path: Path) -> Manifest | Skipped:
    file = path / MANIFEST
    try:
        data = file.read_bytes()
        manifest = msgspec.json.decode(data, type=Manifest)
    except OSError as error:
        return Skipped(file, f"unreadable: {error}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Skipped(file, f"not a manifest of format {FORMAT}: {error}")
    if manifest.format != FORMAT:
        return Skipped(file, f"format {manifest.format}; this version of archipel reads {FORMAT}")
    if _encode_manifest(manifest) != data:
        return Skipped(file, "its checksum does not match its content")
    if manifest.step != _order(path)[0]:
        return Skipped(file, f"it is of step {manifest.step}, the directory's name says otherwise")
    if any(Path(entry.name).name != entry.name for entry in manifest.files):
        return Skipped(file, "it names a file outside its directory")
    if STATE_FILES[manifest.state] not in {entry.name for entry in manifest.files}:
        return Skipped(file, f"it does not list {STATE_FILES[manifest.state]}")
    return manifest


def _skip(path: Path, reason: str) -> Skipped:
    _log.warning("checkpoint_skipped file=%s reason=%s", path, reason)
    return Skipped(path, reason)
