"""Pictures of runs and of tables: `draw`. Needs matplotlib, the extra `plots`."""

import argparse
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .shared import command, duration, positive

UTILISATION_POINTS = 240  # of each curve, evenly over the logarithm of bandwidth


def add_draw(commands: Any) -> None:
    parser = command(commands, "draw", _nothing, "draw a run or a table as SVG, PDF or PNG")
    kinds = parser.add_subparsers(required=True, metavar="PICTURE")
    timeline = _kind(kinds, "timeline", _timeline, "who stepped, pushed, merged, waited and died when")
    timeline.add_argument("run", help="run folder, of a live run or a simulated one")
    timeline.add_argument("--from", dest="since", default="", metavar="WHEN", help="seconds, or a tick: 40t")
    timeline.add_argument("--to", dest="until", default="", metavar="WHEN", help="seconds, or a tick: 64t")
    loss = _kind(kinds, "loss", _loss, "validation loss against time")
    loss.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    goodput = _kind(
        kinds, "goodput", _goodput, "goodput and uptime against chips, beside the paper's Table 1"
    )
    goodput.add_argument("--seed", type=int, default=0)
    goodput.add_argument("--failures", type=positive, default=20_000, help="failed chips in each cell")
    bandwidth = _kind(kinds, "bandwidth", _bandwidth, "compute utilisation against bandwidth, by method")
    bandwidth.add_argument("--step-s", type=duration, default=1.0, help="compute of one inner step")
    bandwidth.add_argument("--sites", type=positive, default=8)
    experiment = _kind(kinds, "experiment", _experiment, "final losses of an experiment's cells")
    experiment.add_argument("results", help="JSON file in experiments/results")


def _kind(kinds: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser = command(kinds, name, run, text)
    parser.add_argument("--out", default=f"{name}.svg", help=f"picture to write, default {name}.svg")
    parser.add_argument("--title", default=None)
    return parser


def _nothing(options: argparse.Namespace) -> int:
    raise AssertionError("a picture is required")


def _written(options: argparse.Namespace, figure: Any) -> int:
    from ..dashboard import pictures

    pictures.save(figure, options.out)
    print(options.out)
    return 0


def _timeline(options: argparse.Namespace) -> int:
    from ..dashboard import pictures, timeline

    pictures.check(options.out)
    window = timeline.window_of(options.run, options.since, options.until)
    scene = timeline.scene_of(options.run, window)
    title = f"{Path(options.run).resolve().name}: {window.start - window.zero:.4g} to "
    title += f"{window.end - window.zero:.4g} s of {window.whole_s:.4g} s"
    return _written(options, pictures.timeline(scene, title if options.title is None else options.title))


def _loss(options: argparse.Namespace) -> int:
    from ..dashboard import pictures, reading

    pictures.check(options.out)
    curves = []
    runs = [Path(run).resolve() for run in options.runs]
    alike = len({run.name for run in runs}) < len(runs)
    for run in runs:
        found = reading.losses_from_start(run)
        if not found:
            raise ConfigError(f"{run} holds no validation losses: its evaluator writes them to metrics.jsonl")
        at_s, values = zip(*found, strict=True)
        curves.append(pictures.Curve(f"{run.parent.name}/{run.name}" if alike else run.name, at_s, values))
    return _written(options, pictures.loss(curves, options.title or ""))


def _goodput(options: argparse.Namespace) -> int:
    from ..dashboard import pictures
    from ..sim import baselines
    from ..sim.goodput import table1

    pictures.check(options.out)
    found: Any = table1(options.seed, options.failures)
    fleets = pictures.Fleets(
        baselines.TABLE1_CHIPS,
        found["goodput"],
        found["uptime"],
        baselines.PAPER_GOODPUT,
        baselines.PAPER_UPTIME,
    )
    return _written(options, pictures.goodput(fleets, options.title or ""))


def _bandwidth(options: argparse.Namespace) -> int:
    from ..dashboard import pictures
    from ..sim import bandwidth

    pictures.check(options.out)
    known = bandwidth.PAPER_DECOUPLED
    setting = f"{known.parameters / 1e9:g}B parameters, {options.step_s:g} s steps, {options.sites} sites"
    demands = [_demand(*method, options) for method in _methods()]
    return _written(options, pictures.bandwidth(demands, setting if options.title is None else options.title))


def _methods() -> list[tuple[str, Any, str]]:
    """Return name, exchange and the paper's row of each method; constants as in `plan --paper table13`."""
    from msgspec.structs import replace

    from ..sim import bandwidth

    decoupled = bandwidth.PAPER_DECOUPLED
    h, p, hidden = decoupled.interval_steps, decoupled.fragments, decoupled.hidden_steps
    return [
        ("data parallel", bandwidth.PAPER_DATA_PARALLEL, "dp"),
        (f"DiLoCo, H={h}", replace(decoupled, method="diloco", fragments=1), ""),
        (f"Streaming, P={p}, 1 step hidden", replace(decoupled, method="streaming", hidden_steps=1.0), ""),
        (f"Decoupled, P={p}, {hidden:g} steps hidden", decoupled, "decoupled"),
        ("Decoupled, int4", replace(decoupled, bits=4), "decoupled-int4"),
    ]


def _demand(name: str, exchange: Any, row: str, options: argparse.Namespace) -> Any:
    from msgspec.structs import replace

    from ..dashboard.pictures import Demand
    from ..sim import bandwidth

    exchange = replace(exchange, step_s=options.step_s, sites=options.sites)
    scale = 1 / options.step_s  # a step five times as long needs a fifth
    points = range(UTILISATION_POINTS + 1)
    gbit_s = [0.05 * scale * 10 ** (4 * point / UTILISATION_POINTS) for point in points]
    printed = bandwidth.PAPER_TABLE13.get((options.step_s, options.sites, row), ())
    paper = tuple(zip(printed, bandwidth.UTILISATIONS, strict=False))
    return Demand(name, gbit_s, [bandwidth.utilisation(exchange, gbit) for gbit in gbit_s], paper)


def _experiment(options: argparse.Namespace) -> int:
    import msgspec

    from ..dashboard import pictures

    pictures.check(options.out)
    try:
        results = msgspec.json.decode(Path(options.results).read_bytes(), type=dict[str, dict[str, Any]])
        cells = [(*_cell(key), float(found["loss"])) for key, found in results.items()]
    except (msgspec.DecodeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{options.results} is not a file that experiments/run.py wrote: {error}"
        ) from error
    if not cells:
        raise ConfigError(f"{options.results} holds no cell yet: run `python experiments/run.py`")
    kinds = dict.fromkeys((name, learners) for name, learners, _ in cells)
    variants = [
        pictures.Variant(name, learners, [loss for *kind, loss in cells if kind == [name, learners]])
        for name, learners in kinds
    ]
    title = Path(options.results).stem if options.title is None else options.title
    return _written(options, pictures.experiment(variants, title))


def _cell(key: str) -> tuple[str, int]:
    """Return the variant's name and the number of learners in a cell's key: `NAME · M=4 · seed 0`."""
    name, learners, _ = key.rsplit(" · ", 2)
    return name, int(learners.removeprefix("M="))
