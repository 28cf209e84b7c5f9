"""The tape keeps every record, gives each back as it was, and refuses what was changed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from archipel.errors import TapeError
from archipel.protocol import messages
from archipel.tape.record import guard
from archipel.tape.tape import (
    Header,
    TapeTail,
    TapeWriter,
    digest,
    read,
    segments,
    tape_path,
    workers,
)

HEADER = Header("run", "learner-0", "learner", "abc", started=1.0, settings={"sync": {"quorum": 1}})
RUN = [
    (0.5, messages.Connected("syncer"), [messages.Send("syncer", messages.Heartbeat())], {"syncer": 3}),
    (1.25, messages.StepCompleted(1, 64, 0.1, (0, 1)), [messages.Copy((1, 2)), messages.Wake(2.0)], None),
    (2.0, messages.Received("syncer", messages.Pull(1, 4, 3)), [], {"syncer": 4, "learner-0": 1}),
]


def write(folder: Path, records: list[Any] = RUN, **options: Any) -> TapeWriter:
    writer = TapeWriter(tape_path(folder, "learner-0", "abc"), HEADER, **options)
    for record in records:
        writer.write(*record)
    return writer


def rotated(folder: Path, count: int = 40) -> TapeWriter:
    """A tape of several segments, all but the last packed."""
    steps = [(float(i), messages.StepCompleted(i, 64, 0.1), [], None) for i in range(count)]
    writer = write(folder, steps, segment_bytes=1000)
    writer.close("end")
    return writer


def test_a_tape_gives_back_its_records_and_its_end(tmp_path: Path) -> None:
    write(tmp_path).close("done")
    tape = read(tmp_path)
    assert [(r.t, r.event, list(r.actions), r.clock) for r in tape] == RUN
    assert (tape.closed, tape.torn_bytes, tape.records) == ("done", 0, 3)
    assert tape.header == HEADER


def test_a_line_is_json_then_a_tab(tmp_path: Path) -> None:
    writer = write(tmp_path)
    for line in writer.path.read_bytes().splitlines():
        body, guard = line.split(b"\t")
        assert isinstance(msgspec.json.decode(body), dict) and len(guard) == 8


def test_a_torn_last_line_ends_the_tape_quietly(tmp_path: Path) -> None:
    whole = write(tmp_path).path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    path = tape_path(tmp_path, "learner-0", "abc")
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        tape = read(path)
        assert len(list(tape)) == 2
        assert tape.torn_bytes == cut - last


def test_a_torn_header_is_a_tape_without_records(tmp_path: Path) -> None:
    path = write(tmp_path, []).path
    path.write_bytes(path.read_bytes()[:20])
    tape = read(path)
    assert (list(tape), tape.header, tape.torn_bytes) == ([], None, 20)


@given(data=st.data(), closed=st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_changed_byte_is_refused(tmp_path_factory: Any, data: st.DataObject, closed: bool) -> None:
    writer = write(tmp_path_factory.mktemp("flip"))
    if closed:
        writer.close("done")
    content = bytearray(writer.path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1), label="byte")
    content[at] ^= data.draw(st.integers(1, 255), label="bits")
    writer.path.write_bytes(content)
    with pytest.raises(TapeError, match=r"line|format"):
        list(read(writer.path))


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_changed_byte_of_a_packed_segment_is_refused_or_harmless(
    tmp_path_factory: Any, data: st.DataObject
) -> None:
    writer = rotated(tmp_path_factory.mktemp("flip"))
    before = list(read(writer.path))
    packed = segments(writer.path)[0]
    content = bytearray(packed.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    packed.write_bytes(content)
    try:
        after = list(read(writer.path))
    except TapeError:
        return
    assert after == before


def test_damage_names_file_line_and_byte(tmp_path: Path) -> None:
    path = write(tmp_path).path
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"tokens":64', b'"tokens":65')
    path.write_bytes(b"".join(lines))
    tape = read(path)
    with pytest.raises(TapeError) as error:
        list(tape)
    assert f"{path}, line 3, byte {len(lines[0]) + len(lines[1])}: its checksum is wrong" in str(error.value)
    assert tape.records == 1
    with pytest.raises(TapeError):  # and it stays refused
        tape.poll()


@pytest.mark.parametrize("order", [[0, 2, 3], [0, 1, 1, 2, 3], [0, 2, 1, 3]])
def test_missing_doubled_or_swapped_lines_are_refused(tmp_path: Path, order: list[int]) -> None:
    path = write(tmp_path).path
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[i] for i in order))
    with pytest.raises(TapeError, match="stands where"):
        list(read(path))


def test_lines_after_the_end_are_refused(tmp_path: Path) -> None:
    writer = write(tmp_path)
    record = writer.path.read_bytes().splitlines(keepends=True)[3]
    writer.close("done")
    with open(writer.path, "ab") as file:
        file.write(record)
    with pytest.raises(TapeError, match="follows the end"):
        list(read(writer.path))


def test_another_format_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tape_path(tmp_path, "a", "b")
    path.parent.mkdir()
    path.write_bytes(b'{"format":2}' + guard(b'{"format":2}') + b"\n")
    with pytest.raises(TapeError, match=r"format 2.*reads 1.*archipel that wrote it"):
        read(path)


def test_no_tape_and_several_tapes_are_said(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="no such tape"):
        read(tmp_path / "nothing.here.jsonl")
    with pytest.raises(TapeError, match="folder of a run"):
        read(tmp_path)
    for incarnation in ("one", "two"):
        TapeWriter(tape_path(tmp_path, "w", incarnation), HEADER).close()
    with pytest.raises(TapeError, match="name the file"):
        read(tmp_path)


def test_a_tape_is_never_written_twice(tmp_path: Path) -> None:
    write(tmp_path).close()
    with pytest.raises(TapeError, match="new incarnation"):
        write(tmp_path)


@pytest.mark.parametrize(
    ("worker", "incarnation"), [("../x", "a"), ("", "a"), ("w", "a.b"), (".w", "a"), ("w", "")]
)
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, worker: str, incarnation: str) -> None:
    with pytest.raises(TapeError, match="file name"):
        tape_path(tmp_path, worker, incarnation)


def test_rotation_packs_segments_and_reading_joins_them(tmp_path: Path) -> None:
    writer = rotated(tmp_path)
    files = [file.name for file in segments(writer.path)]
    assert len(files) > 3
    assert files[0] == "learner-0.abc.00001.jsonl.zst" and files[-1] == "learner-0.abc.jsonl"
    tape = read(tmp_path)
    assert [record.event.step for record in tape] == list(range(40))
    assert tape.closed == "end"
    assert [file.worker for file in workers(tmp_path)] == ["learner-0"]


def test_the_digest_counts_records_not_segments_or_times_of_start(tmp_path: Path) -> None:
    rotated(tmp_path / "a")
    steps = [(float(i), messages.StepCompleted(i, 64, 0.1), [], None) for i in range(40)]
    late = msgspec.structs.replace(HEADER, started=99.0)
    whole = TapeWriter(tape_path(tmp_path / "b", "learner-0", "abc"), late)
    other = TapeWriter(tape_path(tmp_path / "c", "learner-0", "abc"), late)
    for i, step in enumerate(steps):
        whole.write(*step)
        other.write(step[0] + (1e-9 if i == 20 else 0), *step[1:])
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_segment_is_refused(tmp_path: Path, which: int) -> None:
    writer = rotated(tmp_path)
    segments(writer.path)[which].unlink()
    with pytest.raises(TapeError, match=f"segment {which + 1} is missing"):
        list(read(writer.path))


def test_a_segment_of_another_tape_is_refused(tmp_path: Path) -> None:
    writer = rotated(tmp_path)
    stranger = msgspec.structs.replace(HEADER, run="other")
    other = TapeWriter(tape_path(tmp_path / "other", "learner-0", "abc"), stranger, segment_bytes=1000)
    for i in range(40):
        other.write(float(i), messages.StepCompleted(i, 64, 0.1), [])
    other.close()
    segments(writer.path)[1].write_bytes(segments(other.path)[1].read_bytes())
    with pytest.raises(TapeError, match="belongs to"):
        list(read(writer.path))


def test_a_packed_segment_cut_short_is_refused(tmp_path: Path) -> None:
    writer = rotated(tmp_path)
    packed = segments(writer.path)[1]
    packed.write_bytes(packed.read_bytes()[:-60])
    with pytest.raises(TapeError, match=packed.name):
        list(read(writer.path))


@pytest.mark.parametrize("lines_lost", [1, 2])
def test_a_finished_segment_without_its_last_lines_is_refused(tmp_path: Path, lines_lost: int) -> None:
    packed = segments(rotated(tmp_path).path)[1]
    text = zstandard.ZstdDecompressor().stream_reader(packed.read_bytes()).read()
    kept = text.splitlines(keepends=True)[:-lines_lost]
    packed.write_bytes(zstandard.ZstdCompressor().compress(b"".join(kept)))
    with pytest.raises(TapeError, match="cut short"):
        list(read(tmp_path))


def test_an_unpacked_segment_reads_as_well(tmp_path: Path) -> None:
    writer = rotated(tmp_path)
    packed = segments(writer.path)[0]
    plain = packed.with_suffix("")
    plain.write_bytes(zstandard.ZstdDecompressor().stream_reader(packed.read_bytes()).read())
    assert len(list(read(writer.path))) == 40  # both there: a kill between rename and removal
    packed.unlink()
    assert len(list(read(writer.path))) == 40


def test_the_tail_follows_across_rotations_and_half_lines(tmp_path: Path) -> None:
    writer = write(tmp_path, [], segment_bytes=1000)
    tail = TapeTail(writer.path)
    seen = []
    for i in range(100):
        writer.write(float(i), messages.StepCompleted(i, 64, 0.1), [])
        if i % 7 == 0 or i > 80:
            seen.append(tail.poll())
    assert [len(part) for part in seen[:3]] == [1, 7, 7]
    assert [record.i for part in seen for record in part] == list(range(100))
    assert tail.poll() == []
    writer.close("end")
    assert tail.poll() == [] and tail.closed == "end"
    assert tail.poll() == []


def test_the_tail_waits_for_a_line_to_be_whole(tmp_path: Path) -> None:
    whole = write(tmp_path).path.read_bytes()
    path = tape_path(tmp_path, "learner-0", "abc")
    path.write_bytes(whole[:10])
    tail = TapeTail(path)
    seen = [len(tail.poll())]
    for end in (len(whole) - 5, len(whole)):
        with open(path, "ab") as file:
            file.write(whole[path.stat().st_size : end])
        seen.append(len(tail.poll()))
    assert seen == [0, 2, 1] and tail.torn_bytes == 0


def test_a_record_the_disk_refuses_leaves_a_whole_tape(tmp_path: Path, monkeypatch: Any) -> None:
    writer = write(tmp_path)
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) < 40:
            raise OSError(28, "No space left on device")
        return real(fd, data[:-30])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(TapeError, match=r"No space left.*free space"):
            writer.write(3.0, messages.Woke(), [])
    assert len(list(read(writer.path))) == 3
    writer.write(4.0, messages.Woke(), [])
    assert [record.t for record in read(writer.path)] == [0.5, 1.25, 2.0, 4.0]


KILLED = """
import sys
from archipel.protocol.messages import StepCompleted
from archipel.tape.tape import Header, TapeWriter, tape_path
path = tape_path(sys.argv[1], "w", "a")
writer = TapeWriter(path, Header("r", "w", "learner", "a", 0.0), segment_bytes=20_000)
for i in range(10_000_000):
    writer.write(float(i), StepCompleted(i, 1, 0.1), [])
    print(i, flush=True)
"""


def test_sigkill_loses_no_record_whose_write_returned(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout
    acknowledged = [int(child.stdout.readline()) for _ in range(700)]
    child.send_signal(signal.SIGKILL)
    acknowledged += [
        int(line) for line in child.stdout.read().splitlines(keepends=True) if line.endswith(b"\n")
    ]
    child.wait()
    tape = read(tmp_path)
    assert [record.i for record in tape][: len(acknowledged)] == acknowledged
    assert tape.records - len(acknowledged) <= 1 and tape.closed is None
    assert len(segments(tape.path)) > 2
