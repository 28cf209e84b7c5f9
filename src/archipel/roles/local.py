"""All workers in one process: compute ports with tensors, for the simulator and for replay.

The same model, data, codecs and merges as in a live run, without processes, shared memory or sockets. A
learner's port takes the tick its learning rate follows from whoever drives it: the engine's virtual clock, or
the tape.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ..config import Config, from_tree, override
from ..errors import PayloadError, TapeError
from ..numerics import codec
from ..protocol import messages as m
from ..runtime.courier import round_as_held
from ..runtime.frames import Rounded
from ..tape.record import Header, Record
from ..tape.replay import Ports, follow, in_order
from ..tape.tape import digest as tape_digest
from ..tape.tape import read, workers
from ..train import data, models, optim
from ..train.compute import FragmentState, OuterState
from ..train.evaluate import evaluate
from ..train.options import ModelOptions, fit
from ..train.parameters import Parameters
from .syncer import initial_weights

Said = Callable[[m.Event], None]
Corpus = data.TokenData | data.ImageData


def unheard(event: m.Event) -> None:
    """For ports whose driver knows already what will come of its requests."""


class LocalLearner:
    """A learner's tensors. `config`: of the run, with what an ablation changes in it."""

    def __init__(self, config: Config, corpus: Corpus, said: Said = unheard) -> None:
        self._config, self._corpus, self._said = config, corpus, said
        self._watched: tuple[int, ...] = ()
        self._copies: dict[int, np.ndarray] = {}
        self._bases: dict[int, np.ndarray] = {}
        self._residuals: dict[int, np.ndarray] = {}
        self.loss = float("nan")

    def prepare(self, settings: dict[str, Any], shard: int, position: int) -> None:
        """Build model, optimizer and data stream; say what is synchronised."""
        config = self._config
        self.model = models.build(config.model)
        self._parameters = Parameters(self.model, config.sync)
        self._rounded = tuple(Rounded(*part) for part in self._parameters.rounded())  # type: ignore[arg-type]
        self._stream = self._corpus.stream(shard, position)
        self._optimizer, self._schedule = optim.build(self.model, config.optimizer, config.sync.steps)
        self._said(m.Prepared(self._parameters.schema))

    @property
    def position(self) -> int:
        """Tokens of the shard drawn so far."""
        return self._stream.position

    def step(self, number: int, tick: int, rows: int | None = None) -> tuple[int, tuple[int, ...]]:
        """Take inner step `number` at the learning rate of `tick`; return its tokens and what was copied.

        rows: windows or images of this step, where a driver knows better than `data.batch`: a batch may
        change at any step, the data stream goes on where it stands.
        """
        config = self._config
        batch = self._stream.next(config.data.batch if rows is None else rows)
        self.loss, tokens = optim.inner_step(
            self.model, self._optimizer, batch, options=config.optimizer, lr=self._schedule(tick)
        )
        for fragment in self._watched:
            copy = self._copies.setdefault(fragment, np.empty(self._parameters.numels[fragment], np.float32))
            self._parameters.read(fragment, copy)
        return tokens, self._watched

    def copy(self, fragments: tuple[int, ...]) -> None:
        """Copy these fragments at the end of each step from now on."""
        self._watched = fragments

    def snapshot(self, fragment: int, step: int, *, full: bool) -> np.ndarray:
        """Return the newest copy of a fragment as a push carries it."""
        sync, local = self._config.sync, self._copies[fragment]
        if full:
            return codec.encode("float32", local, sync.codec_block)
        residual = None
        if sync.error_feedback:
            residual = self._residuals.setdefault(fragment, np.zeros(local.size, np.float32))
        return codec.encode_difference(
            sync.push_codec, self._bases[fragment], local, sync.codec_block, residual=residual
        )

    def apply(self, fragment: int, version: int, payload: Any) -> None:
        """Write an update over a fragment."""
        sync = self._config.sync
        weights = codec.decode(
            sync.update_codec, payload, self._parameters.numels[fragment], sync.codec_block
        )
        self._parameters.write(fragment, weights)
        round_as_held(fragment, weights, self._rounded)
        self._bases[fragment] = weights


class LocalSyncer:
    """The syncer's tensors. `merged`: told of each merge, (fragment, version)."""

    def __init__(
        self, outer: OuterState, said: Said = unheard, merged: Callable[[int, int], None] | None = None
    ) -> None:
        self.outer, self._said, self._merged = outer, said, merged
        self.saved: list[FragmentState] | None = None

    def fold(self, action: m.Fold, payload: Any) -> None:
        """Check a push and add it to its round."""
        try:
            self.outer.fold(action.fragment, payload, action.weight, base=action.base, full=action.full)
        except PayloadError as error:
            self._said(m.Rejected(action.fragment, action.worker, str(error)))
        else:
            self._said(m.Folded(action.fragment, action.worker))

    def merge(self, fragment: int, version: int) -> None:
        """Take the outer step of a round."""
        try:
            self.outer.merge(fragment, version)
        except PayloadError as error:
            self._said(m.MergeFailed(fragment, str(error)))
            return
        if self._merged is not None:
            self._merged(fragment, version)
        self._said(m.Merged(fragment, version, self.outer.fragment_digest(fragment)))

    def discard(self, fragment: int) -> None:
        """Forget what was folded."""
        self.outer.discard(fragment)

    def payload(self, fragment: int, version: int) -> np.ndarray:
        """Return a version as an update carries it."""
        return self.outer.update(fragment, version)

    def save(self, round: int) -> None:
        """Keep the tensors as they are now, for a syncer that is started again."""
        self.saved = list(self.outer.states)

    def restore(self) -> None:
        """Go back to what was saved last."""
        if self.saved is not None:
            self.outer.states = list(self.saved)
        for fragment in range(len(self.outer.states)):
            self.outer.discard(fragment)


