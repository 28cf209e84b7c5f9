"""A whole run on one machine: a syncer, M learners and an evaluator as processes, watched from here.

The launcher's process owns no protocol: it starts the same programs that `archipel syncer` and `archipel
learner` start, follows the syncer's tape for the view, kills whom a plan says, starts a syncer that was
killed again from its newest checkpoint, and sums the run up when the syncer has ended.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .. import config as configuration
from ..dashboard.collect import Series, longest_pause
from ..dashboard.terminal import View
from ..errors import WorkerDied
from ..protocol.ledger import FATES
from ..protocol.messages import Tally
from ..runtime.launch import Exit, Launcher, WorkerProgram, available_cores, signal_name, threads_per_worker
from ..tape.record import Record
from ..tape.tape import TapeTail, read, workers
from ..train.data import read_journal

THIN_SHARE = 0.5  # of a learner's tokens: if fewer are merged, a warning
START_S_MAX = 60.0  # for the syncer to listen
POLL_S = 0.1
# Where trainers share cores with syncer and couriers, a report or an update must not wait for a step to end.
LEARNER_NICE, EVALUATOR_NICE = 5, 10
EVALUATION_S_MAX = 60.0  # for the last evaluation after the run has ended


@dataclass
class Kill:
    """SIGKILL this learner once the run has reached this tick."""

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
    series: Series = field(init=False)
    losses: "Losses" = field(init=False)
    address: str = ""  # of the syncer, once it listens
    given_up: set[str] = field(default_factory=set)  # workers that crashed too often
    revivals: int = 0  # of the syncer

    def __post_init__(self) -> None:
        self.series = Series(self.config.sync.quorum)
        self.losses = Losses(self.out / "metrics.jsonl")

    def run(self) -> dict[str, Any]:
        """Run to the end and return the summary, which is also left in `summary.json`."""
        began = time.monotonic()
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "config.toml").write_text(configuration.dump(self.config))
        with Launcher(self.out, self.config.launch) as launcher:
            launcher.install_signal_handlers()
            (self.out / "syncer.json").unlink(missing_ok=True)  # of the time before a resume
            self._start_syncer(launcher, resume=self.resume)
            self._start_workers(launcher, self.address)
            if self._watch(launcher):
                self._await_evaluator(launcher)
        summary = summarise(self.out, self.config, len([kill for kill in self.kills if kill.done]))
        summary["seconds"] = round(time.monotonic() - began, 3)
        _write_json(self.out / "summary.json", summary)
        return summary

    # ---- starting ----

    def _program(
        self, name: str, command: list[str], *, threads: int = 1, restart: bool = True
    ) -> WorkerProgram:
        argv = (sys.executable, "-m", "archipel", *command, "--out", str(self.out))
        if self.tls:
            argv += ("--tls", self.tls)
        return WorkerProgram(name, argv, restart=restart, threads=threads)

    def _start_syncer(self, launcher: Launcher, *, resume: bool) -> None:
        """Start a syncer, where it was before if it was, and return when it listens."""
        address_file = self.out / "address"
        address_file.unlink(missing_ok=True)
        command = ["syncer", str(self.out / "config.toml"), "--listen", self.address or "127.0.0.1:0"]
        command += ["--address-file", str(address_file)]
        command += ["--resume"] if resume else []
        command += ["--init", str(Path(self.init).resolve())] if self.init else []
        launcher.start(self._program("syncer", command, restart=False))
        deadline = time.monotonic() + START_S_MAX
        while not address_file.exists():
            if "syncer" not in launcher.running and (ended := _exit_of("syncer", launcher.poll())):
                raise WorkerDied(f"the syncer did not start ({_how(ended)}):\n{ended.log_tail}")
            if launcher.stop_requests:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                log = launcher.log_path("syncer")
                raise WorkerDied(f"the syncer did not listen within {START_S_MAX:.0f} s: see {log}")
            time.sleep(POLL_S)
        self.address = address_file.read_text()

    def _start_workers(self, launcher: Launcher, address: str) -> None:
        learners = self.config.sync.learners
        threads = threads_per_worker(available_cores(), learners)
        for number in range(learners):
            name = f"learner-{number}"
            command = ["learner", str(self.out / "config.toml"), "--syncer", address, "--name", name]
            command += ["--nice", str(LEARNER_NICE)]
            if self.config.launch.device == "cuda":
                command += ["--device", f"cuda:{number}"]
            launcher.start(self._program(name, command, threads=threads))
        command = ["evaluator", str(self.out / "config.toml"), "--syncer", address]
        command += ["--nice", str(EVALUATOR_NICE)]
        command += [] if self.resume or self.init else ["--fresh"]
        launcher.start(self._program("evaluator", command))

    # ---- watching ----

    def _watch(self, launcher: Launcher) -> bool:
        """Follow the run until its syncer has ended; return whether it reached the run's end."""
        tape = self._syncer_tape()
        with View(self.series) as view:
            while True:
                died = self._look(launcher, tape, view)
                if launcher.stop_requests or self._hopeless():
                    self._stop(launcher)
                    self._look(launcher, tape, view)
                    return False
                if "syncer" not in launcher.running:
                    self.series.take_all(tape.poll())
                    if died is None or not self._revive(launcher, died):
                        return died is not None and died.clean
                    tape = self._syncer_tape()
                time.sleep(POLL_S)

    def _syncer_tape(self) -> TapeTail:
        tape = TapeTail(next(file.path for file in workers(self.out)[::-1] if file.worker == "syncer"))
        if tape.header is not None:
            self.series.mirror(tape.header)
        return tape

    def _look(self, launcher: Launcher, tape: TapeTail, view: View) -> Exit | None:
        """Take in what happened since the last look; return the syncer's end, if it ended."""
        self.series.take_all(tape.poll())
        exits = launcher.poll()
        for ended in exits:
            if ended.crash_looping:
                self.given_up.add(ended.name)
            if ended.crash_looping or (ended.name == "syncer" and not ended.clean):
                print(f"{ended.name} ended ({_how(ended)}):\n{ended.log_tail}", file=sys.stderr)
        for kill in self.kills:
            if not kill.done and self.series.tick >= kill.tick:
                kill.done = launcher.kill(kill.worker)
        self.losses.poll()
        self.series.val_loss_first, self.series.val_loss = self.losses.first, self.losses.last
        if not self.quiet:
            view.update(time.monotonic())
        return _exit_of("syncer", exits)

    def _hopeless(self) -> bool:
        """Whether every learner crashed too often: nobody would ever train again."""
        return {f"learner-{number}" for number in range(self.config.sync.learners)} <= self.given_up

    def _revive(self, launcher: Launcher, ended: Exit) -> bool:
        """Start a syncer that was killed again, from its newest checkpoint; its learners train meanwhile."""
        if ended.signal is None or self.revivals >= self.config.launch.restarts_max:
            return False
        self.revivals += 1
        self._start_syncer(launcher, resume=True)
        return True

    def _stop(self, launcher: Launcher) -> None:
        """Learners say goodbye first, so that the syncer's last checkpoint knows what they consumed."""
        for name in [name for name in launcher.running if name.startswith("learner-")]:
            launcher.kill(name, 15)
        deadline = time.monotonic() + self.config.launch.stop_grace_s / 2
        while any(name.startswith("learner-") for name in launcher.running) and time.monotonic() < deadline:
            launcher.poll()
            time.sleep(POLL_S)
        launcher.stop()

    def _await_evaluator(self, launcher: Launcher) -> None:
        deadline = time.monotonic() + EVALUATION_S_MAX
        while launcher.running and time.monotonic() < deadline and not launcher.stop_requests:
            launcher.poll()
            time.sleep(POLL_S)


