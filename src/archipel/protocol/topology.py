"""Who meets whom in a gossip round: a pure function of (run seed, membership epoch, round, sorted live view).

GASLoC mixes each round with a matrix W = I − αΛ: pairs with weights 1/2, rings with 1/3 (α = 1). The
published description draws random pairs or a random ring; how the draw is made is ours, so that no worker
needs to be told: whoever knows the four arguments derives the same matrix, bit for bit, on any machine and
in any Python.

The generator is counter-based and written down here. With all arithmetic modulo 2⁶⁴ and mix64 the finalizer
of SplitMix64 (Steele, Lea, Flood 2014):

    key     = fold(fold(fold(0, seed), epoch), round),   fold(k, w) = mix64(k + mix64(w + GOLDEN))
    word i  = mix64(key + (i + 1)·GOLDEN),               i = 0, 1, 2, …

A number below n is word mod n; words from the last, incomplete multiple of n upwards are skipped. The
permutation is Fisher–Yates from the end: for i = n − 1 … 1 swap places i and (a number below i + 1). Seats
are places in that permutation; the static schemes sit in view order.

Invariants: rows and columns of every matrix sum to 1 and no entry is negative; a matrix depends on names
only through their order; with pairs at most one worker idles. All schemes but the two exponential ones are
symmetric.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

Scheme = Literal[
    "one_peer", "two_peer", "complete", "static_ring", "one_peer_exponential", "static_exponential"
]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
RANDOM_SCHEMES: tuple[Scheme, ...] = ("one_peer", "two_peer")

Seats = tuple[int, ...]

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ over the golden ratio, odd


@dataclass(frozen=True, slots=True)
class RoundKey:
    """What the draw of a round depends on besides the view."""

    seed: int  # of the run; taken modulo 2⁶⁴
    epoch: int  # of the membership
    round: int


@dataclass(frozen=True, slots=True)
class Row:
    """One worker's row of W: θ' = own·z + Σ weights·(models of partners). No partners: alone this round."""

    worker: str
    own: float
    partners: tuple[str, ...] = ()  # whose models it mixes in, sorted by name
    weights: tuple[float, ...] = ()
    listeners: tuple[str, ...] = ()  # who mixes in its model; the partners, where the scheme is symmetric


def mix64(word: int) -> int:
    """Return SplitMix64's finalizer of a 64-bit word, a bijection in which every bit depends on every bit."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def stream_key(key: RoundKey) -> int:
    """Return the 64-bit key of a round's stream of words."""
    folded = 0
    for word in (key.seed, key.epoch, key.round):
        folded = mix64((folded + mix64((word + GOLDEN) & MASK)) & MASK)
    return folded


def permutation(n: int, key: RoundKey) -> list[int]:
    """Return a uniformly drawn order of 0 … n−1, the same for everyone who holds the key."""
    start, counter = stream_key(key), 0
    order = list(range(n))
    for last in range(n - 1, 0, -1):
        size = last + 1
        fair = 2**64 - 2**64 % size  # words from here on would favour the low numbers
        while True:
            counter += 1
            word = mix64((start + counter * GOLDEN) & MASK)
            if word < fair:
                break
        other = word % size
        order[last], order[other] = order[other], order[last]
    return order


def exponential_offsets(n: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … below n: the distances of the exponential graphs."""
    return tuple(2**k for k in range((n - 1).bit_length()))


def heard_seats(scheme: Scheme, n: int, seat: int, round_: int) -> tuple[Seats, Seats]:
    """Return the seats of n that a seat hears, and those that hear it. Each of k heard weighs 1/(k + 1)."""
    match scheme:
        case "one_peer":
            other = seat ^ 1
            near: Seats = (other,) if other < n else ()
            return near, near
        case "two_peer" | "static_ring":
            near = tuple(sorted({(seat - 1) % n, (seat + 1) % n} - {seat}))
            return near, near
        case "complete":
            near = tuple(other for other in range(n) if other != seat)
            return near, near
        case "one_peer_exponential" | "static_exponential":
            offsets = exponential_offsets(n)
            if scheme == "one_peer_exponential" and offsets:
                offsets = (offsets[round_ % len(offsets)],)
            return tuple((seat + o) % n for o in offsets), tuple((seat - o) % n for o in offsets)


def seating(scheme: Scheme, n: int, key: RoundKey) -> list[int]:
    """Return the place in the view of each seat's worker."""
    return permutation(n, key) if scheme in RANDOM_SCHEMES else list(range(n))


def row_of(worker: str, scheme: Scheme, view: Sequence[str], key: RoundKey, *, alpha: float = 1.0) -> Row:
    """Return one worker's row. view: the live workers, sorted, the worker among them. 0 < alpha ≤ 1."""
    check_view(view)
    seats = seating(scheme, len(view), key)
    return _row(scheme, view, seats, seats.index(view.index(worker)), (key.round, alpha))


def rows(scheme: Scheme, view: Sequence[str], key: RoundKey, *, alpha: float = 1.0) -> tuple[Row, ...]:
    """Return everybody's row, in the order of the view."""
    check_view(view)
    return seated_rows(scheme, view, seating(scheme, len(view), key), round_=key.round, alpha=alpha)


def seated_rows(
    scheme: Scheme, view: Sequence[str], seats: Sequence[int], *, round_: int = 0, alpha: float = 1.0
) -> tuple[Row, ...]:
    """Return everybody's row for a given seating, in the order of the view."""
    found = [_row(scheme, view, seats, seat, (round_, alpha)) for seat in range(len(view))]
    return tuple(sorted(found, key=lambda row: row.worker))


def matrix(rows_: Sequence[Row]) -> list[list[float]]:
    """Return W from the rows of all workers, in their order: [i][j] is the weight of j's model in i's."""
    place = {row.worker: index for index, row in enumerate(rows_)}
    full = [[0.0] * len(rows_) for _ in rows_]
    for index, row in enumerate(rows_):
        full[index][index] = row.own
        for partner, weight in zip(row.partners, row.weights, strict=True):
            full[index][place[partner]] = weight
    return full


def view_digest(view: Sequence[str]) -> str:
    """Return 16 hexadecimal digits that two workers share when they see the same workers live.

    BLAKE2b (RFC 7693), unkeyed, 8 bytes of output, over the sorted names, each as UTF-8 behind its length in
    bytes (4 bytes, big-endian).
    """
    check_view(view)
    state = hashlib.blake2b(digest_size=8)
    for name in view:
        encoded = name.encode()
        state.update(len(encoded).to_bytes(4, "big") + encoded)
    return state.hexdigest()


def check_view(view: Sequence[str]) -> None:
    """Assert that a view is sorted, without duplicates: the order decides who meets whom."""
    assert view, "a view holds at least the worker itself"
    assert all(a < b for a, b in pairwise(view)), f"view is not sorted and unique: {view}"


def _row(
    scheme: Scheme, view: Sequence[str], seats: Sequence[int], seat: int, setting: tuple[int, float]
) -> Row:
    """Return the row of the worker at a seat. setting: the round and α."""
    round_, alpha = setting
    assert 0 < alpha <= 1, f"alpha={alpha}: W would lose its doubly stochastic form"
    heard, told = heard_seats(scheme, len(view), seat, round_)
    weight = alpha / (len(heard) + 1)
    return Row(
        worker=view[seats[seat]],
        own=1.0 - len(heard) * weight,
        partners=tuple(sorted(view[seats[other]] for other in heard)),
        weights=(weight,) * len(heard),
        listeners=tuple(sorted(view[seats[other]] for other in told)),
    )
