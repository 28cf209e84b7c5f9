"""Checkpoints: loaded bit for bit as saved; damage is noticed; a kill or a full disk loses nothing."""

import errno
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors import SafetensorError

from archipel.errors import CheckpointError
from archipel.runtime import checkpoint
from archipel.runtime.checkpoint import digest_file, lease, load_newest, save

# Forks a saver, kills it at a random instant, and checks what a successor would load: 50 times.
KILL_LOOP = """
import os, random, select, signal, sys, time
from pathlib import Path
import numpy as np
from archipel.runtime.checkpoint import load_newest, save

directory, rng = Path(sys.argv[1]), random.Random(int(sys.argv[2]))

def content(step):
    return {"weights": {"w": np.full(20_000, step, np.float32)}, "momentum": {"m": np.arange(step % 7)}}

def saver(step, acknowledge):
    while True:
        step += 1
        save(directory, step, content(step), {"step": step}, run="r", keep=2)
        os.write(acknowledge, step.to_bytes(4, "little"))

step = 0
for _ in range(50):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        saver(step, writer)
    os.close(writer)
    acknowledged = os.read(reader, 4)
    time.sleep(rng.uniform(0, 0.02))  # the instant of death
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 1 << 16):
        acknowledged += more
    os.close(reader)
    last = int.from_bytes(acknowledged[-4:], "little")
    found = load_newest(directory, run="r")
    assert found.step in (last, last + 1), (found.step, last)
    assert found.state == {"step": found.step}
    assert (found.arrays("weights")["w"] == found.step).all()
    assert found.arrays("momentum")["m"].tolist() == list(range(found.step % 7))
    step = found.step
print("survived", step)
"""

FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from archipel.errors import CheckpointError
from archipel.runtime.checkpoint import save

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save(Path(sys.argv[1]), 2, {"a": {"w": np.ones(100_000, np.float32)}}, {}, run="r", keep=3)
except CheckpointError as error:
    print(error)
