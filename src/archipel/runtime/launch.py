"""The local launcher: starts the workers of one machine, watches them, restarts them, and leaves none behind.

A learner that dies is the normal case of this system, so a worker that crashes is started again, after a
backoff that doubles. One that crashes too often within a window is reported, with the end of its log, and
from then on tried every few minutes only: what breaks it (a full disk, a device that is gone) may pass.

Invariants: a worker leads its own session, so one signal reaches it with its courier and its loaders. The
kernel kills a worker when the launcher dies, however it dies (Linux). Nothing here blocks but `stop`; the
owner calls `poll`. Start workers from a thread that lives as long as they shall: the kernel ties them to the
thread.
"""

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from msgspec import Struct

from archipel.errors import ConfigError

LOG_TAIL_BYTES = 2000
POLL_S = 0.02  # how often `stop` looks
KILL_S = 10.0  # how long `stop` waits for what it has killed
LOOP_RETRY_S = 180.0  # between two tries of a worker that crashes again and again

_PR_SET_PDEATHSIG = 1
_LEADER_ONLY = (signal.SIGTERM, signal.SIGINT)  # orderly: the worker itself tells its courier
# Runs in the child before its program: sets the death signal there (no preexec_fn: threads may exist here),
# looks whether the parent died meanwhile, and becomes the program. A death signal outlives exec.
_TRAMPOLINE = """
import ctypes, os, sys
parent, argv = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != parent:
    os._exit(1)
os.execvp(argv[0], argv)
"""
_log = logging.getLogger(__name__)


class LaunchOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `[launch]`."""

    restarts_max: int = 5  # crashes within the window; after more a worker is tried every few minutes only
    restarts_window_s: float = 120.0
    backoff_s_min: float = 0.5  # before the first restart; doubles with every crash within the window
    backoff_s_max: float = 30.0
    stop_grace_s: float = 15.0  # between asking a worker to stop and killing it
    device: Literal["cpu", "cuda"] = "cpu"  # of the learners; several GPUs are dealt out in turn
    remains_s: float = 1.0  # how long the other processes of a dead worker may go on, to say so


class WorkerProgram(Struct, frozen=True):
    """What to run as one worker."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = {}  # on top of the launcher's own
    restart: bool = True  # after a crash; a worker that exits with 0 is through
    threads: int = 1  # computing threads it may use


class Exit(Struct, frozen=True):
    """A worker's process ended. Exactly one of `code` and `signal` is set."""

    name: str
    code: int | None
    signal: int | None
    will_restart_at: float | None = None  # on time.monotonic(); None: it stays down
    crash_looping: bool = False  # it crashed too often: the next try is minutes away
    log_tail: str = ""  # the end of its log, unless it exited with 0

    @property
    def clean(self) -> bool:
        """Whether the worker said that all was well."""
        return self.code == 0


@dataclass
class Crashes:
    """The crashes of one program of late, and how long to wait before it is started again."""

    options: LaunchOptions
    times: list[float] = field(default_factory=list)  # within the window
    looping: bool = False

    def note(self, now: float, started_at: float) -> float:
        """Take note of a crash; return the wait before the next start.

        What loops does so until one of its starts has lived for the whole window.
        """
        window_s = self.options.restarts_window_s
        self.times = [*(at for at in self.times if now - at < window_s), now]
        still = self.looping and now - started_at < window_s
        self.looping = still or len(self.times) > self.options.restarts_max
        if self.looping:
            return max(LOOP_RETRY_S, self.options.backoff_s_max)
        return self.backoff_s(len(self.times))

    def backoff_s(self, count: int) -> float:
        """Return the wait before the restart after so many crashes within the window, one or more."""
        doubled_s = self.options.backoff_s_min * 2.0 ** min(count - 1, 30)  # bounded: floats overflow
        return min(self.options.backoff_s_max, doubled_s)


@dataclass
class _Worker:
    """What the launcher knows of one worker, over all its starts."""

    program: WorkerProgram
    crashes: Crashes
    process: "subprocess.Popen[bytes] | None" = None  # until reaped
    ended_at: float | None = None  # its process is a zombie, kept so that nobody gets its group's number
    restart_at: float | None = None
    starts: int = 0
    started_at: float = 0.0
    killed_with: int | None = None  # dying of this signal is our doing and no crash


