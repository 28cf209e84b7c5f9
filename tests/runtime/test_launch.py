"""The launcher over real processes: small Python programs, watched with deadlines."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from archipel.errors import ConfigError
from archipel.runtime import launch
from archipel.runtime.launch import (
    Crashes,
    Exit,
    Launcher,
    LaunchOptions,
    WorkerProgram,
    available_cores,
    signal_name,
    spawn_courier,
    thread_environment,
    threads_per_worker,
)

DEADLINE_S = 30.0
QUICK = LaunchOptions(backoff_s_min=0.01, backoff_s_max=0.04, restarts_max=3, remains_s=0.01)

SLEEP = "import time; time.sleep(600)"
OBEY = "import signal, time; signal.signal(15, lambda *_: exit(0)); print('ready'); time.sleep(99)"
STUBBORN = OBEY.replace("lambda *_: exit(0)", "signal.SIG_IGN")
WITH_CHILD = (
    "import subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
    "print('child', child.pid); child.wait()"
)

# A launcher with two workers, one of which has started a process that ties itself to it.
LAUNCHER = """
import sys, time
from pathlib import Path
from archipel.runtime.launch import Launcher, WorkerProgram

courier = "import os, time; from archipel.runtime.launch import die_with_parent\\n"
courier += "die_with_parent(os.getppid()); print('tied', os.getpid()); time.sleep(600)"
trainer = f"import subprocess, sys; subprocess.run([sys.executable, '-u', '-c', {courier!r}])"
launcher = Launcher(Path(sys.argv[1]))
for name, program in (("plain", "import time; time.sleep(600)"), ("trainer", trainer)):
    launcher.start(WorkerProgram(name, (sys.executable, "-u", "-c", program)))
HOW
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with Launcher(tmp_path, QUICK) as launcher:
        yield launcher


def program(
    name: str, source: str, *, restart: bool = True, env: dict[str, str] | None = None
) -> WorkerProgram:
    return WorkerProgram(name, (sys.executable, "-u", "-c", source), env or {}, restart)


def until(condition: Callable[[], object]) -> object:
    """Return what `condition` returns once that is true, looking again and again until the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "nothing happened before the deadline"
        time.sleep(0.005)
    return value


def exits(launcher: Launcher, count: int = 1) -> list[Exit]:
    """Poll until so many exits have been seen."""
    seen: list[Exit] = []
    until(lambda: seen.extend(launcher.poll()) or len(seen) >= count)
    return seen


def log_says(launcher: Launcher, name: str, word: str) -> list[str]:
    """Wait for a line that starts with a word in a worker's log; return its words."""

    def find() -> list[str]:
        lines = [line.split() for line in launcher.log_path(name).read_text().splitlines()]
        return next((line for line in lines if line[:1] == [word]), [])

    return until(find)