def _exit_of(name: str, exits: list[Exit]) -> Exit | None:
    return next((ended for ended in exits if ended.name == name), None)


def _how(ended: Exit) -> str:
    return f"exit {ended.code}" if ended.signal is None else signal_name(ended.signal)


class Losses:
    """The first and the newest validation loss of a run, read from its metrics as they grow."""

    def __init__(self, path: Path) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self._path = path
        self._read = 0  # bytes taken in, up to the end of a line

    def poll(self) -> None:
        """Take in the lines that came since the last call."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            if b'"kind":"validation"' in line:
                with contextlib.suppress(msgspec.DecodeError):  # torn by a machine that lost power
                    self._take(msgspec.json.decode(line))

    def _take(self, line: dict[str, Any]) -> None:
        self.last = line["loss"]
        self.first = self.last if self.first is None else self.first


def summarise(out: Path, config: configuration.Config, kills: int) -> dict[str, Any]:
    """Return a finished run's figures, from what its processes left behind."""
    facts = _read_facts(out)
    pause = longest_pause(_records(out), config.sync.quorum)
    windows = [
        action.window_s
        for record in _records(out)
        if pause.at_s <= record.t <= pause.at_s + pause.longest_pause_s
        for action in record.actions
        if isinstance(action, Tally)
    ]
    losses = Losses(out / "metrics.jsonl")
    losses.poll()
    tokens = facts.get("tokens", {})
    consumed = consumed_by_data(out, facts, config.sync.fragments)
    return {
        "complete": facts.get("complete", False),
        "rounds": facts.get("rounds", pause.rounds),
        "val_loss_first": losses.first,
        "val_loss_last": losses.last,
        "learners": config.sync.learners,
        "kills": kills,
        "longest_pause_s": round(pause.longest_pause_s, 4),
        "grace_cap_s": round(max(windows, default=0.0), 4),
        "step_s": pause.pause_step_s or pause.step_s,
        "tokens": {"consumed": consumed, **{fate: tokens.get(fate, 0) for fate in FATES}},
        "tokens_per_learner": tokens.get("per_learner", {}),
        "tokens_per_fragment": tokens.get("per_fragment", []),
        "tail_unknown": tokens.get("tail_unknown", {}),
        "digest": facts.get("digest", ""),
        "warnings": thin_shares(tokens.get("per_learner", {})),
        "run_dir": str(out),
    }