"""

PEAK_MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from archipel.runtime.checkpoint import load_newest, save

arrays = {"a": {f"w{i}": np.full(4 << 20, i, np.float32) for i in range(4)}}
directory = Path(sys.argv[1])
save(directory, 1, {"a": {"w": np.ones(8)}}, {}, run="r", keep=1)  # imports and buffers are paid for here
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
save(directory, 2, arrays, {}, run="r", keep=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def run_python(program: str, *arguments: object) -> str:
    """Return what a program printed; it must exit with 0."""
    argv = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def save_step(directory: Path, step: int, keep: int = 3, run: str = "r") -> Path:
    arrays = {"weights": {"w": np.full(100, step, np.float32)}}
    return save(directory, step, arrays, {"step": step}, run=run, keep=keep)


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in directory.glob("step-*"))


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if not path.name.startswith("step-")]


def flip_one_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    arrays = {
        "weights": {
            "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
            "scalar": np.array(2.5, np.float32),
            "empty": np.zeros((0, 5), np.float32),
            "none": np.zeros((0,), np.float64),
            "bits": np.array([0x3F80, 1], np.uint16),
            "flags": np.array([True, False]),
            "special": np.array([math.nan, math.inf, -0.0], np.float32),
        },
        "momentum": {},
    }
    path = save(tmp_path, 123, arrays, {"clock": {"L0": 3}, "rate": math.inf}, run="r", keep=1)
    found = load_newest(tmp_path, run="r")
    assert found is not None
    assert path.name == "step-000000123"
    assert (found.path, found.step, found.run, found.skipped) == (path, 123, "r", ())
    assert found.state == {"clock": {"L0": 3}, "rate": math.inf}
    assert found.files == ("weights", "momentum")
    assert found.arrays("momentum") == {}
    loaded = found.arrays("weights")
    assert loaded.keys() == arrays["weights"].keys()
    for name, array in arrays["weights"].items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].tobytes() == array.tobytes()


def test_strided_and_big_endian_arrays_keep_their_values(tmp_path: Path) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {"transposed": base.T, "every_other": base[:, ::2], "big": np.arange(3, dtype=">f4")}
    save(tmp_path, 1, {"a": arrays}, b"", run="r", keep=1)
    loaded = load_newest(tmp_path).arrays("a")
    assert all((loaded[name] == array).all() for name, array in arrays.items())


def test_state_may_be_bytes(tmp_path: Path) -> None:
    save(tmp_path, 1, {}, b"\x00\xff", run="r", keep=1)
    assert load_newest(tmp_path).state == b"\x00\xff"


def test_writing_to_a_loaded_array_leaves_the_checkpoint_alone(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    load_newest(tmp_path).arrays("weights")["w"][:] = 99
    assert load_newest(tmp_path).arrays("weights")["w"][0] == 1


def test_manifest_lists_run_step_lengths_and_checksums(tmp_path: Path) -> None:
    path = save_step(tmp_path, 5)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["run"], manifest["step"], manifest["format"]) == ("r", 5, 1)
    assert {entry["name"] for entry in manifest["files"]} == {"weights.safetensors", "state.json"}
    for entry in manifest["files"]:
        data = (path / entry["name"]).read_bytes()
        assert (entry["bytes"], entry["xxh3"]) == (len(data), xxhash.xxh3_128_hexdigest(data))


def test_digest_of_a_file_longer_than_a_chunk(tmp_path: Path) -> None:
    data = random.Random(1).randbytes((2 << 20) + 17)
    (tmp_path / "file").write_bytes(data)
    assert digest_file(tmp_path / "file") == xxhash.xxh3_128_hexdigest(data)


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    assert load_newest(tmp_path) is None
    assert load_newest(tmp_path / "never_made") is None


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    for step in range(1, 8):
        save_step(tmp_path, step, keep=3)
    assert steps(tmp_path) == [5, 6, 7]
    assert leftovers(tmp_path) == []


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        path = save_step(tmp_path, step)
    (path / "weights.safetensors").unlink()
    save_step(tmp_path, 4, keep=3)
    assert steps(tmp_path) == [1, 2, 3, 4]
    save_step(tmp_path, 5, keep=3)
    assert load_newest(tmp_path).step == 5
    assert steps(tmp_path) == [2, 3, 4, 5]


def test_a_save_of_an_earlier_step_removes_no_later_one(tmp_path: Path) -> None:
    save_step(tmp_path, 100)
    save_step(tmp_path, 1, keep=1)
    assert steps(tmp_path) == [1, 100]
    assert load_newest(tmp_path).step == 100


def test_the_same_step_may_be_saved_again(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    save(tmp_path, 1, {}, b"second", run="r", keep=3)
    assert load_newest(tmp_path).state == b"second"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def test_a_second_save_of_a_step_that_fails_leaves_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if source.name.startswith(".writing") and target.name.startswith("step-"):
            raise OSError("broken disk")
        rename(source, target)

    save_step(tmp_path, 1)
    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckpointError, match="broken disk"):
        save(tmp_path, 1, {}, b"second", run="r", keep=3)
    assert load_newest(tmp_path).state == {"step": 1}


def test_one_set_aside_by_a_killed_save_of_the_same_step_is_loaded(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    path.rename(tmp_path / "step-000000001.old")
    assert load_newest(tmp_path).step == 1


@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncate", "zero", "flip", "remove"])
def test_damage_falls_back_to_the_one_before_and_names_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    save_step(tmp_path, 1)
    file = save_step(tmp_path, 2) / name
    size = file.stat().st_size
    match damage:
        case "truncate":
            os.truncate(file, size - 1)
        case "zero":
            file.write_bytes(bytes(size))
        case "flip":
            flip_one_byte(file, size // 2)
        case "remove":
            file.unlink()
    found = load_newest(tmp_path)
    assert found.step == 1
    culprit = file.parent if (name, damage) == ("manifest.json", "remove") else file
    assert [item.path for item in found.skipped] == [culprit]
    assert f"file={culprit}" in caplog.text
    assert found.skipped[0].reason in caplog.text


def test_every_byte_of_a_checkpoint_is_guarded(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    path = save(tmp_path, 2, {"w": {"w": np.ones(1, np.float32)}}, {"a": 1}, run="r", keep=3)
    for file in path.iterdir():
        for at in range(file.stat().st_size):
            flip_one_byte(file, at)
            assert load_newest(tmp_path, run="r").step == 1, (file, at)
            flip_one_byte(file, at)
    assert load_newest(tmp_path, run="r").step == 2


def test_checkpoints_that_are_all_damaged_are_not_the_same_as_none(tmp_path: Path) -> None:
    file = save_step(tmp_path, 1) / "weights.safetensors"
    flip_one_byte(file, 100)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is valid .*weights\.safetensors: xxh3"):
        load_newest(tmp_path)


def test_a_directory_without_manifest_is_ignored_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-000000900").mkdir()
    (tmp_path / "step-000000900" / "weights.safetensors").write_bytes(b"x")
    assert load_newest(tmp_path) is None
    assert "step-000000900" in caplog.text
    save_step(tmp_path, 1, keep=1)
    assert load_newest(tmp_path).step == 1
    assert (tmp_path / "step-000000900").is_dir()


def test_a_renamed_checkpoint_is_not_taken_for_a_newer_one(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    save_step(tmp_path, 2).rename(tmp_path / "step-000000009")
    found = load_newest(tmp_path)
    assert found.step == 1
    assert "step 2" in found.skipped[0].reason


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    save_step(tmp_path, 1, run="mine")
    with pytest.raises(CheckpointError, match="belongs to run 'mine', not to 'yours'"):
        load_newest(tmp_path, run="yours")


def test_killed_at_fifty_random_instants_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed={seed}")
    assert run_python(KILL_LOOP, tmp_path, seed).startswith("survived")
    save_step(tmp_path, 1_000_000, keep=1)
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_reported_and_changes_nothing(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    message = run_python(FULL_DISK, tmp_path)
    assert "step-000000002" in message
    assert "File too large" in message
    assert "Make room" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
    assert load_newest(tmp_path).step == 1


# As safetensors words it.
FULL = "Error while serializing: I/O error: No space left on device (os error 28)"


def a_disk_for(directory: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on there is room for so many checkpoints only: writing weights fails as on a full disk."""
    write = checkpoint.save_file

    def written(tensors: dict[str, np.ndarray], path: Path) -> None:
        if len(list(directory.glob("step-*"))) >= count:
            path.write_bytes(b"the beginning")
            raise SafetensorError(FULL)
        write(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", written)


def test_on_a_full_disk_older_ones_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    a_disk_for(tmp_path, 3, monkeypatch)
    save_step(tmp_path, 4)
    assert steps(tmp_path) == [3, 4] and leftovers(tmp_path) == []
    assert "checkpoint_disk_full removed=step-000000002,step-000000001 kept=step-000000003" in caplog.text
    for step in (5, 6, 7):
        save_step(tmp_path, step)
    assert load_newest(tmp_path).step == 7 and len(steps(tmp_path)) <= 3


def test_on_a_full_disk_the_newest_valid_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    flip_one_byte(save_step(tmp_path, 3) / "weights.safetensors", 100)
    a_disk_for(tmp_path, 1, monkeypatch)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_step(tmp_path, 4)
        assert steps(tmp_path) == [2]
    assert load_newest(tmp_path).step == 2


def test_a_quota_is_a_full_disk_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, left = os.fsync, [errno.EDQUOT]

    def failing(descriptor: int) -> None:
        if left:
            raise OSError(left.pop(), "refused")
        fsync(descriptor)

    for step in (1, 2, 3):
        save_step(tmp_path, step)
    monkeypatch.setattr(os, "fsync", failing)
    save_step(tmp_path, 4)
    assert steps(tmp_path) == [3, 4]
    left.append(errno.EIO)
    with pytest.raises(CheckpointError, match="refused"):
        save_step(tmp_path, 5)
    assert steps(tmp_path) == [3, 4]


def test_a_directory_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"could not be written to .*file"):
        save_step(tmp_path / "file", 1)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_newest(tmp_path / "file")


