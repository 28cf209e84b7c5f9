"""A model's tensors as P flat float32 fragments, and back.

What is synchronised: every trainable parameter once (tied storage counts as one tensor, under its first
name), and, with `sync.buffers = "average"`, float buffers such as running statistics. Frozen parameters,
integer buffers and names that match `sync.exclude` stay as they are and never travel.

Invariants: names, shapes and the split depend only on the model's structure and the options, so that every
worker derives the same fragments; `read` and `write` touch nothing but their fragment.
"""

from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..numerics.fragment import Fragment, TensorShape, split
from ..protocol.messages import TensorSpec
from ..protocol.schedule import SyncOptions


def synchronised(model: nn.Module, options: SyncOptions) -> dict[str, tuple[Tensor, str]]:
    """Return name -> (tensor, kind) of what is synchronised, in the model's own order."""
    found: dict[str, tuple[Tensor, str]] = {}
    seen: set[tuple[object, ...]] = set()
    candidates = [(name, p, "parameter") for name, p in model.named_parameters() if p.requires_grad]
    if options.buffers == "average":
        saved = model.state_dict(keep_vars=True)  # without tables that a model derives from its options
        candidates += [
            (name, b, "buffer")
            for name, b in model.named_buffers()
            if b.is_floating_point() and name in saved
        ]
    for name, tensor, kind in candidates:
        storage = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and storage in seen:
            continue
        seen.add(storage)
        if not any(fnmatchcase(name, pattern) for pattern in options.exclude):
            found[name] = (tensor, kind)
    if not found:
        raise ModelError(
            "the model has no trainable parameter left to synchronise: check requires_grad and sync.exclude"
        )
    return found


def schema_of(found: dict[str, tuple[Tensor, str]]) -> tuple[TensorSpec, ...]:
    """Return what workers must agree on of the tensors that `synchronised` found."""
    return tuple(
        TensorSpec(name, tuple(tensor.shape), "buffer" if kind == "buffer" else "parameter")
        for name, (tensor, kind) in found.items()
    )


def fragments_of(schema: tuple[TensorSpec, ...], options: SyncOptions) -> tuple[Fragment, ...]:
    """Return the P fragments of a schema; every worker of a run computes the same ones."""
    shapes = [TensorShape(spec.name, spec.shape, spec.kind) for spec in schema]
    return split(shapes, options.fragments, options.fragmentation)


class Parameters:
    """The synchronised tensors of one model."""

    def __init__(self, model: nn.Module, options: SyncOptions) -> None:
        found = synchronised(model, options)
        self._tensors = {name: tensor for name, (tensor, _) in found.items()}
        self.schema = schema_of(found)
        self.fragments = fragments_of(self.schema, options)
        self._local_share = options.local_share

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each fragment."""
        return tuple(fragment.numel for fragment in self.fragments)

    def rounded(self) -> list[tuple[int, int, int, str]]:
        """Return (fragment, start, stop, dtype) of what is kept in less than float32."""
        names = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
        return [
            (fragment.index, piece.offset, piece.offset + piece.stop - piece.start, names[dtype])
            for fragment in self.fragments
            for piece in fragment.pieces
            if (dtype := self._tensors[piece.name].dtype) in names
        ]

    @torch.no_grad()
    def read(self, fragment: int, out: np.ndarray) -> None:
        """Copy a fragment into `out`: (numel,) float32, CPU."""
        whole = torch.from_numpy(out)
        for piece in self.fragments[fragment].pieces:
            flat = self._tensors[piece.name].detach().reshape(-1)[piece.start : piece.stop]
            whole[piece.offset : piece.offset + flat.numel()].copy_(flat)

    @torch.no_grad()
    def write(self, fragment: int, weights: np.ndarray) -> None:
        """Let `weights`, (numel,) float32, land on a fragment; α of the local value is kept."""
        whole = torch.from_numpy(weights)
        for piece in self.fragments[fragment].pieces:
            tensor = self._tensors[piece.name].detach()
            new = whole[piece.offset : piece.offset + piece.stop - piece.start]
            flat = tensor.reshape(-1)  # a view, unless the tensor is laid out in another order
            target = flat[piece.start : piece.stop]
            if self._local_share and piece.kind == "parameter":
                new = torch.lerp(new.to(target.device), target.float(), self._local_share)
            target.copy_(new)
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))


def flatten(tensors: dict[str, np.ndarray], fragment: Fragment, out: np.ndarray | None = None) -> np.ndarray:
    """Return a fragment's weights, (numel,) float32, from whole tensors by name; in `out` if it is given."""
    out = np.empty(fragment.numel, np.float32) if out is None else out
    for piece in fragment.pieces:
        flat = tensors[piece.name].reshape(-1)[piece.start : piece.stop]
        out[piece.offset : piece.offset + flat.size] = flat
    return out


def unflatten(
    weights: list[np.ndarray], fragments: tuple[Fragment, ...], schema: tuple[TensorSpec, ...]
) -> dict[str, np.ndarray]:
    """Return whole float32 tensors by name from all fragments' weights."""
    tensors = {spec.name: np.empty(spec.shape, np.float32) for spec in schema}
    for fragment, flat in zip(fragments, weights, strict=True):
        for piece in fragment.pieces:
            target = tensors[piece.name].reshape(-1)
            target[piece.start : piece.stop] = flat[piece.offset : piece.offset + piece.stop - piece.start]
    return tensors
