"""A worker as a training script holds it: its courier, its place in the run, its schedule.

What `Learner` and `Peer` have in common, and the process that trains a built-in model as either.
"""

import logging
import os
import secrets
import signal
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import nn

from ..config import Config, from_settings
from ..errors import ConfigError, DataError, JoinRefused
from ..protocol.gossip import RENDEZVOUS
from ..protocol.messages import SYNCER
from ..runtime.wire import NetworkOptions
from ..train import data, loop, models, optim
from ..train.data import read_journal
from .trainer import Half, Trainer

log = logging.getLogger("archipel")


class Worker:
    """One worker of a run, from its courier's start to its goodbye.

    Entering waits until the run's settings and weights are adopted, for as long as it takes. A process of its
    own (the courier) does all the networking. Raises JoinRefused when the run turns the worker away,
    WorkerDied when the courier is gone.
    """

    def __init__(  # noqa: PLR0913 (each is one thing a user may say, by name)
        self,
        half: Half,
        *,
        role: str,
        home: str,
        name: str = "",
        run: str = "",
        out: str | Path,
        tls: str | Path = "",
        scheduler: Any = None,
        network: NetworkOptions | None = None,
        stopped: Callable[[], str] = lambda: "",
    ) -> None:
        """home: "host:port" of the syncer or the rendezvous. The rest: see `Learner`."""
        self.half = half
        self.name = name_of(name)
        if self.name in (SYNCER, RENDEZVOUS) or Path(self.name).name != self.name:
            raise ConfigError(
                f"worker name {self.name!r}: files are named after it; use no slash, and not 'syncer' or "
                "'rendezvous'"
            )
        self.out = Path(out)
        self.stopped = stopped
        self.arguments = ["--name", self.name, "--role", role, "--home", home, "--run", run]
        self.arguments += ["--out", str(out), "--tls", str(tls)]
        self.arguments += ["--network", msgspec.json.encode(network or NetworkOptions()).decode()]
        self.settings: dict[str, Any] = {}
        self._scheduler = scheduler
        self._scheduled = 0
        self._trainer: Trainer | None = None

    @property
    def journal(self) -> Path:
        """File in which a data stream of archipel notes its position, so that a killed worker's is known."""
        return self.out / "journal" / f"{self.name}.bin"

    def enter(self, model: nn.Module) -> None:
        """Join the run and take over its weights."""
        self.connect()
        if self.done:
            self.trainer.close("")
            raise JoinRefused(f"there was no run to join any more: {self.trainer.reason}")
        self.adopt(model)

    def connect(self) -> dict[str, Any]:
        """Join the run as far as its settings, which are returned. `adopt` does the rest.

        {} if the worker is `done` already: it was stopped, or the run is over.
        """
        position = noted(self.journal)
        self.out.mkdir(parents=True, exist_ok=True)
        self._trainer = Trainer(self.arguments + position, self.half, stopped=self.stopped)
        try:
            self.settings = self._trainer.settings()
            if self._trainer.build is not None:
                correct(self.journal, self.shard, self.position)
        except BaseException:
            self._trainer.close("not admitted")
            raise
        return self.settings

    def adopt(self, model: nn.Module, environment: dict[str, Any] | None = None) -> None:
        """Take over the run's weights and its place in the schedule. environment: for the tape."""
        try:
            self.trainer.adopt(model, environment)
            self._follow_schedule()
        except BaseException:
            self.trainer.close("could not adopt the run's weights")
            raise

    def leave(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        """Say goodbye, with the error that ended the loop if one did."""
        self.trainer.close("" if kind is None else f"{kind.__name__}: {error}"[:200])

    @property
    def trainer(self) -> Trainer:
        """The half of this worker that lives here."""
        if self._trainer is None:
            raise ConfigError("a Learner or Peer works inside `with`: nothing has joined yet")
        return self._trainer

    def step(self, tokens: int) -> None:
        """Say that an optimizer step over `tokens` tokens is done; let what has come land."""
        if tokens < 0:
            raise ConfigError(f"step(tokens={tokens}): a step consumes no negative number of tokens")
        self.trainer.step(tokens)
        self._follow_schedule()

    def _follow_schedule(self) -> None:
        if self._scheduler is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of scheduler steps before an optimizer step
            while self._scheduled < self.tick:
                self._scheduler.step()
                self._scheduled += 1

    @property
    def shard(self) -> int:
        """Number of the part of the data this worker reads; nobody else reads it."""
        build = self.trainer.build
        return build.shard if build is not None else -1

    @property
    def position(self) -> int:
        """Tokens of the shard that were consumed before this worker started."""
        build = self.trainer.build
        return build.position if build is not None else 0

    @property
    def step_count(self) -> int:
        """Inner steps of this worker."""
        return self.trainer.step_count

    @property
    def tick(self) -> int:
        """The run's global step, as far as heard: what learning rate schedules follow."""
        return self.trainer.tick

    @property
    def done(self) -> bool:
        """Whether the run is over."""
        return self.trainer.done


def name_of(name: str) -> str:
    """Return a worker's name: what it was given, or one that nobody else has."""
    return name or f"{socket.gethostname()}-{secrets.token_hex(3)}"


def noted(journal: Path) -> list[str]:
    """Return the courier's arguments for the data position in a journal; none where nothing is known."""
    if not journal.exists():
        return []
    try:
        entry = read_journal(journal)
    except DataError as error:
        log.warning("journal unusable path=%s reason=%r: the run says where to start", journal, str(error))
        return []
    return ["--shard", str(entry.shard), "--position", str(entry.position)]


def correct(journal: Path, shard: int, position: int) -> None:
    """Note in a journal that is there already where the run says that this worker's data starts.

    Until the data stream opens it, it may be of an older run; a worker that died meanwhile would name that
    position at its next start, and what lies between would count as lost.
    """
    if shard >= 0 and journal.exists():
        data.Journal(journal, shard, position)


# ---- the process with a built-in model ----


def agreed(config: Config, settings: dict[str, Any]) -> Config:
    """Return our configuration with the run's settings in it; only what is local to this host stays ours.

    Local are folders, and how much a step computes at once: a slow or small host may take a smaller batch.
    """
    theirs = from_settings(settings)
    local = {"path": config.data.path or theirs.data.path, "cache": config.data.cache}
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(theirs.run, out=config.run.out),
        sync=theirs.sync,
        gossip=theirs.gossip,
        model=theirs.model,
        data=msgspec.structs.replace(theirs.data, batch=config.data.batch, **local),
        optimizer=msgspec.structs.replace(theirs.optimizer, accumulate=config.optimizer.accumulate),
    )


