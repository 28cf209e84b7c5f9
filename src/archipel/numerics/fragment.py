"""Which elements of which tensors make up each of the P fragments (Decoupled DiLoCo, 3.1 and appendix C).

A fragment is a flat float32 vector; a piece says which range of which flattened tensor lies where in it.

Invariants: every element of every tensor lies in exactly one piece of one fragment; there are exactly P
fragments; the result depends on names and shapes alone, not on the order they are given in, so every worker
finds the same. Tied, frozen and local tensors are the caller's business: what is passed here is synchronised.
"""

import heapq
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from archipel.errors import ModelError

LAYER_PATTERN = r"(?:^|\.)(?:layers?|h|blocks?)\.\d+(?=\.)"  # everything up to its end names the layer

Slice = tuple["TensorShape", int, int]  # a tensor and a range of its flattened elements


@dataclass(frozen=True)
class TensorShape:
    """A tensor to synchronise, as far as fragments care."""

    name: str
    shape: tuple[int, ...]
    kind: str = "parameter"  # or "buffer"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Return the elements of a row along dimension 0, the output axis; all of them below 2-d."""
        return math.prod(self.shape[1:]) if len(self.shape) > 1 else self.numel


@dataclass(frozen=True)
class Piece:
    """Elements start … stop of a flattened (row-major) tensor, at `offset` of the fragment's vector."""

    name: str
    start: int
    stop: int
    offset: int
    row: int  # elements of a row along the output axis; all of a tensor below two dimensions
    kind: str = "parameter"

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Fragment:
    """A set of pieces that is synchronised together, sorted by name and laid end to end."""

    index: int
    pieces: tuple[Piece, ...]
    numel: int


def split(
    tensors: Sequence[TensorShape], fragments: int, strategy: str, *, layer_pattern: str = LAYER_PATTERN
) -> tuple[Fragment, ...]:
    """Return P fragments of the tensors; surplus ones are empty, with a warning.

    strategy: "balanced" (the largest tensor first, each into the smallest fragment: no fragment above 4/3 of
    the optimum), "layer" and "tensor" (what no layer owns is fragment 0, layers or their tensors are dealt
    out in turn over the others), "subtensor" (cut along the output axis: within one row of even).
    layer_pattern: finds the name of a layer in a tensor's name. Raises ModelError.
    """
    _check(tensors, fragments)
    bins = _strategy(strategy)(sorted(tensors, key=_natural), fragments, _compiled(layer_pattern))
    empty = sum(not slices for slices in bins)
    if empty:
        warnings.warn(
            f"sync.fragments={fragments} leaves {empty} fragments empty with sync.fragmentation={strategy} "
            f"over {len(tensors)} tensors: their rounds carry nothing; use fewer fragments",
            stacklevel=2,
        )
    return tuple(_fragment(index, slices) for index, slices in enumerate(bins))


def describe(fragments: Sequence[Fragment]) -> str:
    """Return a short table: elements, share and first tensors of each fragment."""
    total = max(sum(fragment.numel for fragment in fragments), 1)
    lines = [f"{'fragment':>8} {'elements':>14} {'share':>7}  tensors"]
    for fragment in fragments:
        names = ", ".join(piece.name for piece in fragment.pieces[:2])
        more = f" and {len(fragment.pieces) - 2} more" if len(fragment.pieces) > 2 else ""
        share = f"{fragment.numel / total:.1%}"
        lines.append(f"{fragment.index:>8} {fragment.numel:>14,} {share:>7}  {names or '(empty)'}{more}")
    return "\n".join(lines)


def _check(tensors: Sequence[TensorShape], fragments: int) -> None:
    if fragments < 1:
        raise ModelError(f"sync.fragments={fragments} must be at least 1")
    if not tensors:
        raise ModelError("the model has no tensor to synchronise: all are frozen, excluded or local")
    seen = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise ModelError(f"two tensors are called {tensor.name!r}: names must be unique")
        if any(size < 0 for size in tensor.shape):
            raise ModelError(f"tensor {tensor.name!r} has a negative size in its shape {tensor.shape}")
        if tensor.kind not in ("parameter", "buffer"):
            raise ModelError(f"tensor {tensor.name!r} is a {tensor.kind!r}; say 'parameter' or 'buffer'")
        seen.add(tensor.name)


def _natural(tensor: TensorShape) -> tuple[list[tuple[int, str]], str]:
    """Order names as people do, layer 2 before layer 10: by index, whatever order they were given in."""
    words = re.split(r"([0-9]+)", tensor.name)
    return [(int(word), "") if at % 2 else (-1, word) for at, word in enumerate(words)], tensor.name


