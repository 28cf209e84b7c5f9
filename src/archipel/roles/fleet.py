"""A whole run on one machine, its workers as processes, watched from here.

That is a syncer, M learners and an evaluator, or a rendezvous and its peers. The *center*, syncer or
rendezvous, outlives its members. The launcher's process owns no protocol: it starts the same programs that
`archipel syncer` and `archipel learner` start, follows the center's tape for the view, kills whom a plan
says, starts a center that crashed again from its newest checkpoint, and sums the run up when it has ended.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .. import config as configuration
from ..dashboard.collect import Series
from ..dashboard.peers import PeerSeries
from ..dashboard.terminal import View
from ..errors import CheckpointError, ConfigError, WorkerDied
from ..protocol.gossip import RENDEZVOUS
from ..runtime import checkpoint
from ..runtime.launch import (
    Crashes,
    Exit,
    Launcher,
    WorkerProgram,
    available_cores,
    signal_name,
    threads_per_worker,
)
from ..tape.tape import TapeTail, workers
from .summary import Losses, summarise, summarise_gossip

log = logging.getLogger("archipel")

POLL_S = 0.1
MEND = 2  # exit code of a program that says what a person must mend
LINES_SHOWN = 15  # of a log
STATES = {"syncer": "checkpoints", RENDEZVOUS: "rendezvous"}  # where in the run folder a center keeps its own
# Where trainers share cores with syncer and couriers, a report or an update must not wait for a step to end.
LEARNER_NICE, EVALUATOR_NICE = 5, 10
EVALUATION_S_MAX = 60.0  # for the last evaluation after the run has ended


@dataclass
class Kill:
    """SIGKILL this worker once the run has reached this tick; of gossip, this round."""

    worker: str
    tick: int
    done: bool = False


@dataclass
class Fleet:
    """One run on this machine."""

    config: configuration.Config
    out: Path
    kills: list[Kill] = field(default_factory=list)
    resume: bool = False
    tls: str = ""
    init: str = ""
    quiet: bool = False
    series: Series | PeerSeries = field(init=False)
    losses: Losses = field(init=False)
    address: str = ""  # of the center, once it listens
    looping: set[str] = field(default_factory=set)  # workers whose last crash was one too many
    crashes: Crashes = field(init=False)  # of the center
    started_at: float = 0.0  # on time.monotonic(): the center's last start
    start_at: float | None = None  # when one that crashed is started again
    starting: bool = False  # it does not listen yet

    def __post_init__(self) -> None:
        gossip = self.config.gossip
        self.center, self.kind = ("syncer", "learner") if gossip is None else (RENDEZVOUS, "peer")
        count = self.config.sync.learners if gossip is None else gossip.peers
        self.members = [f"{self.kind}-{number}" for number in range(count)]
        self.series = Series(self.config.sync.quorum) if gossip is None else PeerSeries()
        self.losses = Losses(self.out / "metrics.jsonl")
        self.crashes = Crashes(self.config.launch)

    def run(self) -> dict[str, Any]:
        """Run to the end and return the summary, which is also left in `summary.json`."""
        began = time.monotonic()
        if self.init and self.config.gossip is not None:
            raise ConfigError(
                f"--init {self.init}: a rendezvous has no weights, peers of a [gossip] run start from the "
                "configuration's own; leave --init out, or train with a syncer"
            )
        # The center holds its own lease while it lives; this one also while it starts, or is down.
        with checkpoint.lease(self.out / "logs"), Launcher(self.out, self.config.launch) as launcher:
            launcher.install_signal_handlers()
            with checkpoint.lease(self.out):
                self._refuse_what_is_there()
            with _put_back_unless_done(self._config_file, self._result_file):
                self._config_file.write_text(configuration.dump(self.config))
                self._result_file.unlink(missing_ok=True)  # of the time before a resume
                self._start_center(launcher, resume=self.resume)
                self._await_center(launcher)
            self._start_members(launcher, self.address)
            if self._watch(launcher):
                self._await_the_rest(launcher)
        sums = summarise if self.config.gossip is None else summarise_gossip
        summary = sums(self.out, self.config, len([kill for kill in self.kills if kill.done]))
        summary["seconds"] = round(time.monotonic() - began, 3)
        _write_json(self.out / "summary.json", summary)
        return summary

    @property
    def _config_file(self) -> Path:
        return self.out / "config.toml"

    @property
    def _address_file(self) -> Path:
        """What the center writes when it listens."""
        return self.out / "address"

    @property
    def _result_file(self) -> Path:
        """What the center leaves when it ends in order."""
        return self.out / f"{self.center}.json"

    # ---- starting ----

    def _refuse_what_is_there(self) -> None:
        """Raise CheckpointError if the folder holds another run, or this one and it is not to be resumed."""
        path, held = _newest(self.out)
        if held is None:
            return
        if held.run != self.config.run.name:
            raise CheckpointError(
                f"checkpoint {path} belongs to run {held.run!r}, not to {self.config.run.name!r}: "
                "name its own directory"
            )
        folder = path.parent
        if folder.name != STATES[self.center]:
            raise CheckpointError(
                f"{folder} is of a run that has no {self.center}: a section [gossip] makes the difference; "
                "resume with the run's own file, or name another --out"
            )
        if not self.resume:
            what = f"a checkpoint of round {held.step}" if self.center == "syncer" else "the state of a run"
            raise CheckpointError(
                f"{folder} holds {what}: --resume goes on from it, another --out starts afresh"
            )

    def _program(
        self, name: str, command: list[str], *, threads: int = 1, restart: bool = True
    ) -> WorkerProgram:
        argv = (sys.executable, "-m", "archipel", *command, "--out", str(self.out))
        if self.tls:
            argv += ("--tls", self.tls)
        return WorkerProgram(name, argv, restart=restart, threads=threads)

    def _start_center(self, launcher: Launcher, *, resume: bool) -> None:
        """Start a syncer or rendezvous, at the address it had before if it had one."""
        self._address_file.unlink(missing_ok=True)
        command = [self.center, str(self._config_file), "--listen", self.address or "127.0.0.1:0"]
        command += ["--address-file", str(self._address_file)]
        command += ["--resume"] if resume else []
        command += ["--init", str(Path(self.init).resolve())] if self.init else []
        self.starting, self.start_at, self.started_at = True, None, time.monotonic()
        launcher.start(self._program(self.center, command, restart=False))

    def _await_center(self, launcher: Launcher) -> None:
        """Return when the center that was started first listens; WorkerDied if it ends instead."""
        while not self._listens():
            if ended := _exit_of(self.center, launcher.poll()):
                raise WorkerDied(self._why_not_started(ended))
            if launcher.stop_requests:
                raise KeyboardInterrupt
            time.sleep(POLL_S)
        self.address = self._address_file.read_text()

    def _listens(self) -> bool:
        """Whether a center that was starting listens since the last look. As long as it lives, it may yet."""
        if not self.starting or not self._address_file.exists():
            return False
        self.starting = False
        return True

    def _why_not_started(self, ended: Exit) -> str:
        """Return what the center said last: its one line of what a person can mend, or the end of its log."""
        lines = ended.log_tail.strip().splitlines()
        mended = [line.removeprefix("archipel: ") for line in lines if line.startswith("archipel: ")]
        said = (
            mended[-1]
            if ended.code == MEND and mended
            else "\n".join(["its log ends:", *lines[-LINES_SHOWN:]])
        )
        return f"the {self.center} did not start ({_how(ended)}): {said}"

    def _start_members(self, launcher: Launcher, address: str) -> None:
        threads = threads_per_worker(available_cores(), len(self.members))
        for number, name in enumerate(self.members):
            command = [self.kind, str(self._config_file), f"--{self.center}", address, "--name", name]
            command += ["--nice", str(LEARNER_NICE)]
            command += ["--resume"] if self.kind == "peer" else []  # what it kept, if all others are gone too
            if self.config.launch.device == "cuda":
                command += ["--device", f"cuda:{number}"]
            launcher.start(self._program(name, command, threads=threads))
        if self.kind == "peer":
            return
        command = ["evaluator", str(self._config_file), "--syncer", address]
        command += ["--nice", str(EVALUATOR_NICE)]
        command += [] if self.resume or self.init else ["--fresh"]
        launcher.start(self._program("evaluator", command))

    # ---- watching ----

    def _watch(self, launcher: Launcher) -> bool:
        """Follow the run until its center has ended; return whether it reached the run's end."""
        tape = self._center_tape()
        ways = {"shown": PeerSeries.show, "said": PeerSeries.status} if self.kind == "peer" else {}
        with View(self.series, **ways) as view:
            while True:
                died = self._look(launcher, tape, view)
                if launcher.stop_requests or self._hopeless(launcher):
                    self._stop(launcher)
                    self._look(launcher, tape, view)
                    return False
                if died is not None:
                    self.series.take_all(tape.poll())
                    if not self._comes_back(died):
                        return died.clean
                self._start_again(launcher)
                if self._listens():
                    tape = self._center_tape()
                time.sleep(POLL_S)

    def _center_tape(self) -> TapeTail:
        tape = TapeTail(next(file.path for file in workers(self.out)[::-1] if file.worker == self.center))
        if tape.header is not None:
            self.series.mirror(tape.header)
        return tape

    def _look(self, launcher: Launcher, tape: TapeTail, view: View) -> Exit | None:
        """Take in what happened since the last look; return the center's end, if it ended."""
        self.series.take_all(tape.poll())
        exits = launcher.poll()
        for ended in exits:
            (self.looping.add if ended.crash_looping else self.looping.discard)(ended.name)
            if ended.name == self.center and not ended.clean:
                print(f"{ended.name} ended ({_how(ended)}):\n{ended.log_tail}", file=sys.stderr)
        for kill in self.kills:
            if not kill.done and self.series.tick >= kill.tick:
                kill.done = launcher.kill(kill.worker)
        self.losses.poll()
        self.series.val_loss_first, self.series.val_loss = self.losses.first, self.losses.last
        if not self.quiet:
            view.update(time.monotonic())
        return _exit_of(self.center, exits)

    def _hopeless(self, launcher: Launcher) -> bool:
        """Whether every member is down and crashed too often: nobody trains, and a person must look."""
        hopeless = set(self.members) <= self.looping - set(launcher.running)
        if hopeless:
            why = f"every {self.kind} is down and crashes again and again"
            print(f"{why}, so the run stops: see {self.out / 'logs'}", file=sys.stderr)
        return hopeless

    def _comes_back(self, ended: Exit) -> bool:
        """Set the time to start a center again that crashed; return whether there is one.

        None after an end in order, nor where a person must mend something, nor in a loop of crashes.
        """
        in_order = ended.code is not None and self._result_file.exists()  # it was asked to stop, or idle
        if ended.clean or in_order or ended.code == MEND:
            return False
        now = time.monotonic()
        self.start_at = now + self.crashes.note(now, self.started_at)
        if self.crashes.looping:
            often = f"{len(self.crashes.times)} times within {self.config.launch.restarts_window_s:g} s"
            print(
                f"the {self.center} crashed {often}, so the run stops; mend it and --resume", file=sys.stderr
            )
        return not self.crashes.looping

    def _start_again(self, launcher: Launcher) -> None:
        """Start a center that crashed, once it is time, from its newest checkpoint; its members train on."""
        if self.start_at is None or time.monotonic() < self.start_at:
            return
        try:
            self._start_center(launcher, resume=True)
        except OSError as error:  # no process or memory to be had now: that may pass
            self.start_at = time.monotonic() + self.config.launch.backoff_s_max
            log.warning("center_not_started name=%s reason=%s", self.center, error)

    def _stop(self, launcher: Launcher) -> None:
        """Members say goodbye first, so that the center's last checkpoint knows what they consumed."""
        for name in [name for name in launcher.running if name in self.members]:
            launcher.kill(name, 15)
        deadline = time.monotonic() + self.config.launch.stop_grace_s / 2
        while any(name in self.members for name in launcher.running) and time.monotonic() < deadline:
            launcher.poll()
            time.sleep(POLL_S)
        launcher.stop()

    def _await_the_rest(self, launcher: Launcher) -> None:
        deadline = time.monotonic() + EVALUATION_S_MAX
        while launcher.running and time.monotonic() < deadline and not launcher.stop_requests:
            launcher.poll()
            time.sleep(POLL_S)


def _newest(out: Path) -> tuple[Path, checkpoint.Manifest | None]:
    """Return the newest checkpoint in a run folder and what it says of itself; its files are not read."""
    found: list[tuple[Path, checkpoint.Manifest]] = []
    for folder in STATES.values():
        for path in (out / folder).glob(f"step-*/{checkpoint.MANIFEST}"):
            # One that is damaged is passed over: the center will say so.
            with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                found.append((path.parent, msgspec.json.decode(path.read_bytes(), type=checkpoint.Manifest)))
    return max(found, key=lambda each: each[1].step, default=(out, None))


@contextmanager
def _put_back_unless_done(*paths: Path) -> Iterator[None]:
    """Give files the content they have now if what is done meanwhile fails."""
    before = {path: path.read_bytes() for path in paths if path.exists()}
    try:
        yield
    except BaseException:
        for path, content in before.items():
            path.write_bytes(content)
        raise


def _exit_of(name: str, exits: list[Exit]) -> Exit | None:
    return next((ended for ended in exits if ended.name == name), None)


def _how(ended: Exit) -> str:
    return f"exit {ended.code}" if ended.signal is None else signal_name(ended.signal)


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))
    temporary.rename(path)
