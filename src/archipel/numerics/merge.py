"""Many outer gradients into one (Decoupled DiLoCo, appendix D.2).

Average: Δ = Σ w·v / Σ w. Radial-directional averaging (RDA): Δ = (Σ w‖v‖ / Σ w) · φ(Σ w·φ(v)) with
φ(x) = x/‖x‖, φ(0) = 0. The paper prints v for ‖v‖ in the first factor, a slip. Learners' outer gradients are
almost orthogonal, so the plain mean of M vectors of norm R has norm R/√M; RDA keeps R, and the outer learning
rate serves every M.

A round folds its pushes one by one into an accumulator whose size does not depend on M: `start`, `fold` …,
`finish`. `average` and `radial_directional` are that same fold over whole tensors, so both forms agree to the
bit.

Invariants: a refused push leaves no trace; a result is finite. Weights are taken relative to the first one
folded, so their scale cannot overflow. Norms are exact to about 10⁻⁷ at any length and magnitude. The same
pushes in the same order give the same bits at an equal count of threads, wherever the buffers lie.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from archipel.errors import PayloadError
from archipel.numerics.fragment import Fragment, Piece

AVERAGE, RADIAL_DIRECTIONAL = "average", "radial_directional"

# Directions cancel where their mean is shorter than this: below, float32 rounding is most of what is left.
CANCELLED = 1e-5
# A weighted sum of norms above this is refused. No gradient is that long, and what comes after (sums over
# learners, the outer step) keeps eight decimal orders below the end of float32.
LONGEST = 1e30
STEEPEST = 1e37  # the largest factor a float32 kernel is given; a vector that needs more has no direction
CHUNK = 1 << 15  # elements; two sums and their source stay in the cache, and torch uses one thread
RUN = 512  # elements summed in float32 before float64 takes over


@dataclass(frozen=True)
class Segment:
    """A range of a fragment's vector that is merged by one rule.

    row: 0 if all of it is one direction, else the elements per direction. Segments with the same group ≥ 0
    share one direction; −1: its own.
    """

    name: str
    start: int
    stop: int
    rule: str
    row: int = 0
    group: int = -1


@dataclass
class Accumulator:
    """A round's running sums: two float32 vectors, whatever M is. Weights are relative to the first."""

    segments: tuple[Segment, ...]
    directions: tuple[tuple[int, ...], ...]  # indices of the segments that make up each one
    values: Tensor  # (numel,) float32: Σ w·v
    units: Tensor  # (numel,) float32: Σ w·φ(v); empty if no segment needs it
    lengths: list[Tensor] = field(default_factory=list)  # Σ w‖v‖, float64, (directions,) for each entry above
    bounds: list[float] = field(default_factory=list)  # Σ w‖v‖ of each segment, which bounds its sums
    weight: float = 0.0  # Σ w
    unit: float = 0.0  # the first weight
    count: int = 0  # pushes folded


def segments(
    fragment: Fragment,
    *,
    merge: str,
    granularity: str,
    embedding_merge: str,
    embedding_patterns: Sequence[str],
) -> tuple[Segment, ...]:
    """Return how each piece of a fragment is merged.

    merge, embedding_merge: "average" or "radial_directional"; the second holds for names that match a pattern
    (fnmatch). Buffers are averaged. granularity: one direction per "tensor" (a part of a split tensor counts
    as a tensor), per "row" of the output axis, or for the whole "fragment".
    """
    assert granularity in ("tensor", "row", "fragment"), granularity
    found = []
    for piece in fragment.pieces:
        embedding = any(fnmatchcase(piece.name, pattern) for pattern in embedding_patterns)
        rule = AVERAGE if piece.kind == "buffer" else embedding_merge if embedding else merge
        assert rule in (AVERAGE, RADIAL_DIRECTIONAL), rule
        radial = rule == RADIAL_DIRECTIONAL
        row = _row(piece) if radial and granularity == "row" else 0
        group = 0 if radial and granularity == "fragment" else -1
        found.append(Segment(piece.name, piece.offset, piece.offset + piece.numel, rule, row, group))
    return tuple(found)


def start(
    segments: tuple[Segment, ...], numel: int, room: Callable[[int], Tensor] = torch.empty
) -> Accumulator:
    """Return an empty accumulator for vectors (numel,), which the segments cover without gap or overlap.

    room: gives the memory of so many float32 values, of any content.
    """
    end = 0
    for segment in segments:
        assert segment.start == end <= segment.stop, segment
        assert not segment.row or (segment.stop - segment.start) % segment.row == 0, segment
        end = segment.stop
    assert end == numel, (end, numel)
    directions = _directions(segments)
    return Accumulator(segments, directions, room(numel), room(numel if directions else 0))


