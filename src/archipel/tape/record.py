"""One line of a tape: its types, its bytes, its guard, and the names of the files it stands in.

A line is a JSON object, a tab, and eight hexadecimal digits: the low half of XXH3-64 over the object. JSON
holds no raw tab, so `grep` works as it is and `cut -f1 FILE | jq .` reads it. A record is an event with the
actions it called for (appendix E.1). Numbers that JSON lacks stand as "nan", "inf" and "-inf".

Invariants: same value, same bytes; a line with one changed byte does not check. Settings come back as JSON
has them (tuples as lists, keys as strings).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import msgspec
import xxhash
from msgspec import Struct

from ..errors import TapeError
from ..protocol import gossip, messages
from ..protocol.messages import Action, Event

FORMAT = 1
SEGMENT_MAX = 99_999
GUARD_BYTES = 9  # a tab and eight hexadecimal digits
_SEGMENT = re.compile(r"\.\d{5}$")  # what a rotated segment's name has before `.jsonl`
_UNSAFE = re.compile(r"[^\w.\-]|^\.")


class Header(Struct, frozen=True):
    """First line of a segment. The writer fills in `segment`, `first` and `format`."""

    run: str
    worker: str
    role: str
    incarnation: str
    started: float  # wall time of the worker's start, seconds since 1970
    settings: dict[str, Any] = {}
    environment: dict[str, Any] = {}  # versions, threads, codec: what could change a bit of a result
    segment: int = 1
    first: int = 0  # `i` of the segment's first record
    format: int = FORMAT


class Record(Struct, frozen=True, omit_defaults=True):
    """One call of a machine. `t`: seconds on the host's clock. `clock`: the components that changed."""

    i: int
    t: float
    event: Event
    actions: tuple[Action, ...] = ()
    clock: dict[str, int] | None = None


class End(Struct, frozen=True):
    """Last line of a segment: "rotated" (another follows) or "closed". `records`: of all segments so far."""

    end: str
    records: int
    reason: str = ""


@dataclass(frozen=True)
class TapeFile:
    """One tape of a run: the path of its live segment, which need not exist while rotated ones do."""

    worker: str
    incarnation: str
    path: Path


def _kinds(root: type) -> tuple[type, ...]:
    """Return the classes of the protocol below `root`, in the order they are written there."""
    written = [*vars(messages).values(), *vars(gossip).values()]
    found = dict.fromkeys(kind for kind in written if isinstance(kind, type) and issubclass(kind, root))
    return tuple(kind for kind in found if kind is not root)


def _union_of(root: type) -> Any:
    return Union[_kinds(root)]  # noqa: UP007 — built from a list


# A field annotated with a root class would decode to that root only: the decoder is told all its kinds.
_LINE: Any = msgspec.defstruct(
    "Line",
    [
        ("i", int),
        ("t", float),
        ("event", _union_of(Event)),
        ("actions", tuple[_union_of(Action), ...], ()),  # type: ignore[misc]
        ("clock", dict[str, int] | None, None),
    ],
)
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_LINE)
_LENIENT = msgspec.json.Decoder(_LINE, strict=False)  # takes "inf" where a number belongs
_NOT_FINITE = re.compile(rb'"(nan|-?inf)"')


def _spelled(value: Any) -> Any:
    """Return plain data with the numbers that JSON lacks as words."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return value


def encode(value: Struct) -> bytes:
    """Return the JSON of a record, header or message, without its guard. Same value, same bytes."""
    body = _ENCODER.encode(value)
    if b"null" in body:  # an absent option, or a number that JSON cannot hold
        body = _ENCODER.encode(_spelled(msgspec.to_builtins(value)))
    return body


def decode(body: bytes) -> Record:
    """Return the record that `encode` wrote. Raises msgspec.DecodeError where it is none."""
    try:
        line = _DECODER.decode(body)
    except msgspec.ValidationError:
        if not _NOT_FINITE.search(body):
            raise
        line = _LENIENT.decode(body)
    return Record(line.i, line.t, line.event, line.actions, line.clock)


def guard(body: bytes) -> bytes:
    """Return what follows the object on its line."""
    return b"\t%08x" % (xxhash.xxh3_64_intdigest(body) & 0xFFFFFFFF)


def tape_path(run_dir: str | Path, worker: str, incarnation: str) -> Path:
    """Return where the tape of a worker process belongs."""
    if not worker or not incarnation or _UNSAFE.search(worker + incarnation) or "." in incarnation:
        raise TapeError(
            f"worker={worker!r}, incarnation={incarnation!r} do not make a file name: use letters, digits, "
            f"'_' and '-' (a worker's name may hold dots, not at its start)"
        )
    return Path(run_dir) / "tape" / f"{worker}.{incarnation}.jsonl"


def segments(path: Path) -> list[Path]:
    """Return the files of a tape, oldest first; of a segment that is being packed, the packed one."""
    stem, found = path.name.removesuffix(".jsonl"), dict[str, Path]()
    for file in path.parent.iterdir():
        name, number = split_name(file.name)
        if name == stem:
            found[number or "live"] = max(found.get(number or "live", file), file)
    return [found[number] for number in sorted(found)]


def split_name(name: str) -> tuple[str, str]:
    """Return the tape and the segment number in a file's name.

    ("a.b", "00001") for `a.b.00001.jsonl.zst`, ("a.b", "") for `a.b.jsonl`, two blanks where it is no tape's.
    """
    stem = name.removesuffix(".zst").removesuffix(".jsonl")
    if not name.endswith((".jsonl", ".jsonl.zst")):
        return "", ""
    return (stem[:-6], stem[-5:]) if _SEGMENT.search(stem) else (stem, "")


def rotated(path: Path, segment: int, suffix: str = ".jsonl") -> Path:
    """Return what the finished segment of a tape is called. 1 ≤ segment ≤ SEGMENT_MAX."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.{segment:05d}{suffix}")
