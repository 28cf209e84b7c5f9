"""A rig for live tests: real processes on this machine, polled with deadlines, none of them left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from archipel.errors import TapeError
from archipel.protocol import messages as m
from archipel.runtime.launch import thread_environment
from archipel.tape.record import Record
from archipel.tape.tape import TapeTail, workers
from archipel.train import corpus

# Steps of some ten milliseconds: a run lasts as long as the test wants, given enough of them.
TINY = {
    "run": {"name": "live"},
    "sync": {
        "learners": 2,
        "steps": 1_000_000,
        "fragments": 2,
        "interval_steps": 16,
        "outer_momentum": 0.5,
        "checkpoint_rounds": 20,
    },
    "model": {"width": 32, "layers": 1, "heads": 2},
    "data": {"sequence": 32, "batch": 64, "shards": 16},
    "optimizer": {"warmup_steps": 10},
    "evaluate": {"every_rounds": 50, "batches": 1, "batch": 4},
}
DEADLINE_S = 60.0  # generous: the machine may be busy; a test that passes does not wait for it


def descendants(pid: int) -> list[int]:
    """Return a process's children, and theirs."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                child = int(path.parent.name)
                found += [child, *descendants(child)]
    return found


def mentioning(text: str) -> list[int]:
    """Return the processes whose command line holds the text; zombies have none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


class Worker:
    """A process under test, in a session of its own, with its output in a file."""

    def __init__(self, name: str, argv: list[str], log: Path) -> None:
        self.name, self.log = name, log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **thread_environment(1)},
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def courier(self) -> int:
        """The process id of a learner's courier."""
        return next(pid for pid in descendants(self.process.pid) if b"roles.courier" in _command(pid))

    def signal(self, number: int, *, group: bool = False) -> None:
        """Signal the process, or all of its session."""
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def exit_code(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for the end and return the code."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} still runs after {deadline_s} s:\n{self.output[-3000:]}"
            ) from None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


