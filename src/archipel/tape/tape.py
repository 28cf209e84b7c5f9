"""The tape: what a worker was told and what it decided, written as it runs and read back (appendix E.1).

One file per worker process, `RUN/tape/<worker>.<incarnation>.jsonl`; `record` says what a line is. The first
line of every segment is its header; a finished segment and a closed tape end with an `end` line. A finished
segment is renamed and packed: `<worker>.<incarnation>.00001.jsonl.zst` (`zstd -dc` shows it).

Invariants: append-only; one write to the operating system per record, made before the record's actions take
effect, so SIGKILL loses nothing that happened (no fsync: a power loss may cut the end); `i` counts records
from 0 over all segments; a byte that changed is refused, never misread.
"""

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import xxhash
import zstandard

from ..errors import TapeError
from ..protocol.messages import Action, Event
from .record import (
    FORMAT,
    GUARD_BYTES,
    SEGMENT_MAX,
    End,
    Header,
    Record,
    TapeFile,
    decode,
    encode,
    guard,
    rotated,
    segments,
    split_name,
    tape_path,
)

__all__ = [
    "Header",
    "Record",
    "TapeFile",
    "TapeTail",
    "TapeWriter",
    "digest",
    "read",
    "segments",
    "tape_path",
    "workers",
]

SEGMENT_BYTES = 64 * 2**20
READ_BYTES = 2**20
COMPRESSION_LEVEL = 3
_END = b'{"end":'


class _Format(msgspec.Struct):
    """What the header of every format says, past and future."""

    format: int


