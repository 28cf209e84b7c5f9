"""Runs the paper's tables at small scale, in virtual time with real tensors, cell by cell.

    python experiments/run.py [NAME ...] [--minutes 90] [--cores 2] [--seeds 0,1]

Each experiment is a TOML file in this folder: what all its cells share, and its cells in the order they are
run. A cell is overrides of a run's options; its result is appended to `results/NAME.json` as soon as it is
there, so that a run that is cut short goes on where it stopped. Cells that were not run say `not run`;
nothing is filled in, but a cell with all the options of another has that one's result. `--table NAME` prints
what there is, mean ± spread over seeds, beside the paper's figure.

A variant may have `data_parallel = true` (one learner with the batch of all), `steps = 0.9` (so many of the
ticks that its tokens take), `against = "another"` (a row its virtual time is compared with: for as many
tokens, and to the worse of their two final losses). `equal_tokens = true` in an experiment gives runs on
failing hardware as many more ticks as the fast path says they lose. Experiments of `kind = "gossip"` are
run by `gossip_cells.py`.
"""

import argparse
import importlib.util
import json
import statistics
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor, wait
from itertools import pairwise
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
    if experiment.get("kind") == "gossip":
        return gossip().run_cell(experiment, cell)  # type: ignore[no-any-return]
    from archipel.roles.simulation import train_virtually

    began = time.monotonic()
    config, own_every = configured(experiment, cell)
    outcome, losses = train_virtually(config, config.sim, seed=cell["seed"], own_every=own_every)
    figures = outcome.figures()
    kept = (
        "complete", "goodput", "uptime", "virtual_s", "ticks", "rounds", "rounds_per_step", "participants",
        "merged_share", "slices_failed",
    )  # fmt: skip
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


