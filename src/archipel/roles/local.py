"""All workers in one process: compute ports with tensors, for the simulator and for replay.

The same model, data, codecs and merges as in a live run, without processes, shared memory or sockets. A
learner's port takes the tick its learning rate follows from whoever drives it: the engine's virtual clock, or
the tape.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import Config
from ..errors import PayloadError, TapeError
from ..numerics import codec
from ..protocol import messages as m
from ..runtime.courier import round_as_held
from ..runtime.frames import Rounded
from ..train import data, models, optim
from ..train.compute import FragmentState, OuterState
from ..train.parameters import Parameters

Said = Callable[[m.Event], None]
Corpus = data.TokenData | data.ImageData


def unheard(event: m.Event) -> None:
    """For ports whose driver knows already what will come of its requests."""


class LocalLearner:
    """A learner's tensors. `config`: of the run, with what is this learner's own, or an ablation's, in it.

    threads: that compute, as many as the recorded learner had; 0: as many as torch has now.
    """

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        said: Said = unheard,
        *,
        threads: int = 0,
        device: str = "cpu",
    ) -> None:
        self._config, self._corpus, self._said = config, corpus, said
        self._threads, self._device = threads, device
        self._watched: tuple[int, ...] = ()
        self._copies: dict[int, np.ndarray] = {}
        self._bases: dict[int, np.ndarray] = {}
        self._residuals: dict[int, np.ndarray] = {}
        self.loss = float("nan")

    def prepare(self, settings: dict[str, Any], shard: int, position: int) -> None:
        """Build model, optimizer and data stream; say what is synchronised."""
        config = self._config
        self.model = models.build(config.model).to(self._device)
        self._parameters = Parameters(self.model, config.sync)
        self._rounded = tuple(Rounded(*part) for part in self._parameters.rounded())  # type: ignore[arg-type]
        self._stream = self._corpus.stream(shard, position)
        self._optimizer, self._schedule = optim.build(self.model, config.optimizer, config.sync.steps)
        self._said(m.Prepared(self.schema))

    @property
    def schema(self) -> tuple[m.TensorSpec, ...]:
        """What is synchronised of the model."""
        return self._parameters.schema

    @property
    def position(self) -> int:
        """Tokens of the shard drawn so far."""
        return self._stream.position

    def rows(self, tokens: int) -> int:
        """Return the windows or images that make so many tokens: no built-in data has padding."""
        rows, rest = divmod(tokens, self._stream.sequence)
        if rest or not rows:
            raise TapeError(
                f"that is no whole number of windows of {self._stream.sequence} (data.sequence): "
                "its learner had a loop or data of its own, which no replay knows"
            )
        return rows

    def step(self, number: int, tick: int, rows: int | None = None) -> tuple[int, tuple[int, ...]]:
        """Take inner step `number` at the learning rate of `tick`; return its tokens and what was copied.

        rows: windows or images of this step, where a driver knows better than `data.batch`: a batch may
        change at any step, the data stream goes on where it stands.
        """
        config = self._config
        compute_on(self._threads)
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

    # ---- stopping on the way ----

    def state(self) -> dict[str, np.ndarray]:
        """Return by name every array that the next step depends on, without a copy on a CPU."""
        found = trained(self.model, self._optimizer)
        for kind, held in self._by_fragment().items():
            found |= {f"{kind}/{fragment}": array for fragment, array in held.items()}
        return found

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Go on from `state`, after `prepare` with the `position` that belongs to it."""
        train_on(self.model, self._optimizer, state)
        for key, array in state.items():
            kind, _, name = key.partition("/")
            if kind in self._by_fragment():
                self._by_fragment()[kind][int(name)] = array

    def _by_fragment(self) -> dict[str, dict[int, np.ndarray]]:
        return {"copy": self._copies, "base": self._bases, "residual": self._residuals}


def compute_on(threads: int) -> None:
    """Have torch compute on so many threads from now on; 0: leave it."""
    if threads and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Return a model's tensors and its optimizer's moments by name, without a copy on a CPU."""
    found = {f"model/{name}": _array(tensor) for name, tensor in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        found |= {f"optimizer/{index}/{key}": _array(tensor) for key, tensor in moments.items()}
    return found


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, np.ndarray]) -> None:
    """Take over what `trained` returned; other names are left out."""
    moments: dict[int, dict[str, Tensor]] = {}
    weights = {}
    for key, array in state.items():
        kind, _, name = key.partition("/")
        if kind == "model":
            weights[name] = torch.from_numpy(array)
        elif kind == "optimizer":
            index, _, moment = name.partition("/")
            moments.setdefault(int(index), {})[moment] = torch.from_numpy(array)
    model.load_state_dict(weights)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


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
