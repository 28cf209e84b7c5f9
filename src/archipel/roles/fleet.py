"""A whole run on one machine: a syncer, M learners and an evaluator as processes, watched from here.

The launcher's process owns no protocol: it starts the same programs that `archipel syncer` and `archipel learner`
start, follows the syncer's tape for the view, kills whom a plan says, and sums the run up when the syncer has ended.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .. import config as configuration
from ..dashboard.collect import Series, longest_pause
from ..dashboard.terminal import View
from ..errors import ArchipelError, WorkerDied
from ..protocol.ledger import FATES
from ..protocol.messages import Tally
from ..runtime.launch import Launcher, WorkerProgram, available_cores, threads_per_worker
from ..tape.tape import TapeTail, read, workers
from ..train.data import read_journal

START_S_MAX = 60.0  # for the syncer to listen
POLL_S = 0.1
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

    def __post_init__(self) -> None:
        self.series = Series(self.config.sync.quorum)

    def run(self) -> dict[str, Any]:
        """Run to the end and return the summary, which is also left in `summary.json`."""
        began = time.monotonic()
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "config.toml").write_text(configuration.dump(self.config))
        with Launcher(self.out, self.config.launch) as launcher:
            launcher.install_signal_handlers()
            address = self._start_syncer(launcher)
            self._start_workers(launcher, address)
            self._watch(launcher)
            self._await_evaluator(launcher)
        summary = summarise(self.out, self.config, len([kill for kill in self.kills if kill.done]))
        summary["seconds"] = round(time.monotonic() - began, 3)
        _write_json(self.out / "summary.json", summary)
        return summary

    # ---- starting ----

    def _program(self, name: str, command: list[str], *, threads: int = 1, restart: bool = True) -> WorkerProgram:
        argv = (sys.executable, "-m", "archipel", *command, "--out", str(self.out))
        if self.tls:
            argv += ("--tls", self.tls)
        return WorkerProgram(name, argv, restart=restart, threads=threads)

    def _start_syncer(self, launcher: Launcher) -> str:
        address_file = self.out / "address"
        address_file.unlink(missing_ok=True)
        command = ["syncer", str(self.out / "config.toml"), "--listen", "127.0.0.1:0"]
        command += ["--address-file", str(address_file)]
        command += ["--resume"] if self.resume else []
        command += ["--init", self.init] if self.init else []
        launcher.start(self._program("syncer", command, restart=False))
        deadline = time.monotonic() + START_S_MAX
        while not address_file.exists():
            for ended in launcher.poll():
                raise WorkerDied(f"the syncer did not start (exit {ended.code}):\n{ended.log_tail}")
            if time.monotonic() > deadline:
                raise WorkerDied(f"the syncer did not listen within {START_S_MAX:.0f} s: see {self.out}/logs/syncer.log")
            time.sleep(POLL_S)
        return address_file.read_text()

    def _start_workers(self, launcher: Launcher, address: str) -> None:
        learners = self.config.sync.learners
        threads = threads_per_worker(available_cores(), learners)
        for number in range(learners):
            name = f"learner-{number}"
            command = ["learner", str(self.out / "config.toml"), "--syncer", address, "--name", name]
            launcher.start(self._program(name, command, threads=threads))
        command = ["evaluator", str(self.out / "config.toml"), "--syncer", address]
        launcher.start(self._program("evaluator", command))

    # ---- watching ----

    def _watch(self, launcher: Launcher) -> None:
        tape = TapeTail(next(file.path for file in workers(self.out)[::-1] if file.worker == "syncer"))
        if tape.header is not None:
            self.series.mirror(tape.header)
        with View(self.series) as view:
            while "syncer" in launcher.running:
                self._look(launcher, tape, view)
                time.sleep(POLL_S)
                if launcher.stop_requests:
                    self._stop(launcher)
                    break
            self._look(launcher, tape, view)

    def _look(self, launcher: Launcher, tape: TapeTail, view: View) -> None:
        self.series.take_all(tape.poll())
        for ended in launcher.poll():
            if ended.crash_looping or (ended.name == "syncer" and not ended.clean):
                print(f"{ended.name} ended (exit {ended.code}):\n{ended.log_tail}", file=sys.stderr)
        for kill in self.kills:
            if not kill.done and self.series.tick >= kill.tick:
                kill.done = launcher.kill(kill.worker)
        losses = validation_losses(self.out)
        if losses:
            self.series.val_loss_first, self.series.val_loss = losses[0], losses[-1]
        if not self.quiet:
            view.update(time.monotonic())

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


def validation_losses(out: Path) -> list[float]:
    """Return the validation losses of a run so far, in order."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    lines = (json.loads(line) for line in path.read_text().splitlines() if '"kind":"validation"' in line)
    return [line["loss"] for line in lines]


def summarise(out: Path, config: configuration.Config, kills: int) -> dict[str, Any]:
    """Return a finished run's figures, from what its processes left behind."""
    facts = _read_facts(out)
    records = [record for file in workers(out) if file.worker == "syncer" for record in read(file.path)]
    pause = longest_pause(records, config.sync.quorum)
    windows = [
        action.window_s
        for record in records
        if pause.at_s <= record.t <= pause.at_s + pause.longest_pause_s
        for action in record.actions
        if isinstance(action, Tally)
    ]
    losses = validation_losses(out)
    tokens = facts.get("tokens", {})
    consumed = consumed_by_data(out, facts, config.sync.fragments)
    return {
        "complete": facts.get("complete", False),
        "rounds": facts.get("rounds", pause.rounds),
        "val_loss_first": losses[0] if losses else None,
        "val_loss_last": losses[-1] if losses else None,
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
        "run_dir": str(out),
    }


def _read_facts(out: Path) -> dict[str, Any]:
    path = out / "syncer.json"
    if not path.exists():
        raise ArchipelError(f"the syncer left no result: see {out}/logs/syncer.log")
    return json.loads(path.read_text())


def consumed_by_data(out: Path, facts: dict[str, Any], fragments: int) -> int:
    """Return the tokens that the learners' data streams drew, once per fragment, by their journals.

    A learner that died and never came back may have drawn more than it reported: that is added to its lost tokens.
    """
    drawn = 0
    tokens = facts.get("tokens", {})
    for path in sorted((out / "journal").glob("*.bin")):
        entry = read_journal(path)
        drawn += entry.position
        unseen = entry.position - facts.get("positions", {}).get(path.stem, 0)
        if unseen > 0 and path.stem in tokens.get("tail_unknown", {}):
            tokens["lost"] += unseen * fragments
            tokens["tail_unknown"].pop(path.stem)
    return drawn * fragments


def closes(summary: dict[str, Any]) -> bool:
    """Return whether every token that was drawn has a fate."""
    tokens = summary["tokens"]
    return tokens["consumed"] == sum(tokens[fate] for fate in FATES)


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))
    temporary.rename(path)
