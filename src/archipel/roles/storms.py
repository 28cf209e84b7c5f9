"""Many random storms in virtual time, each under the witness: which seeds fail, and with what.

The seed draws the faults, the hardware and the jitter of a run; everything else is its TOML file. A storm
fails when the witness sees what must never happen, a machine breaks, the run does not end, or tokens are
unaccounted for.

Invariants: a seed fares the same alone and among others; memory does not grow with the number of storms.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from msgspec import Struct

from ..config import Config, load
from ..sim import gossip_scenario, scenario

AT_ONCE = 64  # seeds that are handed out together


class Storm(Struct, frozen=True):
    """How one seed fared. `failure`: "" if the run ended as it must."""

    seed: int
    events: int = 0
    faults: int = 0
    virtual_s: float = 0.0
    failure: str = ""


def storms(path: str, overrides: list[str], seeds: range, cores: int = 1) -> Iterator[Storm]:
    """Yield how each seed of a run's TOML file fares, in order. cores: processes that share the seeds."""
    one = partial(storm, path, overrides)
    if cores == 1:
        yield from map(one, seeds)
        return
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        for first in range(seeds.start, seeds.stop, AT_ONCE):
            yield from pool.map(one, range(first, min(first + AT_ONCE, seeds.stop)))


def storm(path: str, overrides: list[str], seed: int) -> Storm:
    """Return how one seed fares, with costs in place of tensors and no tapes."""
    config = load(path, [*overrides, f"run.seed={seed}"])
    try:
        outcome, unaccounted = _simulated(config, seed)
    except Exception as error:  # whatever a machine breaks with is what is looked for
        return Storm(seed, failure=f"{type(error).__name__}: {error}")
    figures = outcome.figures()
    failure = "" if outcome.complete else f"no end by {outcome.engine.now:.0f} s"
    failure = failure or unaccounted
    return Storm(seed, figures["events"], figures["faults"], figures["virtual_s"], failure)


def _simulated(config: Config, seed: int) -> tuple[Any, str]:
    """Return the outcome of a run, and what its tokens do not add up to."""
    if config.gossip is not None:
        run = gossip_scenario.GossipRun(config.gossip, config.sim, config.run.name, seed, config.data.shards)
        return gossip_scenario.simulate(run), ""
    run = scenario.Run(config.sync, config.sim, config.run.name, seed, config.data.shards)
    outcome = scenario.simulate(run, remember=False)
    closes = outcome.engine.syncer.ledger.closes()
    return outcome, "" if closes else f"tokens do not add up: {outcome.engine.syncer.ledger.table()}"