def reset(acc: Accumulator) -> None:
    """Forget what was folded and keep the buffers."""
    acc.lengths, acc.bounds = [], []
    acc.weight, acc.unit, acc.count = 0.0, 0.0, 0


def fold(acc: Accumulator, delta: Tensor, weight: float) -> None:
    """Add an outer gradient (numel,), float32 on the CPU, with a positive weight.

    Raises PayloadError, naming the tensor, for values that are not finite or too large to merge; then nothing
    changed.
    """
    assert delta.shape == acc.values.shape and delta.dtype == torch.float32, (delta.shape, delta.dtype)
    assert delta.is_contiguous() and weight > 0 and math.isfinite(weight), weight
    relative = weight / (acc.unit or weight)
    norms = [_norms(delta[segment.start : segment.stop], segment.row) for segment in acc.segments]
    bounds = _checked_bounds(acc, norms, relative)
    lengths = [_length([norms[at] for at in group]) for group in acc.directions]
    factors = {at: length for group, length in zip(acc.directions, lengths, strict=True) for at in group}
    for at, segment in enumerate(acc.segments):
        _add(acc, delta, segment, relative, factors.get(at))
    weighted = [length * relative for length in lengths]
    acc.lengths = [a + b for a, b in zip(acc.lengths, weighted, strict=True)] if acc.count else weighted
    acc.bounds, acc.weight, acc.unit = bounds, acc.weight + relative, acc.unit or weight
    acc.count += 1


def finish(acc: Accumulator) -> Tensor:
    """Return the merged outer gradient (numel,) of at least one push; the accumulator is as after `reset`.

    The result is the accumulator's own buffer: it holds until the next `fold`.
    """
    assert acc.count, "nothing was folded"
    if acc.count > 1:  # one push is its own merge under either rule
        for segment in acc.segments:
            if segment.rule == AVERAGE:
                acc.values[segment.start : segment.stop].div_(acc.weight)
        for group, length in zip(acc.directions, acc.lengths, strict=True):
            _finish_directions(acc, group, length)
    reset(acc)
    return acc.values


def average(gradients: list[Tensor], weights: list[float]) -> Tensor:
    """Return Σ w·v / Σ w in float32.

    gradients: M tensors of one shape. weights: M positive floats, any scale.
    """
    return _merge(gradients, weights, AVERAGE)


def radial_directional(gradients: list[Tensor], weights: list[float]) -> Tensor:
    """Average norms and directions apart, so that the step does not shrink as M grows.

    gradients: M tensors of one shape, in the order they are to be summed. weights: M positive floats, any
    scale. Falls back to the plain average where the directions cancel. Decoupled DiLoCo, appendix D.2.

    >>> radial_directional([torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])], [1, 1]).norm()
    tensor(3.0000)
    """
    return _merge(gradients, weights, RADIAL_DIRECTIONAL)


def _merge(gradients: list[Tensor], weights: list[float], rule: str) -> Tensor:
    assert gradients and len(gradients) == len(weights), (len(gradients), len(weights))
    numel = gradients[0].numel()
    acc = start((Segment("gradient", 0, numel, rule),), numel)
    for gradient, weight in zip(gradients, weights, strict=True):
        assert gradient.shape == gradients[0].shape, (gradient.shape, gradients[0].shape)
        fold(acc, gradient.detach().to("cpu", torch.float32).reshape(-1), float(weight))
    return finish(acc).reshape(gradients[0].shape)


def _row(piece: Piece) -> int:
    # A one-dimensional tensor cut by rows keeps its whole length as row: its parts are one direction each.
    return piece.row if piece.row and piece.numel % piece.row == 0 and piece.numel > piece.row else 0


def _directions(segments: tuple[Segment, ...]) -> tuple[tuple[int, ...], ...]:
    groups: dict[int, list[int]] = {}
    for at, segment in enumerate(segments):
        if segment.rule == RADIAL_DIRECTIONAL and segment.stop > segment.start:
            assert segment.group < 0 or not segment.row, segment
            groups.setdefault(segment.group if segment.group >= 0 else -1 - at, []).append(at)
    return tuple(tuple(group) for group in groups.values())


def _checked_bounds(acc: Accumulator, norms: list[Tensor], relative: float) -> list[float]:
    """Return the sums of weighted norms as they would be after this push, or raise PayloadError."""
    bounds = []
    for at, (segment, norm) in enumerate(zip(acc.segments, norms, strict=True)):
        size = math.sqrt(norm.square().sum().item())
        if not math.isfinite(size):
            raise PayloadError(
                f"outer gradient of {segment.name}: holds NaN or Inf, the learner diverged; "
                "lower its learning rate"
            )
        bound = relative * size + (acc.bounds[at] if acc.count else 0.0)
        if not bound <= LONGEST or not acc.weight + relative <= LONGEST:
            raise PayloadError(
                f"outer gradient of {segment.name}: norm {size:.3g} with relative weight {relative:.3g} "
                f"takes the sum above {LONGEST:.0e}, the learner diverged; lower its learning rate"
            )
        bounds.append(bound)
    return bounds