def test_what_does_not_fit_the_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not fit JSON"):
        save(tmp_path, 1, {}, {"a": object()}, run="r", keep=1)
    with pytest.raises(CheckpointError, match="plain name"):
        save(tmp_path, 1, {"../w": {}}, {}, run="r", keep=1)
    with pytest.raises(CheckpointError, match="dtype"):
        save(tmp_path, 1, {"w": {"a": np.array([object()])}}, {}, run="r", keep=1)
    assert list(tmp_path.iterdir()) == []


def test_a_save_does_not_double_memory(tmp_path: Path) -> None:
    grown_kib = int(run_python(PEAK_MEMORY, tmp_path))
    assert grown_kib < 16 << 10  # of 64 MiB saved


def test_leftovers_of_dead_writers_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = os.uname().nodename
    names = {
        f".writing-{host}-{dead.pid}-0a": True,
        f".writing-{host}-{os.getppid()}-0b": False,
        f".writing-{host}-{os.getpid()}-0e": True,  # of a process before us with our number
        ".writing-elsewhere-7-0c": False,
        ".writing-longago-7-0d": True,
    }
    for name in names:
        (tmp_path / name).mkdir()
    long_ago = time.time() - 2 * 86400
    os.utime(tmp_path / ".writing-longago-7-0d", (long_ago, long_ago))
    save_step(tmp_path, 1)
    assert {name: not (tmp_path / name).exists() for name in names} == names


def test_a_run_directory_has_one_syncer(tmp_path: Path) -> None:
    with lease(tmp_path / "run"), pytest.raises(CheckpointError, match=f"pid={os.getpid()} host="):
        lease(tmp_path / "run")
    lease(tmp_path / "run").release()


def test_the_lease_ends_with_its_process(tmp_path: Path) -> None:
    program = "import sys, time; from archipel.runtime.checkpoint import lease; from pathlib import Path;"
    program += "held = lease(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    argv = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match=f"pid={holder.pid} "):
            lease(tmp_path)
        holder.kill()
    lease(tmp_path).release()
