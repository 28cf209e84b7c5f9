"""How many protocol events a second one core simulates, with costs in place of tensors.

    python benchmarks/events.py [--quick]

Eight learners in the storm of `runs/storm.toml`, three ways: the machines and their virtual network alone,
under a witness, and under a witness with every worker's tape written, as `archipel simulate` does it. An
event is one record: one call of a machine. CPU seconds of this process; rounds are interleaved, medians.
The ratio is the slowest of the three over 50,000 a second.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from archipel.chaos.plan import play
from archipel.config import load
from archipel.protocol import messages as m
from archipel.sim import scenario
from archipel.sim.engine import Engine
from archipel.sim.ports import EngineOptions
from archipel.sim.scenario import Run

LIMIT_HZ = 50_000
STORM = Path(__file__).parents[1] / "runs" / "storm.toml"
WAYS = ("protocol alone", "with a witness", "with a witness and tapes")


def alone(run: Run) -> int:
    """Run the machines with nobody watching; return the events."""
    sim = run.sim
    engine = Engine(
        run.sync,
        EngineOptions(run.seed, sim.fragment_bytes, sim.fold_s, sim.merge_s, run.shards),
        run=run.name,
    )
    names = [f"learner-{number}" for number in range(run.sync.learners)]
    for number, name in enumerate(names):
        engine.add(name, scenario.costs_of(run, number))
    play(scenario.storm(run, names, m.SYNCER), engine)
    engine.run(until=sim.horizon_s)
    assert engine.complete
    return engine.handled


def watched(run: Run, folder: Path | None) -> int:
    """Run under a witness, with tapes where there is a folder for them; return the events."""
    outcome = scenario.simulate(run, folder=folder, remember=False, digested=False)
    assert outcome.complete
    return outcome.engine.handled


def measure(run: Run) -> dict[str, float]:
    """Return events per CPU second of each way, once."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            began = time.process_time()
            if way == WAYS[0]:
                events = alone(run)
            else:
                events = watched(run, Path(folder) if way == WAYS[2] else None)
            found[way] = events / (time.process_time() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a size of no meaning, to see that it runs")
    options = parser.parse_args()
    config = load(STORM, ["sync.steps=60" if options.quick else "sync.steps=2000"])
    run = Run(config.sync, config.sim, config.run.name, seed=1, shards=config.data.shards)
    rounds = [measure(run) for _ in range(1 if options.quick else 5)]
    medians = {way: statistics.median(found[way] for found in rounds) for way in WAYS}
    for way, rate in medians.items():
        spread = [found[way] for found in rounds]
        print(f"{way}: {rate:,.0f} events a second ({min(spread):,.0f} … {max(spread):,.0f})")
    print(f"events: {min(medians.values()) / LIMIT_HZ:.3f} (limit 1.0)")


if __name__ == "__main__":
    main()