def _norms(values: Tensor, row: int) -> Tensor:
    """Return the norms, in float64, of the rows (row = 0: of all) of a flat vector; NaN or Inf if it has any.

    Runs of float32 sums are joined in float64: an error of 10⁻⁷, where one float32 sum over 16 M elements is
    off by 10⁻³, at a quarter of the time of float64 throughout. That is left to vectors whose squares leave
    float32's range.
    """
    rows = values.reshape(-1, row or max(values.numel(), 1))
    if not values.numel():
        return torch.zeros(1, dtype=torch.float64)
    whole = rows.shape[1] // RUN * RUN
    runs = torch.linalg.vector_norm(rows[:, :whole].view(len(rows), -1, RUN), dim=2)
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)
    norms: Tensor = torch.linalg.vector_norm(torch.cat((runs, rest), dim=1), dim=1, dtype=torch.float64)
    if not bool(((norms > 1e-12) & torch.isfinite(norms)).all()):
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms


def _length(norms: list[Tensor]) -> Tensor:
    """Return the norms of directions that are spread over segments."""
    return norms[0] if len(norms) == 1 else torch.stack(norms).square().sum(dim=0).sqrt()


def _add(acc: Accumulator, delta: Tensor, segment: Segment, relative: float, length: Tensor | None) -> None:
    """Add w·v to the values and, given the lengths of its directions, w·φ(v) to the units, by chunks."""
    span = slice(segment.start, segment.stop)
    if length is None:
        for part, values in _chunks(0, delta[span], acc.values[span]):
            _add_scaled(values, part, relative, first=not acc.count)
        return
    factors = relative / length
    factors = torch.where(factors <= STEEPEST, factors, 0.0)  # φ(0) = 0
    if not segment.row:
        factor = factors.item()
        for part, values, units in _chunks(0, delta[span], acc.values[span], acc.units[span]):
            _add_scaled(values, part, relative, first=not acc.count)
            _add_scaled(units, part, factor, first=not acc.count)
        return
    column = factors.to(torch.float32)
    vectors = (delta[span], acc.values[span], acc.units[span], column)
    for part, values, units, rows in _chunks(segment.row, *vectors):
        _add_scaled(values, part, relative, first=not acc.count)
        if acc.count:
            units.addcmul_(part, rows)
        else:
            torch.mul(part, rows, out=units)


def _add_scaled(total: Tensor, values: Tensor, factor: float, *, first: bool) -> None:
    if first:
        torch.mul(values, factor, out=total)  # whatever the buffer held is overwritten, not added to
    else:
        torch.add(total, values, alpha=factor, out=total)


def _chunks(row: int, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return matching views of flat vectors; with rows, of matrices to which the last vector is a column."""
    if row:
        *flat, last = vectors
        vectors = (*(vector.view(-1, row) for vector in flat), last.unsqueeze(1))
    step = max(CHUNK // row, 1) if row else CHUNK
    return zip(*(torch.split(vector, step) for vector in vectors), strict=True)


def _finish_directions(acc: Accumulator, group: tuple[int, ...], length: Tensor) -> None:
    """Overwrite Σ w·v of a direction's segments with (Σ w‖v‖ / Σ w) · φ(Σ w·φ(v)), or with the average."""
    parts = [acc.segments[at] for at in group]
    sums = _length([_norms(acc.units[part.start : part.stop], part.row) for part in parts])
    cancelled = sums <= CANCELLED * acc.weight
    # Two factors rather than their quotient, which may leave float32 where each of them stays.
    shrink, stretch = torch.where(cancelled, 1.0, sums), torch.where(cancelled, 0.0, length / acc.weight)
    for part in parts:
        span = slice(part.start, part.stop)
        if part.row:
            values, units = acc.values[span].view(-1, part.row), acc.units[span].view(-1, part.row)
            units.div_(shrink.to(torch.float32).unsqueeze(1)).mul_(stretch.to(torch.float32).unsqueeze(1))
            values.div_(acc.weight).mul_(cancelled.to(torch.float32).unsqueeze(1)).add_(units)
        elif cancelled.item():
            acc.values[span].div_(acc.weight)
        else:
            for values, units in _chunks(0, acc.values[span], acc.units[span]):
                torch.div(units, shrink.item(), out=values).mul_(stretch.item())
