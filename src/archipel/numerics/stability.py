"""When outer momentum on a gossip graph stays stable: the theory behind the configuration's warning.

Without drifts the differences between workers obey a linear recursion in (x, p), where x is what a worker
starts the round with and p is what it remembers, both less their mean over workers:

    mixed, postmix   x' = W [(1+γ)x − γp],    p' = x
    local            x' = W x + γ(x − p),     p' = x
    drift            x' = W x                 (its momentum never feeds on x)

Random graphs (1-peer, 2-peer): relabelling workers changes nothing in distribution, so on differences E[W]
and E[WᵀW] are numbers λ and q, and the second moments A = E|x|², C = E⟨x, p⟩, B = E|p|² obey an exact 3 × 3
recursion. Its spectral radius is the factor of the squared consensus error per round. With ρ = λ at α = 1
(specification, section 4) and s = 1 − drop probability: λ = 1 − αs(1−ρ), q = 1 − (2αs − α²σ)(1−ρ), where σ =
s for pairs and (2s + s²)/3 for rings, whose links fail one by one. Fixed and cyclic graphs (all others) are
circulant: one 2 × 2 recursion per Fourier mode, multiplied over a period.

All limits come from this theory; no number here is tabulated or fitted. It imports neither torch nor numpy,
so that a configuration can be checked without either.
"""

import cmath
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import mul
from typing import Literal, get_args

Form = Literal["mixed", "local", "postmix", "drift"]
FORMS: tuple[Form, ...] = get_args(Form)
Graph = Literal[
    "one_peer", "two_peer", "complete", "static_ring", "one_peer_exponential", "static_exponential"
]

LARGE = 64  # workers that stand for "many" on the graphs whose theory needs a number
MARGIN = 0.9  # share of a limit that is called safe
GRID = 0.01  # step in γ or α at which a limit is first looked for
SQUARINGS = 48  # ρ(M) = lim |Mᵏ|^(1/k); at k = 2⁴⁸ double precision is all that is left

Matrix = list[list[float]]


@dataclass(frozen=True)
class Verdict:
    """Whether a gossip setting keeps the workers together, how far the limits are, and what would be safe."""

    form: Form
    peers: Graph
    momentum: float
    alpha: float
    growth: float  # factor of the squared consensus error per round; below 1 is stable
    momentum_limit: float  # stable below, at this α; 1: any
    alpha_limit: float  # stable below, at this γ; 1: any; 0: none
    safe_momentum: float  # stable with a margin, at this α
    safe_alpha: float  # least consensus error under drifts, at this γ; 0: none is stable

    @property
    def stable(self) -> bool:
        """The differences between workers die out."""
        return self.growth < 1

    def __str__(self) -> str:
        """The rule, the values and the remedy, in one sentence."""
        setting = f"form={self.form} peers={self.peers} momentum={self.momentum:g} alpha={self.alpha:g}"
        if self.stable:
            return f"{setting}: stable, a round multiplies the squared consensus error by {self.growth:.3f}"
        damping = f", or alpha={self.safe_alpha:g} (limit {self.alpha_limit:.3f})" if self.safe_alpha else ""
        return (
            f"{setting} diverges: a round multiplies the squared consensus error by {self.growth:.3f}; use "
            f"momentum={self.safe_momentum:g} (limit {self.momentum_limit:.3f}){damping}, or form=drift"
        )


def stable(form: Form, peers: Graph, gamma: float, alpha: float = 1.0, n: float = math.inf) -> Verdict:
    """Return the verdict on a form, graph, outer momentum γ and damping α with n workers; inf: many.

    0 ≤ γ < 1 and 0 < α ≤ 1. Takes up to half a second on the exponential graphs.
    """
    rate = growth(form, peers, gamma, alpha=alpha, n=n)
    momentum_limit = _edge(lambda g: growth(form, peers, g, alpha=alpha, n=n))
    alpha_limit = _edge(lambda a: growth(form, peers, gamma, alpha=a, n=n))
    safe = (gamma, alpha)
    if rate >= 1:
        safe = (_below(MARGIN * momentum_limit), _best_alpha(form, peers, gamma, n, alpha_limit))
    return Verdict(form, peers, gamma, alpha, rate, momentum_limit, alpha_limit, *safe)