def _compiled(layer_pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(layer_pattern)
    except re.error as error:
        raise ModelError(f"the layer pattern {layer_pattern!r} is no regular expression: {error}") from error


def _strategy(
    name: str,
) -> Callable[[list[TensorShape], int, re.Pattern[str]], list[list[Slice]]]:
    match name:
        case "balanced":
            return _balanced
        case "layer":
            return _by_layer
        case "tensor":
            return _by_tensor
        case "subtensor":
            return _by_rows
    raise ModelError(f"sync.fragmentation={name!r} is unknown: use balanced, layer, tensor or subtensor")


def _balanced(tensors: list[TensorShape], fragments: int, pattern: re.Pattern[str]) -> list[list[Slice]]:
    bins: list[list[Slice]] = [[] for _ in range(fragments)]
    # The count of tensors breaks ties between empty tensors, so that none piles onto fragment 0.
    smallest = [(0, 0, index) for index in range(fragments)]
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.numel, tensor.name)):
        numel, count, index = heapq.heappop(smallest)
        bins[index].append(_whole(tensor))
        heapq.heappush(smallest, (numel + tensor.numel, count + 1, index))
    return bins


def _by_layer(tensors: list[TensorShape], fragments: int, pattern: re.Pattern[str]) -> list[list[Slice]]:
    layers, found = _layers(tensors, pattern)
    order = {layer: index for index, layer in enumerate(dict.fromkeys(layer for layer in layers if layer))}
    return _deal(tensors, fragments, [order[layer] if layer else None for layer in layers], found)


def _by_tensor(tensors: list[TensorShape], fragments: int, pattern: re.Pattern[str]) -> list[list[Slice]]:
    layers, found = _layers(tensors, pattern)
    counter = iter(range(len(tensors)))
    return _deal(tensors, fragments, [next(counter) if layer else None for layer in layers], found)


def _layers(tensors: list[TensorShape], pattern: re.Pattern[str]) -> tuple[list[str | None], bool]:
    """Return the layer that owns each tensor, None for none, and whether there is any layer."""
    matches = [pattern.search(tensor.name) for tensor in tensors]
    layers = [match and tensor.name[: match.end()] for tensor, match in zip(tensors, matches, strict=True)]
    return layers, any(layers)


def _deal(
    tensors: list[TensorShape], fragments: int, turns: list[int | None], found: bool
) -> list[list[Slice]]:
    if fragments > 1 and not found:
        raise ModelError(
            f"no tensor name shows a layer (first: {tensors[0].name!r}), so all would go to fragment 0: "
            "use sync.fragmentation=balanced or give a layer pattern"
        )
    bins: list[list[Slice]] = [[] for _ in range(fragments)]
    for tensor, turn in zip(tensors, turns, strict=True):
        index = 0 if turn is None or fragments == 1 else 1 + turn % (fragments - 1)
        bins[index].append(_whole(tensor))
    return bins


def _by_rows(tensors: list[TensorShape], fragments: int, pattern: re.Pattern[str]) -> list[list[Slice]]:
    """Lay all tensors end to end and cut at the row nearest to each multiple of total/P."""
    bins: list[list[Slice]] = [[] for _ in range(fragments)]
    total = sum(tensor.numel for tensor in tensors)
    index, before = 0, 0  # the fragment being filled; elements in front of the tensor
    for tensor in tensors:
        start = 0
        while index < fragments - 1:
            # In integers, because a model of 10^16 elements exceeds the precision of a float.
            cut = _nearest_row(tensor, (index + 1) * total - before * fragments, fragments)
            if cut is None:
                break
            if cut > start:
                bins[index].append((tensor, start, cut))
            start, index = max(cut, start), index + 1
        if start < tensor.numel or not tensor.numel:
            bins[index].append((tensor, start, tensor.numel))
        before += tensor.numel
    return bins


def _nearest_row(tensor: TensorShape, goal: int, scale: int) -> int | None:
    """Return the row boundary nearest to goal/scale elements into the tensor, None behind its end."""
    step = tensor.row if len(tensor.shape) > 1 else 1
    if not tensor.numel or goal > tensor.numel * scale:
        return None
    return (2 * goal + step * scale) // (2 * step * scale) * step


def _whole(tensor: TensorShape) -> Slice:
    return tensor, 0, tensor.numel


def _fragment(index: int, slices: list[Slice]) -> Fragment:
    return Fragment(index, tuple(_pieces(slices)), sum(stop - start for _, start, stop in slices))


def _pieces(slices: list[Slice]) -> Iterator[Piece]:
    offset = 0
    for tensor, start, stop in sorted(slices, key=lambda item: (item[0].name, item[1])):
        yield Piece(tensor.name, start, stop, offset, tensor.row, tensor.kind)
        offset += stop - start