# ---- replaying a run ----


class Replayed(msgspec.Struct, frozen=True):
    """What `archipel replay` reports. `first_difference`: the first merge whose weights came out
    otherwise."""

    equal: bool
    digest: str
    recorded_digest: str
    tape_digest: str
    records: int
    first_difference: dict[str, Any] | None
    conditions: list[str]  # of the recorded run that do not hold here
    val_loss: float | None
    seconds: float


def replay(
    run_dir: Path,
    overrides: list[str],
    *,
    progress: Callable[[int], None] | None = None,
    evaluated: bool = False,
) -> Replayed:
    """Carry out a run's recorded decisions with real tensors; with overrides, an ablation under the same
    storm."""
    began = time.monotonic()
    header = _syncer_header(run_dir)
    config = _config_of(header, overrides)
    environments = learner_environments(run_dir)
    torch.set_num_threads(max((env["threads"] for env in environments), default=1))
    corpus = data.load(config.data)
    schema, weights, model = initial_weights(config, header.environment.get("init", ""))
    config = msgspec.structs.replace(config, model=model)
    outer = OuterState(schema, config.sync)
    outer.begin(weights)
    checker = _Checker(run_dir, outer)
    ports = Ports(lambda worker: LocalLearner(config, corpus), LocalSyncer(outer, merged=checker.merged))
    follower = follow(_counted(in_order(run_dir), progress), ports)
    return Replayed(
        equal=checker.first is None and outer.digest() == checker.final,
        digest=outer.digest(),
        recorded_digest=checker.final,
        tape_digest=tape_digest(run_dir),
        records=follower.records,
        first_difference=checker.first,
        conditions=differing_conditions(environments),
        val_loss=_loss(outer, config.model, config, corpus) if evaluated or overrides else None,
        seconds=round(time.monotonic() - began, 3),
    )


def _syncer_header(run_dir: Path) -> Header:
    tapes = [file for file in workers(run_dir) if file.worker == m.SYNCER]
    if len(tapes) != 1:
        raise TapeError(
            f"{run_dir} has {len(tapes)} syncer tapes: a run can be followed from its beginning, in one "
            "piece; `--verify-only` works on any"
        )
    tape = read(tapes[0].path)
    next(iter(tape), None)
    assert tape.header is not None
    return tape.header


def _config_of(header: Header, overrides: list[str]) -> Config:
    sections = ("run", "sync", "model", "data", "optimizer")
    tree = {name: dict(header.settings[name]) for name in sections if name in header.settings}
    for text in overrides:
        override(tree, text)
    return from_tree(tree)


def learner_environments(run_dir: Path) -> list[dict[str, Any]]:
    """Return what each learner's process said of itself: torch version, threads, CPU capability."""
    found = []
    for file in workers(run_dir):
        if file.worker != m.SYNCER:
            events = (record.event for record in read(file.path))
            prepared = next((event for event in events if isinstance(event, m.Prepared)), None)
            if prepared is not None and prepared.environment:
                found.append(prepared.environment)
    return found


def differing_conditions(environments: list[dict[str, Any]]) -> list[str]:
    """Return what recorded processes had otherwise than this one, of what can change a bit of a result."""
    here = {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    recorded = {(name, env.get(name)) for env in environments for name in here}
    return [
        f"{name}: recorded {value!r}, here {here[name]!r}"
        for name, value in sorted(recorded, key=str)
        if value != here[name]
    ]


class _Checker:
    """Compares each merge with the digest that the live run put on its tape."""

    def __init__(self, run_dir: Path, outer: OuterState) -> None:
        self.first: dict[str, Any] | None = None
        self.final = ""
        self._outer = outer
        self._recorded: dict[tuple[int, int], str] = {}
        for record in read(next(f.path for f in workers(run_dir) if f.worker == m.SYNCER)):
            if isinstance(record.event, m.Merged):
                event = record.event
                self._recorded[event.fragment, event.version] = event.digest
        facts = run_dir / "syncer.json"
        if facts.exists():
            self.final = msgspec.json.decode(facts.read_bytes())["digest"]

    def merged(self, fragment: int, version: int) -> None:
        recorded = self._recorded.get((fragment, version))
        found = self._outer.fragment_digest(fragment)
        if self.first is None and recorded is not None and recorded != found:
            self.first = {"fragment": fragment, "version": version, "recorded": recorded, "replayed": found}


def _counted(
    records: Iterator[tuple[str, Record]], progress: Callable[[int], None] | None
) -> Iterator[tuple[str, Record]]:
    for count, item in enumerate(records):
        if progress is not None and count % 256 == 0:
            progress(count)
        yield item


def _loss(outer: OuterState, options: ModelOptions, config: Config, corpus: Corpus) -> float:
    model = models.build(fit(options, config.data, corpus.vocabulary))
    state = {name: torch.from_numpy(array) for name, array in outer.tensors().items()}
    model.load_state_dict(state, strict=False)
    return evaluate(model, corpus.validation(config.evaluate.batches, config.evaluate.batch)).loss