class Rig:
    """One run folder and the processes that work on it."""

    def __init__(self, folder: Path, tokens: Path) -> None:
        self.folder, self.tokens = folder, tokens
        self.out = folder / "run"
        self.config = folder / "run.toml"
        self.workers: list[Worker] = []
        self.address = ""
        self._tapes: dict[Path, tuple[str, TapeTail]] = {}
        self._seen: dict[str, list[Record]] = {}
        self.folder.mkdir(exist_ok=True)
        self.write()

    def write(self, **sections: dict[str, Any]) -> None:
        """Write the run's TOML: a tiny model, with these options changed."""
        tree = {name: {**options, **sections.get(name, {})} for name, options in TINY.items()}
        tree |= {name: options for name, options in sections.items() if name not in tree}
        tree["data"] = {"path": str(self.tokens), **tree["data"]}
        lines = []
        for name, options in tree.items():
            lines.append(f"[{name}]")
            lines += [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in options.items()]
        self.config.write_text("\n".join(lines) + "\n")

    # ---- processes ----

    def start(self, name: str, *argv: str) -> Worker:
        """Start `python …`."""
        worker = Worker(name, [sys.executable, *argv], self.folder / f"{name}.log")
        self.workers.append(worker)
        return worker

    def archipel(self, name: str, *argv: str) -> Worker:
        """Start `archipel …`."""
        return self.start(name, "-m", "archipel", *argv)

    def syncer(self, *argv: str, name: str = "syncer", listen: str = "") -> Worker:
        """Start a syncer, where the last one listened if there was one, and wait until it does."""
        file = self.folder / "address"
        file.unlink(missing_ok=True)
        where = ["--listen", listen or self.address or "127.0.0.1:0", "--address-file", str(file)]
        worker = self.archipel(name, "syncer", str(self.config), *where, "--out", str(self.out), *argv)
        self.wait(file.exists, "the syncer listens", alive=worker)
        self.address = file.read_text()
        return worker

    def learner(self, number: int, *argv: str, address: str = "") -> Worker:
        """Start `archipel learner` as learner-<number>."""
        to = ["--syncer", address or self.address, "--name", f"learner-{number}", "--out", str(self.out)]
        return self.archipel(f"learner-{number}", "learner", str(self.config), *to, *argv)

    # ---- looking ----

    def wait(
        self,
        holds: Callable[[], Any],
        what: str,
        deadline_s: float = DEADLINE_S,
        *,
        alive: Worker | None = None,
    ) -> Any:
        """Poll until `holds()` is true and return what it returned."""
        deadline = time.monotonic() + deadline_s
        while not (found := holds()):
            if time.monotonic() > deadline or (alive is not None and alive.process.poll() is not None):
                logs = "\n".join(f"== {w.name} {w.process.poll()}\n{w.output[-1500:]}" for w in self.workers)
                raise AssertionError(f"not within {deadline_s} s: {what}\n{logs}")
            time.sleep(0.05)
        return found

    def records(self, worker: str = m.SYNCER) -> list[Record]:
        """Return what a worker's tapes hold so far, oldest process first."""
        with contextlib.suppress(TapeError):  # no tape yet, or its header is not on disk
            for file in workers(self.out):
                if file.path not in self._tapes:
                    self._tapes[file.path] = (file.worker, TapeTail(file.path))
        for name, tape in self._tapes.values():
            if name == worker:
                self._seen.setdefault(name, []).extend(tape.poll())
        return self._seen.get(worker, [])

    def count(self, kind: type[m.Event], worker: str = m.SYNCER) -> int:
        """Return how many events of a kind a worker has recorded."""
        return sum(isinstance(record.event, kind) for record in self.records(worker))

    def said(self, text: str, worker: str = m.SYNCER) -> bool:
        """Return whether a worker's machine gave a notice that holds the text."""
        return any(
            isinstance(action, m.Notice) and text in action.text
            for record in self.records(worker)
            for action in record.actions
        )

    def folds(self, learner: str) -> int:
        """Return how many pushes of a learner were folded in."""
        return sum(
            isinstance(record.event, m.Folded) and record.event.worker == learner for record in self.records()
        )

    def facts(self) -> dict[str, Any]:
        """Return what the syncer left when it ended."""
        return msgspec.json.decode((self.out / "syncer.json").read_bytes())  # type: ignore[no-any-return]

    def facts_of_a_whole_run(self) -> dict[str, Any]:
        """Run a syncer and its two learners to the end."""
        all_of_them = [self.syncer(), self.learner(0), self.learner(1)]
        assert [worker.exit_code() for worker in all_of_them] == [0, 0, 0]
        return self.facts()

    def going(self, rounds: int = 3) -> None:
        """Wait until so many more rounds have been merged."""
        goal = self.count(m.Merged) + rounds
        self.wait(lambda: self.count(m.Merged) >= goal, f"{rounds} more rounds")

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token file of some kilobytes."""
    folder = tmp_path_factory.mktemp("tokens")
    text = folder / "text.txt"
    text.write_text("".join(f"line {number} of the text that is learned here\n" for number in range(4000)))
    corpus.prepare(str(text), folder / "tokens.bin")
    return folder / "tokens.bin"


@pytest.fixture
def rig(tmp_path: Path, tokens: Path) -> Iterator[Rig]:
    """A run folder of one's own."""
    made = Rig(tmp_path, tokens)
    yield made
    made.end()


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Iterator[Rig]:
    """A syncer and learner-0 that go on while the tests of a file come and go."""
    made = Rig(tmp_path_factory.mktemp("busy"), tokens)
    made.write(sync={"silence_s": 4.0, "heartbeat_s": 0.5})
    made.syncer()
    made.learner(0)
    made.wait(lambda: made.folds("learner-0") >= 3, "learner-0 takes part")
    yield made
    made.end()