def gossip() -> Any:
    """Return the module beside this one that runs the cells of experiments of kind "gossip"."""
    spec = importlib.util.spec_from_file_location("gossip_cells", HERE / "gossip_cells.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configured(experiment: dict[str, Any], cell: dict[str, Any]) -> tuple[Any, int]:
    """Return a cell's configuration, and how often a lone learner's own weights are evaluated, in steps."""
    if experiment.get("kind") == "gossip":
        return gossip().configured(experiment, cell), 0
    from archipel.config import load as load_config
    from archipel.sim import goodput

    variant, learners = cell["variant"], cell["learners"]
    lone = variant.get("data_parallel", False)
    batch = experiment["batch"] * (learners if lone else 1)
    workers = 1 if lone else learners
    calm_steps = experiment["tokens"] // (experiment["batch"] * learners * experiment["sequence"])

    def loaded(steps: int, added: list[str]) -> Any:
        first = [
            f"run.seed={cell['seed']}", f"sync.learners={workers}", f"sync.steps={steps}",
            f"data.batch={batch}", f"data.sequence={experiment['sequence']}",
        ]  # fmt: skip
        filled = [text.replace("{M}", str(workers)).replace("{T}", str(steps)) for text in added]
        return load_config(None, [*first, *experiment["set"], *filled])

    steps = round(calm_steps * variant.get("steps", 1.0))
    config = loaded(steps, variant["set"])
    if experiment.get("equal_tokens") and not lone and config.sim.hardware is not None:
        # Ticks go on while learners stand still: as many more as are needed for the same tokens.
        steps = round(steps / goodput.simulate(config.sim.hardware).goodput)
        config = loaded(steps, variant["set"])
    shared = loaded(calm_steps, [])
    every = shared.evaluate.every_rounds * shared.sync.interval_steps // shared.sync.fragments
    return config, every if lone else 0


def signature(experiment: dict[str, Any], cell: dict[str, Any]) -> str:
    """Return what two cells share that come out the same: all options, seeds among them, and the method."""
    method = cell["variant"].get("method"), experiment.get("kind")
    return repr((method, configured(experiment, cell)))


def finished() -> dict[str, dict[str, Any]]:
    """Return the results of all experiments by signature, each with the cell it is of."""
    found = {}
    for name in sorted(path.stem for path in HERE.glob("*.toml")):
        results = read(name)
        for cell in cells(load(name)):
            if (result := results.get(key(cell))) is not None:
                same_as = result.get("same_as", f"{name}: {key(cell)}")
                found[signature(load(name), cell)] = {**result, "same_as": same_as}
    return found


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


def run(names: list[str], minutes: float, cores: int, seeds: set[int] | None = None) -> None:
    """Run what is missing, in order, until the time is up; what has begun is finished. seeds: None: all."""
    until, known = time.monotonic() + 60 * minutes, finished()
    todo = [
        (name, cell)
        for name in names
        for cell in cells(load(name))
        if key(cell) not in read(name) and (seeds is None or cell["seed"] in seeds)
    ]  # fmt: skip
    with ProcessPoolExecutor(cores) as pool:
        running: dict[Any, tuple[str, dict[str, Any]]] = {}
        while todo or running:
            while todo and len(running) < cores and time.monotonic() < until:
                name, cell = todo.pop(0)
                if (again := known.get(signature(load(name), cell))) is not None:
                    write(name, {**read(name), key(cell): again})
                    print(f"{name}: {key(cell)}: as in {again['same_as']}", flush=True)
                    continue
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
            if learners not in variant.get("learners", (learners,)):
                continue
            found = _found(experiment, results, variant["name"], learners)
            summary = gossip().summary if found and experiment.get("kind") == "gossip" else _summary
            line = f"M={learners}  {variant['name']:<34} {summary(found)}"
            if found and "against" in variant:
                line += _compared(found, _found(experiment, results, variant["against"], learners))
            lines.append(line)
            if "paper" in variant:
                lines.append(f"{'':<39} paper: {variant['paper']}")
    return "\n".join(lines)


def _found(experiment: dict[str, Any], results: dict[str, Any], name: str, learners: int) -> dict[int, Any]:
    """Return the results of one row by seed."""
    keys = {
        seed: key({"variant": {"name": name}, "learners": learners, "seed": seed})
        for seed in experiment["seeds"]
    }
    return {seed: results[key] for seed, key in keys.items() if key in results}


def _summary(found: dict[int, Any]) -> str:
    if not found:
        return "not run"

    def mean(name: str) -> float:
        return statistics.mean(each[name] for each in found.values())

    losses = [each["loss"] for each in found.values()]
    spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    accuracy = (
        f"  accuracy {mean('accuracy'):.1%}" if all("accuracy" in each for each in found.values()) else ""
    )
    return (
        f"loss {mean('loss'):.4f}{spread} ({len(found)} seeds){accuracy}  goodput {mean('goodput'):.1%}  "
        f"merged {mean('merged_share'):.0%}  {mean('tokens') / 1e6:.2f} M tokens in {mean('virtual_s'):.0f} s"
    )


def _compared(found: dict[int, Any], others: dict[int, Any]) -> str:
    """Return how long this row took against another one: for as many tokens, and to the same loss."""
    both = [(found[seed], others[seed]) for seed in found if seed in others]
    if not both:
        return "  (nothing to compare with)"
    per_token = statistics.mean(
        (mine["virtual_s"] / mine["tokens"]) / (its["virtual_s"] / its["tokens"]) for mine, its in both
    )
    losses = [max(mine["loss"], its["loss"]) for mine, its in both]
    to_loss = statistics.mean(
        time_to(mine["points"], loss) / time_to(its["points"], loss)
        for (mine, its), loss in zip(both, losses, strict=True)
    )
    return f"  time ×{per_token:.3g} for as many tokens, ×{to_loss:.3g} to loss {statistics.mean(losses):.3f}"


def time_to(points: list[dict[str, Any]], loss: float) -> float:
    """Return the virtual time at which a curve first reached a loss, between two points on their line."""
    for before, after in pairwise(points):
        if after["loss"] <= loss:
            share = (before["loss"] - loss) / max(before["loss"] - after["loss"], 1e-12)
            return before["at_s"] + min(max(share, 0.0), 1.0) * (after["at_s"] - before["at_s"])
    return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="experiments; default: all, in order")
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--seeds", default="", help="only these, as in 0,1")
    parser.add_argument("--table", action="store_true", help="only print what there is")
    options = parser.parse_args()
    names = options.names or sorted(path.stem for path in HERE.glob("*.toml"))
    if not options.table:
        seeds = {int(seed) for seed in options.seeds.split(",")} if options.seeds else None
        run(names, options.minutes, options.cores, seeds)
    for name in names:
        print(table(name), end="\n\n")


if __name__ == "__main__":
    main()
