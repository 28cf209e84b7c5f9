"""The compute ports of a replay: what `tape.follow` drives, made from what the tapes say of each process.

A learner gets back what its host chose for it (threads, micro-batches, device); the syncer gets back, when it
was started again, the versions that its checkpoint held. Each merge is compared with the digest that was
recorded.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from ..config import Config
from ..errors import PayloadError, TapeError
from ..protocol import messages as m
from ..tape.follow import Start
from ..train import data
from ..train.compute import FragmentState, OuterState
from .ablation import ablated
from .local import Corpus, LocalLearner, compute_on
from .syncer import initial_weights

Key = tuple[int, int, int]  # epoch, fragment, version
PARTS = ("weights", "momentum", "before")


class Difference(msgspec.Struct, frozen=True):
    """The first merge whose weights came out otherwise. Version 0: the initial weights."""

    epoch: int
    fragment: int
    version: int
    recorded: str
    replayed: str


class SyncerAt(msgspec.Struct):
    """Where a followed syncer stands; its tensors stand apart."""

    number: int = -1  # of the process that runs
    epoch: int = 0
    compared: int = 0  # merges with a recorded digest
    first: Difference | None = None
    versions: list[int] = []
    kept: list[Key] = []


@dataclass
class FollowedSyncer:
    """The syncer's tensors through all its processes."""

    begun: tuple[Start, ...]
    overrides: list[str]
    at: SyncerAt = field(default_factory=SyncerAt)
    kept: dict[Key, FragmentState] = field(default_factory=dict)  # that a later process begins with
    outer: OuterState = field(init=False)

    def __post_init__(self) -> None:
        self._needed = {
            (start.epoch, fragment, version)
            for start in self.begun
            for fragment, version in enumerate(start.versions)
        }
        header = self.begun[0].header
        schema, self._initial, self._model = initial_weights(
            self._ablated(0), header.environment.get("init", "")
        )
        self.schema = schema
        self._open(0)

    @property
    def config(self) -> Config:
        """Return the configuration of the process that runs, its model fitted to the data."""
        return msgspec.structs.replace(self._ablated(max(self.at.number, 0)), model=self._model)

    def _ablated(self, number: int) -> Config:
        return ablated(self.begun[number].header.settings, self.overrides)

    def _open(self, number: int) -> None:
        self.outer = OuterState(self.schema, self._ablated(number).sync)

    def start(self, number: int) -> None:
        """Begin with the initial weights, or with what the checkpoint of an earlier process held."""
        assert number < len(self.begun), "a process without a tape"
        compute_on(1)
        self._open(number)
        start = self.begun[number]
        self.at.number, self.at.epoch = number, start.epoch + 1
        if number == 0:
            self.outer.begin(self._initial)
            self._initial = {}
            self._compare(0, 0, start.header.environment.get("weights", ""), self.outer.digest())
        else:
            self.outer.states = [self._held(start.epoch, *part) for part in enumerate(start.versions)]
        for fragment in range(len(self.outer.states)):
            self._keep(fragment)

    def _held(self, epoch: int, fragment: int, version: int) -> FragmentState:
        state = self.kept.get((epoch, fragment, version))
        if state is None:
            raise TapeError(
                f"the syncer was resumed at version {version} of fragment {fragment}, which no tape here "
                "shows being merged: are the tapes of all its processes in the run folder?"
            )
        return state

    def fold(self, action: m.Fold, payload: Any) -> None:
        """Add a push to its round, as it was added then."""
        compute_on(1)
        fragment = action.fragment
        try:
            self.outer.fold(fragment, payload, action.weight, base=action.base, full=action.full)
        except PayloadError as error:
            raise TapeError(
                f"the push of {action.worker} to version {self.outer.states[fragment].version + 1} of "
                f"fragment {fragment}, folded then, cannot be folded here: {error}"
            ) from None

    def merge(self, fragment: int, version: int, digest: str) -> None:
        """Take the outer step, and compare what comes out."""
        compute_on(1)
        try:
            self.outer.merge(fragment, version)
        except PayloadError as error:
            raise TapeError(f"version {version}, merged then, cannot be merged here: {error}") from None
        self._compare(fragment, version, digest, self.outer.fragment_digest(fragment))
        self._keep(fragment)

    def _compare(self, fragment: int, version: int, recorded: str, replayed: str) -> None:
        self.at.compared += bool(recorded and version)
        if recorded and recorded != replayed and self.at.first is None:
            self.at.first = Difference(self.at.epoch, fragment, version, recorded, replayed)

    def _keep(self, fragment: int) -> None:
        key = (self.at.epoch, fragment, self.outer.states[fragment].version)
        if key in self._needed:
            self.kept[key] = self.outer.states[fragment]

    def payload(self, fragment: int, version: int) -> np.ndarray:
        """Return a version as an update carries it."""
        return self.outer.update(fragment, version)

    # ---- stopping on the way ----

    def state(self) -> tuple[SyncerAt, dict[str, np.ndarray]]:
        """Return where it stands, and the tensors by name."""
        states, kept = self.outer.states, list(self.kept)
        versions = [state.version for state in states]
        arrays: dict[str, np.ndarray] = {}
        for name, held in (("now", states), ("kept", list(self.kept.values()))):
            for index, state in enumerate(held):
                arrays |= {f"{name}/{index}/{part}": array for part, array in _parts(state).items()}
        return msgspec.structs.replace(self.at, versions=versions, kept=kept), arrays

    def load(self, at: SyncerAt, arrays: dict[str, np.ndarray]) -> None:
        """Go on from `state`."""
        self.at = at
        if at.number < 0:
            return
        self._open(at.number)
        self.outer.states = [_state(f"now/{i}", version, arrays) for i, version in enumerate(at.versions)]
        self.kept = {key: _state(f"kept/{i}", key[2], arrays) for i, key in enumerate(at.kept)}