def load_data(config: Config, settings: dict[str, Any]) -> data.TokenData | data.ImageData:
    """Return the data on this host. DataError if it is not what the run's learners share out among them."""
    corpus = data.load(config.data)
    entries = config.model.classes if config.model.kind == "vit" else config.model.vocabulary
    if corpus.vocabulary > entries:
        raise DataError(
            f"the data here has {corpus.vocabulary} entries, the run's model {entries}: "
            "prepare it with the run's tokenizer"
        )
    theirs = settings.get("data_digest", "")
    if theirs and corpus.digest != theirs:
        raise DataError(
            f"the data here has the digest {corpus.digest}, the run's {theirs}: shards of different data "
            "would overlap; copy the run's token file here and name it with data.path (the default corpus, "
            "the text of this Python's standard library, differs between its versions)"
        )
    return corpus


def device_of(name: str) -> torch.device:
    """Return "cpu", "cuda" or "cuda:N" as a device; N goes round. ConfigError where there is no GPU."""
    kind, _, index = name.partition(":")
    if kind != "cuda":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {name!r}: torch {torch.__version__} sees no GPU here; use cpu or install another"
        )
    return torch.device("cuda", int(index or 0) % torch.cuda.device_count())


Prepare = Callable[[Config, nn.Module, torch.optim.Optimizer, Any], None]  # the last: the data


def train(
    config: Config,
    worker: Worker,
    *,
    threads: int = 0,
    nice: int = 0,
    device: str = "cpu",
    prepare: Prepare | None = None,
) -> None:
    """Join the run, build its model, and train on this worker's shard until told to stop.

    nice: how far to stand back, without the courier, for whoever shares the cores. prepare: called with what
    was built, before its weights become the run's.
    """
    if threads:
        torch.set_num_threads(threads)
    placed = device_of(device)
    worker.stopped = StopFlag()
    settings = worker.connect()
    os.nice(nice)
    with Parting(worker):
        if not worker.done:
            _train(agreed(config, settings), worker, placed, prepare)


def steps_of(config: Config) -> int:
    """Return how many ticks the run is planned for: what learning rate schedules span."""
    gossip = config.gossip
    return config.sync.steps if gossip is None else gossip.rounds * gossip.local_steps


def _train(config: Config, worker: Worker, device: torch.device, prepare: Prepare | None) -> None:
    corpus = load_data(config, worker.settings)
    model = models.build(config.model).to(device)
    inner = optim.build(model, config.optimizer, steps_of(config))
    if prepare is not None:
        prepare(config, model, inner[0], corpus)
    # What this host may choose by itself: a replay follows it, and knows by it that the loop was this one.
    worker.adopt(model, {"batch": config.data.batch, "accumulate": config.optimizer.accumulate})
    worker.journal.parent.mkdir(parents=True, exist_ok=True)
    stream = corpus.stream(worker.shard, worker.position, worker.journal)
    metrics = Metrics(worker.out / "metrics.jsonl", worker)
    loop.run(
        model, stream, worker, config.optimizer, batch=config.data.batch, inner=inner, watch=metrics.note
    )


class Parting:
    """Closes a worker that was entered in two steps, with the reason."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.leave(kind, error)


class StopFlag:
    """Returns why to stop once SIGTERM or Ctrl-C came: the step under way still ends in order.

    A second signal does what it does without us.
    """

    def __init__(self) -> None:
        self.reason = ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def __call__(self) -> str:
        return self.reason

    def _note(self, number: int, frame: Any) -> None:
        self.reason = signal.Signals(number).name
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


class Metrics:
    """Appends one line a second to a run's `metrics.jsonl`; lines of several processes do not mix."""

    EVERY_S = 1.0

    def __init__(self, path: Path, worker: Worker) -> None:
        self._path, self._worker = path, worker
        self._written_at = 0.0

    def note(self, step: int, loss: float, tokens: int) -> None:
        """Take one step's loss."""
        if time.monotonic() - self._written_at >= self.EVERY_S:
            self._written_at = time.monotonic()
            self.write(kind="train", step=step, tick=self._worker.tick, loss=loss)

    def write(self, **values: Any) -> None:
        """Append one line now."""
        line = msgspec.json.encode({"time": time.time(), "worker": self._worker.name, **values}) + b"\n"
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:  # a full disk is no reason to stop training
            log.warning("metrics not written path=%s reason=%r", self._path, str(error))
