"""How long a gossip round takes when one link is slow: a max-plus model, and the rule that adapts H_i.

Time is in local steps. A model takes c steps over a full link (S/(b·t_c) = c) and c/r over one with a
fraction r of the bandwidth, in each direction. A worker with k peers sends k models a round. The pairs are
those of `protocol.topology`, so that delays spread through the same random graph as in a run.

    ready    = start + H_i                     the local steps are done
    left     = ready + k·c/r_i                 its models have left over its own link
    start'   = max(ready, left of its partners)                    exchange that does not block
    start'   = max(left, arrival of the models it still owes)      the same, for the end with the narrow link
    start'   = max(ready of both) + k·c/min(r)                     exchange that blocks

The narrow end is not held up by what its own downlink delays: it goes on when its uplink is free, and mixes
the late model in one round later (delta form: `numerics.mixing`); more than one round late it does not get.
The wide end never waits for its own outgoing message. GASLoC's summary promises that fewer local steps at
the slow end make up for the link; the rule H_s and this model are ours (gossip specification, section 3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from archipel.errors import ConfigError
from archipel.protocol import topology

Exchange = Literal["non_blocking", "blocking"]

CASES = ((3, 0.1), (3, 0.2), (1, 0.1), (1, 0.2))  # (c, r) of the specification's table
WORKERS, INTERVAL_STEPS = 16, 30


@dataclass(frozen=True)
class Islands:
    """Workers and their links. Worker i runs steps[i] local steps a round over a link of bandwidth[i]."""

    steps: tuple[int, ...]
    bandwidth: tuple[float, ...]  # fractions of a full link
    transfer_steps: float  # c: one model over a full link, in local steps


@dataclass
class Progress:
    """Where the workers are, in local steps of time."""

    start: list[float]  # of the round under way
    downlink_free: list[float]
    owed: list[float]  # arrival of a model that was late for the round before; 0: none
    late: int = 0  # models mixed in one round late


def adapted_steps(interval_steps: int, peers: int, transfer_steps: float, fraction: float) -> int:
    """Return H_s = floor(H − k·c·(1/r − 1)), at least 1: with so many local steps a slow link keeps pace.

    >>> adapted_steps(30, 1, 3.0, 0.1)
    3
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"bandwidth fraction {fraction} is outside (0, 1]; the fastest link has 1")
    exact = interval_steps - peers * transfer_steps * (1 / fraction - 1)
    return max(1, math.floor(exact + 1e-9))  # 1/r may fall a rounding error short


def one_straggler(transfer_steps: float, fraction: float, *, adapted: bool, peers: int = 1) -> Islands:
    """Return the specification's 16 workers, the first behind a slow link, with H fixed or adapted there."""
    slow = adapted_steps(INTERVAL_STEPS, peers, transfer_steps, fraction) if adapted else INTERVAL_STEPS
    others = WORKERS - 1
    return Islands((slow, *[INTERVAL_STEPS] * others), (fraction, *[1.0] * others), transfer_steps)


def diloco_round(islands: Islands) -> float:
    """Return a round's length with a ring all-reduce: all wait for all, 2(n−1)/n models on each link."""
    n = len(islands.steps)
    return max(islands.steps) + 2 * (n - 1) / n * islands.transfer_steps / min(islands.bandwidth)


def gossip_round(
    islands: Islands,
    *,
    scheme: topology.Scheme = "one_peer",
    exchange: Exchange = "non_blocking",
    rounds: int = 400,
    seed: int = 0,
) -> float:
    """Return the mean length of a round, in local steps, over the second half of a simulated run."""
    marks = [sum(p.start) / len(p.start) for p in timeline(islands, scheme, exchange, rounds, seed)]
    half = len(marks) // 2
    return (marks[-1] - marks[half]) / (len(marks) - 1 - half)


def timeline(
    islands: Islands, scheme: topology.Scheme, exchange: Exchange, rounds: int, seed: int
) -> list[Progress]:
    """Return the progress at the start and after each round."""
    n = len(islands.steps)
    now = Progress([0.0] * n, [0.0] * n, [0.0] * n)
    view = tuple(f"{worker:06d}" for worker in range(n))
    history = [now]
    for round_ in range(rounds):
        rows = topology.rows(scheme, view, topology.RoundKey(seed, 0, round_))
        partners = [[int(name) for name in row.partners] for row in rows]
        now = _blocking(islands, now, partners) if exchange == "blocking" else _step(islands, now, partners)
        history.append(now)
    return history


def _step(islands: Islands, now: Progress, partners: Sequence[Sequence[int]]) -> Progress:
    """Return the progress after a round whose exchange does not block."""
    links = islands.bandwidth
    ready = [start + steps for start, steps in zip(now.start, islands.steps, strict=True)]
    sending = [len(met) * islands.transfer_steps for met in partners]
    left = [ready[i] + sending[i] / links[i] for i in range(len(links))]
    after = Progress(ready.copy(), now.downlink_free.copy(), [0.0] * len(links), now.late)
    for i, met in enumerate(partners):
        if not met:
            after.start[i] = max(ready[i], now.owed[i])
            continue
        slowest = min(links[j] for j in met)
        delivered = max(left[j] for j in met)
        if links[i] >= slowest:
            after.start[i] = max(ready[i], delivered, now.owed[i])
            continue
        opens = max(now.downlink_free[i], min(ready[j] for j in met))
        arrival = max(delivered, opens + sending[i] / links[i])
        after.downlink_free[i] = arrival
        after.start[i] = max(left[i], now.owed[i])
        if arrival > after.start[i]:
            after.owed[i] = arrival
            after.late += len(met)
    return after


def _blocking(islands: Islands, now: Progress, partners: Sequence[Sequence[int]]) -> Progress:
    """Return the progress after a round in which all who meet wait for every transfer between them."""
    ready = [start + steps for start, steps in zip(now.start, islands.steps, strict=True)]
    after = Progress(ready.copy(), now.downlink_free, now.owed)
    for i, met in enumerate(partners):
        if met:
            group = [i, *met]
            narrow = min(islands.bandwidth[j] for j in group)
            after.start[i] = max(ready[j] for j in group) + len(met) * islands.transfer_steps / narrow
    return after


def gasloc_rounds(*, rounds: int = 400, seed: int = 0) -> dict[str, list[dict[str, float]]]:
    """Return the specification's table of round times, in local steps: 16 workers, H = 30, one straggler."""
    return {"rows": [_table_row(c, r, rounds, seed) for c, r in CASES]}


def _table_row(transfer_steps: float, fraction: float, rounds: int, seed: int) -> dict[str, float]:
    """Return one row of the table: c, r and the four columns."""
    fixed = one_straggler(transfer_steps, fraction, adapted=False)
    adapted = one_straggler(transfer_steps, fraction, adapted=True)
    none = one_straggler(transfer_steps, 1.0, adapted=False)
    return {
        "c": transfer_steps,
        "r": fraction,
        "diloco": round(diloco_round(fixed), 3),
        "fixed": round(gossip_round(fixed, rounds=rounds, seed=seed), 3),
        "adapted": round(gossip_round(adapted, rounds=rounds, seed=seed), 3),
        "none": round(gossip_round(none, rounds=rounds, seed=seed), 3),
    }
