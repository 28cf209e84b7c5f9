"""Runs the paper's tables at small scale, in virtual time with real tensors, cell by cell.

    python experiments/run.py [NAME ...] [--minutes 90] [--cores 2]

Each experiment is a TOML file in this folder: what all its cells share, and its cells in the order they are
run. A cell is overrides of a run's options; its result is appended to `results/NAME.json` as soon as it is
there, so that a run that is cut short goes on where it stopped. Cells that were not run say `not run`;
nothing is filled in. `--table NAME` prints what there is, mean ± spread over seeds, beside the paper's
figure.
"""

import argparse
import json
import statistics
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def load(name: str) -> dict[str, Any]:
    """Return an experiment's description."""
    return tomllib.loads((HERE / f"{name}.toml").read_text())


def cells(experiment: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all cells: every variant, for every number of learners, for every seed, in the order to run
    them. A variant may name seeds and learners of its own."""
    return [
        {"variant": variant, "learners": learners, "seed": seed}
        for seed in experiment["seeds"]
        for learners in experiment["learners"]
        for variant in experiment["variant"]
        if seed in variant.get("seeds", (seed,)) and learners in variant.get("learners", (learners,))
    ]


def key(cell: dict[str, Any]) -> str:
    """Return what a cell's result is kept under."""
    return f"{cell['variant']['name']} · M={cell['learners']} · seed {cell['seed']}"


def run_cell(experiment: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """Train one cell and return its figures."""
    from archipel.config import load as load_config
    from archipel.roles.simulation import train_virtually

    began = time.monotonic()
    variant, learners = cell["variant"], cell["learners"]
    lone = variant.get("data_parallel", False)
    batch = experiment["batch"] * (learners if lone else 1)
    workers = 1 if lone else learners
    steps = experiment["tokens"] // (experiment["batch"] * learners * experiment["sequence"])
    overrides = [
        f"run.seed={cell['seed']}", f"sync.learners={workers}", f"sync.steps={steps}", f"data.batch={batch}",
        f"data.sequence={experiment['sequence']}",
    ]  # fmt: skip
    filled = [text.replace("{M}", str(workers)).replace("{T}", str(steps)) for text in variant["set"]]
    config = load_config(None, [*overrides, *experiment["set"], *filled])
    outcome, losses = train_virtually(config, config.sim, seed=cell["seed"])
    figures = outcome.figures()
    kept = ("complete", "goodput", "virtual_s", "rounds", "rounds_per_step", "participants", "merged_share")
    return {
        "loss": losses.points[-1]["loss"],
        "accuracy": losses.points[-1]["accuracy"],
        "points": losses.points,
        **{name: figures[name] for name in kept},
        "tokens": figures["tokens"]["consumed"] // config.sync.fragments,
        "corpus": losses.corpus.digest,
        "parameters": sum(state.weights.numel() for state in losses.outer.states),
        "seconds": round(time.monotonic() - began, 1),
    }


def read(name: str) -> dict[str, Any]:
    """Return the results there are."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(name: str, results: dict[str, Any]) -> None:
    """Keep the results, whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    temporary = RESULTS / f"{name}.tmp"
    temporary.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    temporary.rename(RESULTS / f"{name}.json")


def run(names: list[str], minutes: float, cores: int) -> None:
    """Run what is missing, in order, until the time is up; what has begun is finished."""
    until = time.monotonic() + 60 * minutes
    todo = [
        (name, cell)
        for name in names
        for cell in cells(load(name))
        if key(cell) not in read(name)
    ]  # fmt: skip
    with ProcessPoolExecutor(cores) as pool:
        running: dict[Any, tuple[str, dict[str, Any]]] = {}
        while todo or running:
            while todo and len(running) < cores and time.monotonic() < until:
                name, cell = todo.pop(0)
                running[pool.submit(run_cell, load(name), cell)] = name, cell
            if not running:
                break
            done, _ = wait(running, return_when="FIRST_COMPLETED")
            for future in done:
                name, cell = running.pop(future)
                if error := future.exception():
                    print(f"{name}: {key(cell)}: failed: {error!r}", flush=True)
                    continue
                write(name, {**read(name), key(cell): future.result()})
                print(f"{name}: {key(cell)}: loss {future.result()['loss']:.4f}", flush=True)
    print(f"{len(todo)} cells not run")


def table(name: str) -> str:
    """Return the experiment's results as lines: mean ± spread over the seeds that were run."""
    experiment, results = load(name), read(name)
    lines = [f"{name}: {experiment['title']}", f"paper: {experiment['paper']}", ""]
    for learners in experiment["learners"]:
        for variant in experiment["variant"]:
            keys = [key({"variant": variant, "learners": learners, "seed": s}) for s in experiment["seeds"]]
            found = [results[k] for k in keys if k in results]
            lines.append(f"M={learners}  {variant['name']:<34} {_summary(found)}")
    return "\n".join(lines)


def _summary(found: list[dict[str, Any]]) -> str:
    if not found:
        return "not run"
    losses = [each["loss"] for each in found]
    spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    shares = f"merged {statistics.mean(each['merged_share'] for each in found):.0%}"
    goodput = f"goodput {statistics.mean(each['goodput'] for each in found):.1%}"
    return f"loss {statistics.mean(losses):.4f}{spread} ({len(found)} seeds)  {goodput}  {shares}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="experiments; default: all, in order")
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="only print what there is")
    options = parser.parse_args()
    names = options.names or sorted(path.stem for path in HERE.glob("*.toml"))
    if not options.table:
        run(names, options.minutes, options.cores)
    for name in names:
        print(table(name), end="\n\n")


if __name__ == "__main__":
    main()