def _parts(state: FragmentState) -> dict[str, np.ndarray]:
    found = {part: getattr(state, part) for part in PARTS}
    return {part: tensor.numpy() for part, tensor in found.items() if tensor is not None}


def _state(name: str, version: int, arrays: dict[str, np.ndarray]) -> FragmentState:
    parts = (arrays.get(f"{name}/{part}") for part in PARTS)
    weights, momentum, before = (None if part is None else torch.from_numpy(part) for part in parts)
    assert weights is not None and momentum is not None
    return FragmentState(version, weights, momentum, before)


# ---- learners ----


class Joined(msgspec.Struct, frozen=True):
    """What a learner's port is made from, as its tape has it."""

    prepare: m.Prepare
    prepared: m.Prepared


@dataclass
class FollowedLearners:
    """Makes the ports of a run's learners."""

    overrides: list[str]
    joined: dict[str, Joined] = field(default_factory=dict)  # by process
    _corpora: dict[bytes, Corpus] = field(default_factory=dict)

    def make(self, process: str, prepare: m.Prepare, prepared: m.Prepared) -> LocalLearner:
        """Return a port with this process's model built. TapeError if it had a model of its own."""
        port = self._build(Joined(prepare, prepared), prepare.position)
        allowed = changed(self.overrides, "model.", "sync.exclude", "sync.buffers")
        if port.schema != prepared.schema and not allowed:
            raise TapeError(
                f"{process} trained another model than the run's [model] describes, one of its user's own: "
                "it cannot be followed; `--verify-only` works on any run"
            )
        self.joined[process] = Joined(prepare, prepared)
        return port

    def again(self, process: str, joined: Joined, position: int) -> LocalLearner:
        """Return a port of a learner that had come to this position; its arrays are to be loaded."""
        self.joined[process] = joined
        return self._build(joined, position)

    def _build(self, joined: Joined, position: int) -> LocalLearner:
        settings, environment = joined.prepare.settings, joined.prepared.environment
        config = self.config(joined)
        port = LocalLearner(
            config,
            self.corpus(config, settings),
            threads=environment.get("threads", 1),
            device=device_here(environment),
        )
        port.prepare(settings, joined.prepare.shard, position)
        return port

    def config(self, joined: Joined) -> Config:
        """Return the run's configuration with what is this process's own, and what is changed, in it."""
        config, environment = ablated(joined.prepare.settings, self.overrides), joined.prepared.environment
        if "accumulate" not in environment or changed(self.overrides, "optimizer.accumulate"):
            return config
        own = msgspec.structs.replace(config.optimizer, accumulate=environment["accumulate"])
        return msgspec.structs.replace(config, optimizer=own)

    def corpus(self, config: Config, settings: dict[str, Any]) -> Corpus:
        """Return the run's data. TapeError if what is here is other data, and nobody asked for that."""
        key = msgspec.json.encode(config.data)
        if key not in self._corpora:
            self._corpora[key] = data.load(config.data)
        corpus, theirs = self._corpora[key], settings.get("data_digest", "")
        if theirs and corpus.digest != theirs and not changed(self.overrides, "data."):
            raise TapeError(
                f"the data here has the digest {corpus.digest}, the run's {theirs}: bring the run's token "
                "file here and name it with --set data.path=FILE"
            )
        return corpus


def device_here(environment: dict[str, Any]) -> str:
    """Return where to compute what was computed on the recorded device: there, if this host has one."""
    return "cuda" if environment.get("device", "cpu") != "cpu" and torch.cuda.is_available() else "cpu"


def changed(overrides: list[str], *keys: str) -> bool:
    """Whether any override is of an option that begins so."""
    return any(text.strip().startswith(keys) for text in overrides)