def gone(pid: int) -> bool:
    """Whether a process has ended. One that nobody has reaped yet has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def test_a_worker_that_exits_with_zero_is_through(launcher: Launcher) -> None:
    launcher.start(program("a", "print('hello')"))
    assert exits(launcher) == [Exit("a", 0, None)]
    assert launcher.running == launcher.waiting == ()


def test_output_and_errors_go_to_the_log_of_every_start(launcher: Launcher) -> None:
    source = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    launcher.start(program("a", source))
    exits(launcher, 2)
    text = launcher.log_path("a").read_text()
    assert text.count("out\n") >= 2
    assert text.count("err\n") >= 2
    assert "launch start=2 argv=" in text


def test_a_crashed_worker_comes_back_after_a_backoff(launcher: Launcher, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    source = f"import os, sys, time; os.path.exists({str(flag)!r}) or (open({str(flag)!r}, 'w'), sys.exit(7))"
    first = launcher.start(program("a", source + "; print('back'); time.sleep(600)"))
    [crash] = exits(launcher)
    assert (crash.code, crash.signal, crash.crash_looping) == (7, None, False)
    assert crash.will_restart_at is not None
    assert launcher.waiting == ("a",)
    until(lambda: launcher.poll() or launcher.running)
    assert launcher.pid("a") not in (None, first)
    log_says(launcher, "a", "back")


def test_backoff_doubles_up_to_its_limit_and_a_crash_loop_is_reported(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    launcher.start(program("a", "import sys; print('cannot work'); sys.exit(1)"))
    waits_s = []
    for _ in range(QUICK.restarts_max + 1):
        [crash] = exits(launcher)
        waits_s.append(crash.will_restart_at - time.monotonic())
        assert crash.crash_looping == (len(waits_s) == QUICK.restarts_max + 1)
    limits_s = (0.01, 0.02, 0.04, launch.LOOP_RETRY_S)
    assert all(wait_s <= limit_s for wait_s, limit_s in zip(waits_s, limits_s, strict=True))
    assert waits_s[-1] > launch.LOOP_RETRY_S / 2
    assert crash.log_tail.endswith("cannot work\n")
    assert "worker_crash_looping name=a code=1 crashes=4 window_s=120 next_try_s=180" in caplog.text
    assert "cannot work" in caplog.text


def test_a_crash_loop_is_tried_again_and_ends_when_its_cause_has_passed(
    launcher: Launcher, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LOOP_RETRY_S", 0.05)
    passed = tmp_path / "passed"
    source = f"import os, sys, time; os.path.exists({str(passed)!r}) or sys.exit(1)"
    launcher.start(program("a", source + "; time.sleep(600)"))
    crashes = [exits(launcher)[0].crash_looping for _ in range(QUICK.restarts_max + 3)]
    assert crashes == [False] * QUICK.restarts_max + [True] * 3
    assert caplog.text.count("worker_crash_looping") == 3  # one warning a try
    passed.touch()
    until(lambda: launcher.poll() or launcher.running)
    assert launcher.waiting == ()


def test_what_loops_does_so_until_it_has_lived_for_the_window() -> None:
    """Five crashes in a row, then a try every few minutes; each crash counts alone, but the loop goes on."""
    crashes = Crashes(LaunchOptions(restarts_max=5, restarts_window_s=120))
    for second in range(6):
        crashes.note(float(second), float(second))
    assert crashes.looping
    assert crashes.note(190.0, 189.0) == launch.LOOP_RETRY_S and crashes.looping
    assert crashes.note(600.0, 400.0) == LaunchOptions().backoff_s_min and not crashes.looping


def test_backoff_is_bounded_however_often_a_worker_crashes() -> None:
    crashes = Crashes(LaunchOptions(backoff_s_min=0.5, backoff_s_max=30))
    assert [crashes.backoff_s(count) for count in (1, 2, 3, 7, 5000)] == [0.5, 1, 2, 30, 30]


def test_a_worker_that_is_not_to_be_restarted_stays_down(launcher: Launcher) -> None:
    launcher.start(program("a", "raise SystemExit(1)", restart=False))
    [crash] = exits(launcher)
    assert (crash.code, crash.will_restart_at, crash.crash_looping) == (1, None, False)


def test_a_killed_worker_comes_back_however_often_it_is_killed(launcher: Launcher) -> None:
    launcher.start(program("a", SLEEP))
    for _ in range(QUICK.restarts_max + 2):
        pid = launcher.pid("a")
        assert launcher.kill("a")
        [killed] = exits(launcher)
        assert (killed.signal, killed.code) == (signal.SIGKILL, None)
        assert killed.will_restart_at is not None
        until(lambda: launcher.poll() or launcher.running)
        assert launcher.pid("a") != pid


def test_killing_what_is_down_says_so(launcher: Launcher) -> None:
    launcher.start(program("a", "pass"))
    exits(launcher)
    assert not launcher.kill("a")


def test_a_kill_reaches_what_the_worker_started(launcher: Launcher) -> None:
    launcher.start(program("a", WITH_CHILD, restart=False))
    child = int(log_says(launcher, "a", "child")[1])
    launcher.kill("a")
    until(lambda: gone(child))


def test_what_a_dead_worker_started_is_killed_after_a_moment(launcher: Launcher) -> None:
    launcher.start(program("a", WITH_CHILD.replace("child.wait()", "raise SystemExit(1)"), restart=False))
    exits(launcher)
    child = int(log_says(launcher, "a", "child")[1])
    until(lambda: launcher.poll() or gone(child))


def test_stop_lets_workers_end_in_order(launcher: Launcher) -> None:
    for name in ("a", "b"):
        launcher.start(program(name, OBEY))
        log_says(launcher, name, "ready")
    ended = launcher.stop(DEADLINE_S)
    assert {(exit.name, exit.code, exit.will_restart_at) for exit in ended} == {
        ("a", 0, None),
        ("b", 0, None),
    }
    assert launcher.running == launcher.waiting == ()
    assert launcher.poll() == launcher.stop() == []


def test_stop_kills_who_does_not_obey(launcher: Launcher) -> None:
    launcher.start(program("a", STUBBORN))
    log_says(launcher, "a", "ready")
    pid = launcher.pid("a")
    [killed] = launcher.stop(0.05)
    assert killed.signal == signal.SIGKILL
    assert gone(pid)


def test_stop_wakes_a_frozen_worker_so_that_it_can_obey(launcher: Launcher) -> None:
    launcher.start(program("a", OBEY))
    log_says(launcher, "a", "ready")
    launcher.kill("a", signal.SIGSTOP)
    [ended] = launcher.stop(DEADLINE_S)
    assert ended.clean


def test_stop_cancels_a_restart_that_waits(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, LaunchOptions(backoff_s_min=600, backoff_s_max=600))
    launcher.start(program("a", "raise SystemExit(1)"))
    exits(launcher)
    assert launcher.waiting == ("a",)
    launcher.stop()
    assert launcher.waiting == ()


def test_leaving_the_context_stops_everything_even_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Launcher(tmp_path, QUICK) as launcher:
        pid = launcher.start(program("a", SLEEP))
        _ = 1 / 0
    assert gone(pid)


def test_a_signal_asks_for_a_stop_and_a_second_one_kills(launcher: Launcher) -> None:
    before = signal.getsignal(signal.SIGTERM)
    launcher.start(program("a", STUBBORN))
    log_says(launcher, "a", "ready")
    launcher.install_signal_handlers()
    pid = launcher.pid("a")
    os.kill(os.getpid(), signal.SIGTERM)
    assert launcher.stop_requests == 1
    assert not gone(pid)
    os.kill(os.getpid(), signal.SIGINT)
    assert launcher.stop_requests == 2
    until(lambda: gone(pid))
    started = time.monotonic()
    launcher.stop(600)
    assert time.monotonic() - started < 300
    launcher.restore_signal_handlers()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("how", ["time.sleep(600)", "launcher.install_signal_handlers(); time.sleep(600)"])
def test_a_killed_launcher_leaves_no_process(tmp_path: Path, how: str) -> None:
    argv = [sys.executable, "-c", LAUNCHER.replace("HOW", "print('up', flush=True); " + how), str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        log_says(Launcher(tmp_path), "trainer", "tied")
        started = tied_to(process.pid)
        assert len(started) == 3
        process.kill()
    until(lambda: all(gone(pid) for pid in started))


def tied_to(ancestor: int) -> list[int]:
    """Return the ids of all live descendants of a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = [ancestor]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def test_a_child_whose_parent_is_already_dead_does_not_start() -> None:
    source = "from archipel.runtime.launch import die_with_parent; die_with_parent(1 << 30); print('alive')"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""


