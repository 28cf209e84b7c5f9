"""The syncer's tensors: Θ, its momentum, and the rounds being folded (Algorithm 2, appendix D.2).

A fragment's state is a value that a merge replaces, never changes: whoever still sends an older version, or
writes a checkpoint, keeps what it holds. Outer gradients may be relative to the current version or the one
before; they are re-anchored on the current one, which is the same for all.

Invariants: float32 on one thread; pushes are folded in the order they are given; a push that fails its checks
leaves weights, momentum and sums as they were, a merge that does leaves weights and momentum and forgets its
sums; memory does not depend on the number of learners.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..errors import CheckpointError, PayloadError
from ..numerics import codec, merge, outer
from ..numerics.fragment import Fragment
from ..protocol.messages import TensorSpec
from ..protocol.schedule import SyncOptions
from .parameters import flatten, fragments_of, unflatten


@dataclass(frozen=True)
class FragmentState:
    """One fragment at one version. `before`: the weights one version earlier, for late outer gradients."""

    version: int
    weights: Tensor  # (numel,) float32
    momentum: Tensor  # (numel,) float32
    before: Tensor | None = None


class OuterState:
    """Θ and the outer optimizer of a whole model, as P fragments."""

    def __init__(self, schema: tuple[TensorSpec, ...], options: SyncOptions) -> None:
        """Start with nothing held: call `begin` or `restore`."""
        self.schema = schema
        self.options = options
        self.fragments: tuple[Fragment, ...] = fragments_of(schema, options)
        self.states: list[FragmentState] = []
        self.room: Callable[[int], np.ndarray] = _fresh  # memory for so many float32 values, of any content
        self._sums: dict[int, merge.Accumulator] = {}
        self._segments = [
            merge.segments(
                fragment,
                merge=options.merge,
                granularity=options.merge_granularity,
                embedding_merge=options.embedding_merge,
                embedding_patterns=options.embedding_patterns,
            )
            for fragment in self.fragments
        ]
        codec.warm(options.push_codec, options.update_codec, block=options.codec_block)
        self._scratch = np.empty(max((f.numel for f in self.fragments), default=0), np.float32)

    def begin(self, tensors: dict[str, np.ndarray]) -> None:
        """Take the initial weights, version 0, from whole tensors by name."""
        self.states = []
        for fragment in self.fragments:
            weights = self._tensor(fragment.numel)
            flatten(tensors, fragment, weights.numpy())
            self.states.append(FragmentState(0, weights, self._tensor(fragment.numel).zero_()))

    # ---- rounds ----

    def push_bytes(self, fragment: int, *, full: bool) -> int:
        """Return the length a push of the fragment must have."""
        name = "float32" if full else self.options.push_codec
        return codec.encoded_bytes(name, self.fragments[fragment].numel, self.options.codec_block)

    def update_bytes(self, fragment: int) -> int:
        """Return the length of an update of the fragment."""
        numel = self.fragments[fragment].numel
        return codec.encoded_bytes(self.options.update_codec, numel, self.options.codec_block)

    def fold(self, fragment: int, payload: Any, weight: float, *, base: int, full: bool) -> None:
        """Check a push and add it to its round. PayloadError, with nothing changed, if it may not be."""
        if payload is None:  # a message on the control stream may call itself a push
            raise PayloadError(f"push of fragment {fragment} came without a payload: send its values with it")
        state, numel = self.states[fragment], self.fragments[fragment].numel
        name = "float32" if full else self.options.push_codec
        anchored = not full and base == state.version
        delta = torch.from_numpy(self._decoded(name, payload, numel, changed=not anchored))
        if full:
            torch.sub(state.weights, delta, out=delta)
        elif not anchored:
            delta += self._drift(state, base)
        sums = self._sums.get(fragment) or merge.start(self._segments[fragment], numel, self._tensor)
        merge.fold(sums, delta, weight)
        self._sums[fragment] = sums

    def _decoded(self, name: str, payload: Any, numel: int, *, changed: bool) -> np.ndarray:
        """Return a push's values: in scratch memory, or where they lie if they may stay as they are."""
        if name == "float32" and not changed:
            view = memoryview(payload)
            if view.nbytes == 4 * numel > 0 and not view.readonly:
                return np.frombuffer(view, np.dtype("<f4")).astype(np.float32, copy=False)
        return codec.decode(name, payload, numel, self.options.codec_block, self._scratch[:numel])

    def _tensor(self, numel: int) -> Tensor:
        return torch.from_numpy(self.room(numel))

    def _drift(self, state: FragmentState, base: int) -> Tensor:
        """Return what the fragment has moved since `base`: Θ − Θ_base."""
        if base != state.version - 1 or state.before is None:
            raise PayloadError(f"base version {base} is not kept; the current one is {state.version}")
        return state.weights - state.before

    def merge(self, fragment: int, version: int) -> None:
        """Take the outer step of a round. PayloadError, with nothing changed, if it overflows."""
        state = self.states[fragment]
        assert version == state.version + 1, (version, state.version)
        delta = merge.finish(self._sums.pop(fragment))
        options = self.options
        weights, momentum = outer.update(
            state.weights,
            state.momentum,
            delta,
            lr=options.outer_lr,
            mu=options.outer_momentum,
            nesterov=options.nesterov,
            out=(self._tensor(delta.numel()), self._tensor(delta.numel())),
        )
        self._average_buffers(fragment, state, delta, weights, momentum)
        if not (outer.finite(weights) and outer.finite(momentum)):
            raise PayloadError(
                f"the outer step of fragment {fragment} overflows float32: the round is dropped"
            )
        self.states[fragment] = FragmentState(version, weights, momentum, state.weights)

    def _average_buffers(
        self, fragment: int, state: FragmentState, delta: Tensor, weights: Tensor, momentum: Tensor
    ) -> None:
        """Running statistics are averaged, not optimised: the new value is the learners' mean."""
        for piece in self.fragments[fragment].pieces:
            if piece.kind == "buffer":
                part = slice(piece.offset, piece.offset + piece.stop - piece.start)
                torch.sub(state.weights[part], delta[part], out=weights[part])
                momentum[part] = 0.0

    def discard(self, fragment: int) -> None:
        """Forget what was folded for the fragment."""
        self._sums.pop(fragment, None)

    # ---- what leaves ----

    def update(self, fragment: int, version: int) -> np.ndarray:
        """Return a kept version as bytes to send; with float32 this is the weights' own memory."""
        state = self.states[fragment]
        weights = state.weights if version == state.version else state.before
        assert weights is not None and version >= state.version - 1, (version, state.version)
        if self.options.update_codec == "float32":
            return weights.numpy().view(np.uint8)
        return codec.encode(self.options.update_codec, weights.numpy(), self.options.codec_block)

    def tensors(self, states: list[FragmentState] | None = None) -> dict[str, np.ndarray]:
        """Return the merged model, or that of states taken earlier, as whole float32 tensors by name."""
        held = self.states if states is None else states
        return unflatten([state.weights.numpy() for state in held], self.fragments, self.schema)

    def digest(self, states: list[FragmentState] | None = None) -> str:
        """Return xxh3 of the weights, in fragment order."""
        return _digest(state.weights for state in (self.states if states is None else states))

    def fragment_digest(self, fragment: int) -> str:
        """Return xxh3 of one fragment's weights."""
        return _digest([self.states[fragment].weights])

    def momentum_digest(self, states: list[FragmentState] | None = None) -> str:
        """Return xxh3 of the outer momentum, in fragment order."""
        return _digest(state.momentum for state in (self.states if states is None else states))

    # ---- checkpoints ----

    def arrays(self, states: list[FragmentState]) -> dict[str, dict[str, np.ndarray]]:
        """Return file -> name -> array of states that were taken earlier, without a copy."""
        return {
            "weights": {f"{index:05d}": state.weights.numpy() for index, state in enumerate(states)},
            "momentum": {f"{index:05d}": state.momentum.numpy() for index, state in enumerate(states)},
        }

    def restore(
        self,
        weights: Iterable[tuple[str, np.ndarray]],
        momentum: Iterable[tuple[str, np.ndarray]],
        versions: list[int],
    ) -> None:
        """Take over a checkpoint's (name, array) pairs, which need not be in memory together.

        CheckpointError if they are of another model or split.
        """
        held: list[list[Tensor]] = []
        for pairs in (weights, momentum):
            taken: dict[str, Tensor] = {}
            sizes = {f"{fragment.index:05d}": fragment.numel for fragment in self.fragments}
            for key, array in pairs:
                if sizes.get(key) == array.size:
                    taken[key] = self._tensor(array.size)
                    taken[key].numpy()[:] = array.reshape(-1)
            for key, numel in sizes.items():
                if key not in taken:
                    raise CheckpointError(
                        f"fragment {int(key)} of the checkpoint does not have {numel} elements: model, "
                        "sync.fragments and sync.fragmentation must be those of the run that wrote it"
                    )
            held.append([taken[key] for key in sizes])
        self.states = [FragmentState(*found) for found in zip(versions, *held, strict=True)]


def _fresh(numel: int) -> np.ndarray:
    return np.empty(numel, np.float32)


def _digest(tensors: Any) -> str:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(tensor.numpy())
    return digest.hexdigest()