class Launcher:
    """The workers of one machine. `with Launcher(run_dir, options) as launcher:` stops them at the end."""

    def __init__(self, run_dir: Path, options: LaunchOptions | None = None) -> None:
        self.options = options or LaunchOptions()
        self.stop_requests = 0  # signals received since `install_signal_handlers`
        self._logs = Path(run_dir) / "logs"
        self._workers: dict[str, _Worker] = {}
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.restore_signal_handlers()

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the workers whose process runs, in the order they were first started."""
        return tuple(name for name, worker in self._workers.items() if _runs(worker))

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of the workers that are down and will be restarted."""
        return tuple(name for name, worker in self._workers.items() if worker.restart_at is not None)

    def pid(self, name: str) -> int | None:
        """Return the process id of a running worker, which is its process group's too, or None."""
        worker = self._workers[name]
        return worker.process.pid if worker.process and _runs(worker) else None

    def log_path(self, name: str) -> Path:
        """Return the file with the standard output and error of a worker, over all its starts."""
        return self._logs / f"{name}.log"

    def start(self, program: WorkerProgram) -> int:
        """Start a worker and return its process id. A name whose worker is down may be used again."""
        known = self._workers.get(program.name)
        if known is not None and _runs(known):
            raise ConfigError(f"worker {program.name!r} is already running; give the second one another name")
        if Path(program.name).name != program.name:
            raise ConfigError(f"worker name {program.name!r} is no file name; its log is named after it")
        if shutil.which(program.argv[0]) is None:
            raise ConfigError(f"worker {program.name!r}: program {program.argv[0]!r} is not on the PATH")
        if known is not None:
            self._reap(known)
        worker = _Worker(program, Crashes(self.options))
        self._workers[program.name] = worker
        return self._spawn(worker)

    def poll(self) -> list[Exit]:
        """Return the exits since the last call, and do the restarts that are due. Never blocks."""
        now = time.monotonic()
        ended = [worker for worker in self._workers.values() if _exited(worker)]
        exits = [self._note_exit(worker, now, restart=True) for worker in ended]
        for worker in self._workers.values():
            restart = worker.restart_at is not None and now >= worker.restart_at
            if restart or (worker.ended_at is not None and now >= worker.ended_at + self.options.remains_s):
                self._reap(worker)
            if restart:
                self._respawn(worker)
        return exits

    def kill(self, name: str, number: int = signal.SIGKILL) -> bool:
        """Send a signal to a worker and everything it started; return whether it was running.

        SIGTERM and SIGINT go to the worker alone, which stops its courier itself. What it dies of then is no
        crash: it is restarted after the shortest backoff, as often as it is killed.
        """
        worker = self._workers[name]
        if worker.process is None or not _runs(worker):
            return False
        worker.killed_with = number
        _send(worker.process, number)
        return True

    def stop(self, grace_s: float | None = None) -> list[Exit]:
        """Ask all workers to stop, in the order they were started; after the grace kill; return the exits.

        A second signal from the user ends the grace at once. Nothing is restarted afterwards. Twice is once.
        """
        deadline = time.monotonic() + (self.options.stop_grace_s if grace_s is None else grace_s)
        for worker in self._workers.values():
            worker.restart_at = None
            if worker.process is not None and _runs(worker):
                _send(worker.process, signal.SIGTERM)
                _send(worker.process, signal.SIGCONT)  # a frozen one could not obey
        exits: list[Exit] = []
        while self._collect(exits) and time.monotonic() < deadline and self.stop_requests < 2:
            time.sleep(POLL_S)
        self._kill_all()
        deadline = time.monotonic() + KILL_S
        while self._collect(exits) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for name in self.running:  # stuck in the kernel, on a dead disk perhaps: no signal helps
            _log.error("worker_unkillable name=%s pid=%s", name, self.pid(name))
        for worker in self._workers.values():
            self._reap(worker)
        return exits

    def install_signal_handlers(self) -> None:
        """Let Ctrl-C and SIGTERM count `stop_requests`, and a second one kill every worker at once."""
        assert threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers.setdefault(number, signal.getsignal(number))
            signal.signal(number, self._on_signal)

    def restore_signal_handlers(self) -> None:
        """Put back what `install_signal_handlers` replaced."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._handlers.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_requests += 1
        if self.stop_requests >= 2:
            self._kill_all()

    def _spawn(self, worker: _Worker) -> int:
        program = worker.program
        path = self.log_path(program.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        worker.starts += 1
        worker.started_at = time.monotonic()
        worker.restart_at = None
        worker.killed_with = None
        with open(path, "ab", buffering=0) as log:
            with contextlib.suppress(OSError):  # a full disk is no reason not to start
                log.write(f"launch start={worker.starts} argv={list(program.argv)}\n".encode())
            worker.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid()), *program.argv],
                env={**os.environ, **thread_environment(program.threads), **program.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _log.info("worker_started name=%s pid=%d start=%d", program.name, worker.process.pid, worker.starts)
        return worker.process.pid

    def _respawn(self, worker: _Worker) -> None:
        try:
            self._spawn(worker)
        except OSError as error:  # no process or memory to be had now: that may pass
            worker.restart_at = time.monotonic() + self.options.backoff_s_max
            _log.warning("worker_not_started name=%s reason=%s", worker.program.name, error)

    def _note_exit(self, worker: _Worker, now: float, *, restart: bool) -> Exit:
        """Take note that a worker's process ended; decide whether it comes back."""
        assert worker.process is not None
        code, number = _peek(worker.process)
        worker.ended_at = now
        name = worker.program.name
        tail = "" if code == 0 else _tail(self.log_path(name))
        if code == 0 or not restart or not worker.program.restart:
            ended = Exit(name, code, number, log_tail=tail)
        elif worker.killed_with is not None and worker.killed_with in (number, *_LEADER_ONLY):
            worker.restart_at = now + self.options.backoff_s_min
            ended = Exit(name, code, number, worker.restart_at, log_tail=tail)
        else:
            worker.restart_at = now + worker.crashes.note(now, worker.started_at)
            ended = Exit(name, code, number, worker.restart_at, worker.crashes.looping, tail)
        self._report(ended, len(worker.crashes.times), now)
        return ended

    def _report(self, ended: Exit, crashes: int, now: float) -> None:
        how = f"code={ended.code}" if ended.signal is None else f"signal={signal_name(ended.signal)}"
        if not ended.crash_looping:
            _log.info(
                "worker_exited name=%s %s restart=%s", ended.name, how, ended.will_restart_at is not None
            )
            return
        assert ended.will_restart_at is not None
        message = "worker_crash_looping name=%s %s crashes=%d window_s=%g next_try_s=%.0f log=%s tail:\n%s"
        next_try_s, window_s = ended.will_restart_at - now, self.options.restarts_window_s
        path = self.log_path(ended.name)
        _log.warning(message, ended.name, how, crashes, window_s, next_try_s, path, ended.log_tail)

    def _collect(self, exits: list[Exit]) -> bool:
        """Add new exits, restarting nothing; return whether any worker still runs."""
        now = time.monotonic()
        for worker in self._workers.values():
            if _exited(worker):
                exits.append(self._note_exit(worker, now, restart=False))
        return bool(self.running)

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            if worker.process is not None:
                _send(worker.process, signal.SIGKILL)

    def _reap(self, worker: _Worker) -> None:
        """Kill what a dead worker left in its group, then let the kernel forget it."""
        if worker.process is not None and worker.ended_at is not None:
            process, worker.process, worker.ended_at = worker.process, None, None
            _send(process, signal.SIGKILL)
            process.wait()