def growth(
    form: Form, peers: Graph, gamma: float, *, alpha: float = 1.0, n: float = math.inf, drop: float = 0.0
) -> float:
    """Return the factor of the squared consensus error per round, in the long run.

    drop: probability that a link of a round fails, on the random graphs.
    """
    assert 0 <= gamma <= 1 and 0 < alpha <= 1 and 0 <= drop <= 1 and n >= 1, (gamma, alpha, drop, n)
    if n == 1:
        return 0.0
    if form == "drift":
        gamma = 0.0
    if peers in ("one_peer", "two_peer"):
        return spectral_radius(second_moments(form, gamma, *moments(peers, n, alpha=alpha, drop=drop)))
    assert drop == 0, f"drops are random graphs' business; peers={peers}"
    return _circulant_growth(form, peers, gamma, alpha=alpha, n=LARGE if math.isinf(n) else int(n))


def second_eigenvalue(peers: Graph, n: float) -> float:
    """Return ρ, the second eigenvalue of a random graph's expected mixing matrix at α = 1 (section 4)."""
    if n <= 2:
        return 0.0  # a pair and a worker alone are complete graphs
    if peers == "two_peer":
        return 1 / 3 if math.isinf(n) else (n - 3) / (3 * (n - 1))
    assert peers == "one_peer", peers
    return 0.5 if math.isinf(n) or n % 2 else (n - 2) / (2 * (n - 1))


def moments(peers: Graph, n: float, *, alpha: float = 1.0, drop: float = 0.0) -> tuple[float, float]:
    """Return λ and q: what E[W] and E[WᵀW] multiply differences by, on a random graph."""
    gap, kept = 1 - second_eigenvalue(peers, n), 1 - drop
    square = (2 * kept + kept**2) / 3 if peers == "two_peer" and n > 2 else kept
    return 1 - alpha * kept * gap, 1 - (2 * alpha * kept - alpha**2 * square) * gap


def second_moments(form: Form, gamma: float, lam: float, q: float) -> Matrix:
    """Return the recursion of (E|x|², E⟨x, p⟩, E|p|²) over one round of a random graph."""
    g = gamma
    if form == "local":
        return [
            [q + g * g + 2 * g * lam, -2 * g * (g + lam), g * g],
            [lam + g, -g, 0],
            [1, 0, 0],
        ]
    return [
        [q * (1 + g) ** 2, -2 * q * g * (1 + g), q * g * g],
        [lam * (1 + g), -lam * g, 0],
        [1, 0, 0],
    ]


def spread(form: Form, peers: Graph, gamma: float, *, alpha: float = 1.0, n: float = math.inf) -> float:
    """Return E|x|² in the long run if every round adds an independent drift, E|ηg|² = 1.

    inf if unstable. For the random graphs and every form but drift. Drift and x are less their means over
    workers; x is what a worker starts a round with, in form postmix its mixed model u.
    """
    assert form != "drift", "drift remembers drifts, not models: another recursion"
    if growth(form, peers, gamma, alpha=alpha, n=n) >= 1:
        return math.inf
    lam, q = moments(peers, n, alpha=alpha)
    step = second_moments(form, gamma, lam, q)
    # A drift enters the round as x does and is remembered with it; postmix takes it in behind the momentum.
    source = (q, 0.0, 0.0) if form == "postmix" else (step[0][0], step[1][0], 1.0)
    # From C = c + eA + fC and B = b + A, put into A = a + gA + hC + kB.
    (g, h, k), (e, f, _), _ = step
    a, c, b = source
    return (a + h * c / (1 - f) + k * b) / (1 - g - h * e / (1 - f) - k)


def consensus_momentum(lam: float) -> float:
    """Return the γ with which `mixed` brings a fixed graph of second eigenvalue λ to consensus fastest."""
    root = math.sqrt(1 - lam)
    return (1 - root) / (1 + root)