class TapeWriter:
    """Appends records to one tape. Not for several threads; compression runs on a thread of its own."""

    def __init__(
        self, path: str | Path, header: Header, *, segment_bytes: int = SEGMENT_BYTES, hold_bytes: int = 0
    ) -> None:
        """Create the tape. Raises TapeError where there is one already, or the disk refuses.

        hold_bytes: write once so many have come together: for simulations, where nothing takes effect
        outside; 0: every record at once.
        """
        self.path = Path(path)
        self.records = 0
        self.bytes = 0  # written to the operating system, before compression
        self._header = header
        self._segment_bytes, self._hold_bytes = segment_bytes, hold_bytes
        self._segment = 0
        self._first = 0
        self._size = 0  # of the segment, what is held included
        self._held = bytearray()
        self._fd = -1
        self._packer: ThreadPoolExecutor | None = None
        if not self.path.name.endswith(".jsonl") or split_name(self.path.name)[1]:
            raise TapeError(
                f"{path} cannot name a tape: end it with .jsonl and no five-digit part before that"
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            taken = segments(self.path)
            if taken:
                raise TapeError(f"{taken[0]} exists and a tape is never written twice: use a new incarnation")
            self._open_segment()
        except OSError as error:
            raise TapeError(f"{path}: no tape can be written there ({error})") from error

    def write(
        self, now: float, event: Event, actions: Sequence[Action], clock: dict[str, int] | None = None
    ) -> None:
        """Hand one record to the operating system. When this returns, the actions may take effect.

        Raises TapeError when it did not get there; the tape then ends with the record before.
        """
        full = self._size >= self._segment_bytes and self.records > self._first
        if full and self._segment < SEGMENT_MAX:
            self._rotate()
        self._append(encode(Record(self.records, now, event, tuple(actions), clock or None)))
        self.records += 1

    def close(self, reason: str = "") -> None:
        """Write the end line and wait for compression. A second call does nothing."""
        if self._fd < 0:
            return
        try:
            self._append(encode(End("closed", self.records, reason)))
            self._flush()
        finally:
            os.close(self._fd)
            self._fd = -1
            if self._packer:
                self._packer.shutdown()

    def _append(self, body: bytes) -> None:
        if self._fd < 0:
            raise TapeError(
                f"{self.path} is closed or broken and takes no more records: start a new incarnation"
            )
        line = b"%b%b\n" % (body, guard(body))
        self._size += len(line)
        self.bytes += len(line)
        self._held += line
        if len(self._held) >= self._hold_bytes:
            self._flush()

    def _flush(self) -> None:
        """Hand what is held to the operating system."""
        held, self._held = self._held, bytearray()
        try:
            done = os.write(self._fd, held) if held else 0
            while done < len(held):
                done += os.write(self._fd, held[done:])
        except OSError as error:
            self._size -= len(held)
            self.bytes -= len(held)
            self._cut_back()
            raise TapeError(
                f"{self.path}: record {self.records} was not written ({error}); free space or fix the disk: "
                f"a worker may not act without its tape"
            ) from error

    def _cut_back(self) -> None:
        """Take away a half-written line, or else give the tape up: nothing may follow half a line."""
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            os.close(self._fd)
            self._fd = -1

    def _open_segment(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o644)
        self._segment += 1
        self._first, self._size = self.records, 0
        places = {"segment": self._segment, "first": self.records, "format": FORMAT}
        self._append(encode(msgspec.structs.replace(self._header, **places)))

    def _rotate(self) -> None:
        self._append(encode(End("rotated", self.records)))
        self._flush()
        os.close(self._fd)
        self._fd = -1
        finished = rotated(self.path, self._segment)
        try:
            os.rename(self.path, finished)
            self._open_segment()
        except OSError as error:
            raise TapeError(
                f"{self.path}: no new segment after {finished.name} ({error}); fix the disk"
            ) from error
        self._packer = self._packer or ThreadPoolExecutor(1, "tape")
        self._packer.submit(_compress, finished)


def _compress(plain: Path) -> None:
    """Replace a finished segment by its packed form. Should that fail, the plain one stays and is read."""
    packed = plain.with_name(plain.name + ".zst")
    part = packed.with_name(packed.name + ".part")
    try:
        with open(plain, "rb") as source, open(part, "wb") as target:
            zstandard.ZstdCompressor(COMPRESSION_LEVEL, write_checksum=True).copy_stream(source, target)
            target.flush()
            os.fsync(target.fileno())
        os.replace(part, packed)
        plain.unlink()
    except OSError:
        part.unlink(missing_ok=True)


class TapeTail:
    """Reads one tape over all its segments, once; `poll` or a new loop goes on where the last one stopped.

    header: of the segment read last, None while it is not whole. closed: the reason given at the end, if any.
    torn_bytes: length of a last line that is not whole (yet), which is what a kill in mid-write leaves.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the tape. Raises TapeError where there is none."""
        self.path = _one_tape(path)
        self.header: Header | None = None
        self.closed: str | None = None
        self.torn_bytes = 0
        self.records = 0
        self._file = self.path
        self._source: Any = None  # binary, with `read` and `close`
        self._failure: TapeError | None = None
        self._live = False  # whether the open segment can still grow
        self._ended = False  # its end line has been read
        self._rest = b""
        self._lines: deque[bytes] = deque()
        self._line = 0  # lines and bytes of the segment already taken
        self._offset = 0
        self._segment = 0
        if not self._enter_segment() and not segments(self.path):
            raise TapeError(f"{self.path}: no such tape; `archipel tape RUN` lists those of a run")

    def poll(self) -> list[Record]:
        """Return the records that came since the last call."""
        return list(self)

    def __iter__(self) -> Iterator[Record]:
        """Yield what is there. Raises TapeError (file, line, byte) for any damage but a torn end."""
        if self._failure:
            raise self._failure
        while self._source is not None or self._enter_segment():
            while (line := self._next_line()) is not None:
                body = self._checked(line)
                if body.startswith(_END):
                    self._take_end(body)
                    continue
                yield self._record(body)
            if not self._finish_segment():
                return

    def close(self) -> None:
        """Let go of the open file."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _enter_segment(self) -> bool:
        """Open the next segment, wherever rotation has put it by now, and check its header."""
        if self.closed is not None:
            return False
        number, found = self._segment + 1, self._segment
        for _ in range(3):  # a segment may be renamed or packed between two looks
            for file in (rotated(self.path, number, ".jsonl.zst"), rotated(self.path, number), self.path):
                header = self._open(file)
                if header and header.segment == number:
                    self._adopt(header)
                    return True
                if header and file != self.path:
                    raise self._damage(f"segment {header.segment} stands where {number} belongs")
                self.close()
            found = header.segment if header else found
        numbers = [int(split_name(file.name)[1]) for file in segments(self.path) if file != self.path]
        found = max([found, *numbers])
        if found != self._segment:
            raise self._damage(f"segment {number} is missing, {found} is there")
        return False

    def _open(self, file: Path) -> Header | None:
        """Start reading a file; return its header, None where the file or its first line is not there yet."""
        try:
            raw = open(file, "rb")  # noqa: SIM115 — stays open from poll to poll
        except FileNotFoundError:
            return None
        self._file, self._live, self._ended = file, file == self.path, False
        self._rest, self._line, self._offset = b"", 0, 0
        self._lines.clear()
        packed = file.suffix == ".zst"
        self._source = zstandard.ZstdDecompressor().stream_reader(raw, closefd=True) if packed else raw
        line = self._next_line()
        if line is None:
            if self._live:
                self._note_torn()
                return None
            raise self._damage("it ends before its header does")
        return self._header(self._checked(line))

    def _adopt(self, header: Header) -> None:
        """Check that the segment continues this tape."""
        before = self.header
        names = ("run", "worker", "incarnation")
        if before and any(getattr(before, name) != getattr(header, name) for name in names):
            raise self._damage(f"it belongs to {header.worker}.{header.incarnation} of run {header.run!r}")
        if header.first != self.records:
            raise self._damage(
                f"it starts at record {header.first}, the segment before ends at {self.records}"
            )
        self.header = header
        self._segment = header.segment

    def _header(self, body: bytes) -> Header:
        try:
            version = msgspec.json.decode(body, type=_Format).format
            if version == FORMAT:
                return msgspec.json.decode(body, type=Header)
        except msgspec.DecodeError as error:
            raise self._damage(f"the header is unreadable ({error})") from error
        raise TapeError(
            f"{self._file} has tape format {version}, this archipel reads {FORMAT}: "
            f"read it with the archipel that wrote it"
        )

    def _next_line(self) -> bytes | None:
        assert self._source is not None
        while not self._lines:
            try:
                chunk = self._source.read(READ_BYTES)
            except (zstandard.ZstdError, OSError) as error:
                raise self._damage(f"it cannot be read on ({error})") from error
            if not chunk:
                return None
            lines = (self._rest + chunk).split(b"\n")
            self._rest = lines.pop()
            self._lines.extend(lines)
        return self._lines.popleft()

    def _checked(self, line: bytes) -> bytes:
        """Return the object of a line whose guard is right."""
        body = line[:-GUARD_BYTES]
        if line[-GUARD_BYTES:] != guard(body):
            raise self._damage("its checksum is wrong")
        if self._ended:
            raise self._damage("a line follows the end of the segment")
        self._line += 1
        self._offset += len(line) + 1
        return body

    def _record(self, body: bytes) -> Record:
        try:
            record = decode(body)
        except msgspec.DecodeError as error:
            raise self._damage(f"whole, but not a record this archipel knows ({error})") from error
        if record.i != self.records:
            raise self._damage(f"record {record.i} stands where {self.records} belongs")
        self.records += 1
        return record

    def _take_end(self, body: bytes) -> None:
        try:
            end = msgspec.json.decode(body, type=End)
        except msgspec.DecodeError as error:
            raise self._damage(f"the end line is unreadable ({error})") from error
        if end.records != self.records:
            raise self._damage(f"it ends after {end.records} records, {self.records} were there")
        self._ended = True
        self.closed = end.reason if end.end == "closed" else None

    def _finish_segment(self) -> bool:
        """Decide at the end of what is there; return whether another segment is to be read."""
        self._note_torn()
        if self._ended:
            self.close()
        elif not self._live:
            raise self._damage("it is cut short")
        return self._ended

    def _note_torn(self) -> None:
        """Accept the beginning of a line as torn, and nothing else."""
        rest = self._rest
        guard_at = rest.find(b"\t")
        guard_end = guard_at + GUARD_BYTES
        whole = guard_at >= 0 and guard_end < len(rest) and rest[guard_at:guard_end] == guard(rest[:guard_at])
        if rest and (whole or self._ended):
            raise self._damage("bytes follow a whole line")
        self.torn_bytes = len(rest)

    def _damage(self, what: str) -> TapeError:
        """Return the error, and keep it: nothing behind a damage can be trusted."""
        where = f"{self._file}, line {self._line + 1}, byte {self._offset}"
        self._failure = TapeError(
            f"{where}{' of its unpacked text' if self._file.suffix == '.zst' else ''}: {what}; "
            f"the {self.records} records before it are whole: restore the file from a copy or work with those"
        )
        return self._failure


def read(path: str | Path) -> TapeTail:
    """Return the records of one tape, to loop over. path: any of its files, or a run folder with one tape."""
    return TapeTail(path)


def digest(path: str | Path) -> str:
    """Return XXH3-64 over the records of a tape, or of all tapes of a run with the workers' names.

    Headers, end lines and the cut into segments do not count: two simulated runs with the same content agree.
    """
    path = Path(path)
    tapes = workers(path) if path.is_dir() else [TapeFile("", "", path)]
    content = xxhash.xxh3_64()
    for tape in tapes:
        content.update(tape.worker.encode() + b"\n")
        for record in read(tape.path):
            content.update(encode(record) + b"\n")
    return content.hexdigest()


def workers(run_dir: str | Path) -> list[TapeFile]:
    """Return the tapes of a run, in the order of worker names and starts."""
    folder = Path(run_dir) / "tape"
    if not folder.is_dir():
        raise TapeError(f"{folder} is not there: give the folder of a run, the one that holds `tape/`")
    stems = {split_name(path.name)[0] for path in folder.iterdir()}
    files = [TapeFile(*s.rpartition(".")[::2], folder / f"{s}.jsonl") for s in sorted(stems) if "." in s]
    return sorted(files, key=lambda file: (file.worker, _started(file.path), file.incarnation))


def _started(path: Path) -> float:
    """Return a tape's start for sorting; one that cannot be read comes last and says why when it is read."""
    try:
        tape = TapeTail(path)
    except TapeError:
        return math.inf
    tape.close()
    return tape.header.started if tape.header else math.inf


def _one_tape(path: str | Path) -> Path:
    """Return the live path of the tape meant by a file, a tape's stem or a run folder that has only one."""
    path = Path(path)
    if not path.is_dir():
        return path.with_name((split_name(path.name)[0] or path.name) + ".jsonl")
    files = workers(path)
    if len(files) != 1:
        names = ", ".join(file.path.name for file in files) or "none"
        raise TapeError(f"{path} must hold one tape to be read as one, it has: {names}; name the file")
    return files[0].path