def test_a_program_that_does_not_exist_is_refused_at_once(launcher: Launcher) -> None:
    with pytest.raises(ConfigError, match="'no-such-program' is not on the PATH"):
        launcher.start(WorkerProgram("a", ("no-such-program",)))


def test_a_name_in_use_and_a_name_that_is_a_path_are_refused(launcher: Launcher) -> None:
    launcher.start(program("a", SLEEP))
    with pytest.raises(ConfigError, match="already running"):
        launcher.start(program("a", SLEEP))
    with pytest.raises(ConfigError, match="no file name"):
        launcher.start(program("../a", SLEEP))


def test_a_worker_that_is_down_can_be_started_anew(launcher: Launcher) -> None:
    launcher.start(program("a", "raise SystemExit(1)", restart=False))
    exits(launcher)
    launcher.start(program("a", SLEEP))
    assert launcher.running == ("a",)


def test_workers_are_told_their_threads_and_their_own_environment(launcher: Launcher) -> None:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "X")
    source = f"import os; print('env', *(os.environ[name] for name in {names}))"
    launcher.start(
        WorkerProgram("a", (sys.executable, "-c", source), {"X": "y", "MKL_NUM_THREADS": "9"}, threads=3)
    )
    exits(launcher)
    assert log_says(launcher, "a", "env") == ["env", "3", "9", "y"]


def test_cores_are_shared_out_and_every_worker_has_one_thread_at_least() -> None:
    assert [threads_per_worker(cores, workers) for cores, workers in ((8, 2), (7, 2), (2, 8))] == [4, 3, 1]
    assert 1 <= available_cores() <= os.cpu_count()
    assert thread_environment(2)["OMP_NUM_THREADS"] == "2"


def test_signals_have_names() -> None:
    assert (signal_name(9), signal_name(63)) == ("SIGKILL", "63")


def test_a_courier_gets_its_end_of_the_channel_and_we_keep_none(tmp_path: Path) -> None:
    package = tmp_path / "archipel" / "roles"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    answer = "import os, sys; os.write(int(sys.argv[2]), ' '.join(sys.argv[1:]).encode())"
    (package / "courier.py").write_text(answer)
    reader, writer = os.pipe()
    courier = spawn_courier(["--name", "L0"], writer, env={"PYTHONPATH": str(tmp_path)})
    with open(reader, "rb") as pipe:  # ends, because nobody here holds the other end
        assert pipe.read() == f"--fd {writer} --parent {os.getpid()} --name L0".encode()
    assert courier.wait(DEADLINE_S) == 0