def spectral_radius(matrix: Matrix) -> float:
    """Return the largest modulus of an eigenvalue, by squaring the matrix again and again."""
    power, log_scale = matrix, 0.0
    for _ in range(SQUARINGS):
        size = max(abs(entry) for row in power for entry in row)
        if size == 0:
            return 0.0
        scaled = [[entry / size for entry in row] for row in power]
        columns = list(zip(*scaled, strict=True))
        power = [[sum(map(mul, row, column)) for column in columns] for row in scaled]
        log_scale = 2 * (log_scale + math.log(size))
    size = max(abs(entry) for row in power for entry in row)
    return math.exp((log_scale + math.log(size)) / 2**SQUARINGS) if size else 0.0


def _circulant_growth(form: Form, peers: Graph, gamma: float, *, alpha: float, n: int) -> float:
    """Return the squared growth per round of the worst Fourier mode; mode n − m mirrors mode m."""
    cycle = _offsets(peers, n)
    worst = max(
        _mode_radius(form, gamma, [_symbol(offsets, mode / n, alpha) for offsets in cycle])
        for mode in range(1, n // 2 + 1)
    )
    return math.pow(worst, 2 / len(cycle))


def _offsets(peers: Graph, n: int) -> list[tuple[int, ...]]:
    """Return, for each round of a period, whom a worker hears: distances on the circle."""
    powers = tuple(2**k for k in range((n - 1).bit_length()))
    match peers:
        case "complete":
            return [tuple(range(1, n))]
        case "static_ring":
            return [(1, n - 1) if n > 2 else (1,)]
        case "static_exponential":
            return [powers]
        case "one_peer_exponential":
            return [(power,) for power in powers]
    raise AssertionError(peers)


def _symbol(offsets: tuple[int, ...], frequency: float, alpha: float) -> complex:
    """Return what W multiplies a Fourier mode by; frequency: turns per worker."""
    weight = alpha / (len(offsets) + 1)
    return 1 - weight * sum(1 - cmath.exp(2j * math.pi * frequency * offset) for offset in offsets)


def _mode_radius(form: Form, gamma: float, symbols: list[complex]) -> float:
    """Return the spectral radius of (x, p) over a period in which W multiplies by these symbols in turn."""
    a, b, c, d = 1 + 0j, 0j, 0j, 1 + 0j
    for w in symbols:
        on_x, on_p = (w + gamma, -gamma) if form == "local" else (w * (1 + gamma), -w * gamma)
        a, b, c, d = on_x * a + on_p * c, on_x * b + on_p * d, a, b
    half, root = (a + d) / 2, cmath.sqrt((a - d) ** 2 / 4 + b * c)
    return max(abs(half + root), abs(half - root))


def _edge(rate: Callable[[float], float]) -> float:
    """Return where a growth rate first reaches 1; 1 if it does not below 1, 0 if it does at once."""
    points = [GRID * k for k in range(1, round(1 / GRID))]
    above = next((point for point in points if rate(point) >= 1), None)
    if above is None:
        return 1.0
    below = above - GRID
    if below < GRID / 2:
        return 0.0
    for _ in range(30):
        middle = (below + above) / 2
        below, above = (middle, above) if rate(middle) < 1 else (below, middle)
    return below


def _below(value: float) -> float:
    """Return the largest multiple of 0.05 not above a value."""
    return math.floor(value * 20 + 1e-9) / 20


def _best_alpha(form: Form, peers: Graph, gamma: float, n: float, limit: float) -> float:
    """Return the multiple of 0.05 within the limit with the least consensus error, 0 if there is none."""
    choices = [k / 20 for k in range(1, 20) if k / 20 <= MARGIN * limit]
    if not choices:
        return 0.0
    if peers in ("one_peer", "two_peer"):
        return min(choices, key=lambda a: spread(form, peers, gamma, alpha=a, n=n))
    return min(choices, key=lambda a: growth(form, peers, gamma, alpha=a, n=n))