def die_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent dies; die now if it already has.

    The first thing a worker does when it is given `--parent PID`. The parent is the thread that started us.
    Where the kernel cannot do it (not Linux), a thread looks once a second.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid, number), daemon=True).start()
    if os.getppid() != parent_pid:  # it died before we asked
        os.kill(os.getpid(), number)


def spawn_courier(
    arguments: Sequence[str], fd: int, *, env: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a learner's courier with its end of the channel; close that end here.

    The courier is `python -m archipel.roles.courier --fd N --parent PID arguments…`. It stays in our process
    group, so that who kills the learner kills it too. Takes over `fd`: while we kept it open, the courier's
    death would go unnoticed.
    """
    argv = [sys.executable, "-m", "archipel.roles.courier", "--fd", str(fd), "--parent", str(os.getpid())]
    environment = {**os.environ, **thread_environment(1), **(env or {})}
    try:
        return subprocess.Popen(
            [*argv, *arguments], pass_fds=(fd,), env=environment, stdin=subprocess.DEVNULL
        )
    finally:
        os.close(fd)


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_worker(cores: int, workers: int) -> int:
    """Return the computing threads of each of `workers` processes, at least one.

    Threads beyond the cores spin against each other: two on a busy core made a step 3.5 to 6 times slower
    than one.
    """
    assert cores >= 1 and workers >= 1, (cores, workers)
    return max(1, cores // workers)


def thread_environment(threads: int) -> dict[str, str]:
    """Return the environment variables that hold numerical libraries to so many threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return dict.fromkeys(names, str(threads))


def signal_name(number: int) -> str:
    """Return SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)


def _runs(worker: _Worker) -> bool:
    return worker.process is not None and worker.ended_at is None


def _exited(worker: _Worker) -> bool:
    """Whether a worker's process has ended since we last looked. It stays a zombie."""
    if worker.process is None or worker.ended_at is not None:
        return False
    return _peek(worker.process) != (None, None)


def _peek(process: "subprocess.Popen[bytes]") -> tuple[int | None, int | None]:
    """Return the (code, signal) a child ended with, leaving it a zombie; (None, None) while it runs."""
    if not hasattr(os, "waitid"):  # macOS: it is reaped here, and its group's number may be used again
        code = process.poll()
        return (None, -code) if code is not None and code < 0 else (code, None)
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None, None
    if ended.si_code == os.CLD_EXITED:
        return ended.si_status, None
    return None, ended.si_status


def _send(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Signal a worker's group, or it alone when the signal asks for an orderly stop."""
    try:
        if number in _LEADER_ONLY:
            os.kill(process.pid, number)
        else:
            os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # only zombies are left
        pass


def _tail(path: Path) -> str:
    """Return the last lines of a log."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            start = max(0, file.tell() - LOG_TAIL_BYTES)
            file.seek(start)
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"({path} cannot be read: {error})"
    return text if start == 0 else text[text.find("\n") + 1 :]


def _watch_parent(parent_pid: int, number: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    os.kill(os.getpid(), number)