def thin_shares(per_learner: dict[str, dict[str, int]]) -> list[str]:
    """Return a warning for each learner less than half of whose tokens were merged (section 3)."""
    return [
        f"{name}: {fates['merged'] / fates['consumed']:.0%} of its tokens were merged: it is slow beside "
        "the others; give it a smaller data.batch"
        for name, fates in per_learner.items()
        if fates["consumed"] and fates["merged"] < THIN_SHARE * fates["consumed"]
    ]


def _records(out: Path) -> Iterator[Record]:
    """Yield what the run's syncers recorded."""
    return (record for file in workers(out) if file.worker == "syncer" for record in read(file.path))


def _read_facts(out: Path) -> dict[str, Any]:
    path = out / "syncer.json"
    if not path.exists():
        raise WorkerDied(
            f"the syncer left no result: see {out}/logs/syncer.log; --resume goes on from its checkpoint"
        )
    facts: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return facts


def consumed_by_data(out: Path, facts: dict[str, Any], fragments: int) -> int:
    """Return the tokens that the learners' data streams drew, once per fragment, by their journals.

    A learner that died and never came back may have drawn more than it reported: that is added to its lost
    tokens.
    """
    drawn = 0
    tokens = facts.get("tokens", {})
    for path in sorted((out / "journal").glob("*.bin")):
        entry = read_journal(path)
        drawn += entry.position
        unseen = entry.position - facts.get("positions", {}).get(path.stem, 0)
        if unseen > 0 and path.stem in tokens.get("tail_unknown", {}):
            _add_lost(tokens, path.stem, unseen)
    return drawn * fragments


def _add_lost(tokens: dict[str, Any], worker: str, tail: int) -> None:
    """A dead learner drew `tail` tokens after its last report: they are lost, on every fragment."""
    tokens["tail_unknown"].pop(worker)
    for row in tokens["per_fragment"]:
        row["lost"] += tail
    share = tail * len(tokens["per_fragment"])
    tokens["lost"] += share
    tokens["per_learner"][worker]["lost"] += share
    tokens["per_learner"][worker]["consumed"] += share


def closes(summary: dict[str, Any]) -> bool:
    """Return whether every token that was drawn has a fate."""
    tokens = summary["tokens"]
    return tokens["consumed"] == sum(tokens[fate] for fate in FATES)


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))
    temporary.rename(path)
