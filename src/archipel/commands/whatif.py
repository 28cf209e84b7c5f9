"""What if: `simulate`, `plan`, `replay`."""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ArchipelError, TapeError
from . import tables
from .shared import add_overrides, command, load, natural, pause, report, run_folder


def add_simulate(commands: Any) -> None:
    parser = command(commands, "simulate", _simulate, "run the protocol or a fleet in virtual time")
    parser.add_argument(
        "config", nargs="?", default=None, help="TOML file of a run; [sim] says what things cost"
    )
    add_overrides(parser, "override one option, as in sim.jitter=0.1")
    parser.add_argument(
        "--out", default="", help="run folder for the tapes; default: a new one under run.out"
    )
    parser.add_argument(
        "--paper",
        choices=["table1", "section3", "gasloc-rounds"],
        help="a table of the papers, from this simulator",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seeds",
        type=_seeds,
        metavar="FROM:TO",
        help="a storm for each of these seeds, TO excluded, without tapes: which of them fail",
    )
    parser.add_argument(
        "--cores", type=natural, default=0, help="processes that share the seeds; 0: all cores"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FROM:TO with FROM below TO, as in 0:500")
    return range(int(first), int(last))


def _simulate(options: argparse.Namespace) -> int:
    if options.paper == "table1":
        from ..sim.goodput import table1

        return _paper(table1(options.seed), options)
    if options.paper == "section3":
        from ..sim.section3 import section3

        return _paper(section3(), options)
    if options.paper == "gasloc-rounds":
        from ..sim.rounds import gasloc_rounds

        return _paper(gasloc_rounds(), options)
    if options.config is None:
        raise ArchipelError("simulate: give the TOML file of a run, or a table with --paper")
    if options.seeds is not None:
        return _simulate_storms(options)
    return _simulate_run(options)


def _paper(found: Any, options: argparse.Namespace) -> int:
    if options.json:
        report(found, True)
    else:
        print(tables.PAPERS[options.paper](found))
    return 0


def _simulate_storms(options: argparse.Namespace) -> int:
    from ..roles.storms import storms

    began = time.monotonic()
    load(options)  # what is wrong with the file is said once
    kept = [word for text in options.overrides for word in ("--set", text)]
    totals = {"storms": 0, "failed": 0, "events": 0, "faults": 0}
    failed = []
    for storm in storms(
        options.config, options.overrides, options.seeds, options.cores or os.cpu_count() or 1
    ):
        totals["storms"] += 1
        totals["events"] += storm.events
        totals["faults"] += storm.faults
        if storm.failure:
            totals["failed"] += 1
            words = ["archipel", "simulate", options.config, "--seed", str(storm.seed), *kept]
            failed.append({"seed": storm.seed, "failure": storm.failure, "command": shlex.join(words)})
            print(
                f"seed {storm.seed}: {storm.failure}\n  {failed[-1]['command']}", file=sys.stderr, flush=True
            )
    seconds = time.monotonic() - began
    figures = {"events_per_s": round(totals["events"] / seconds), "seconds": round(seconds, 3)}
    report({**totals, **figures, "failures": failed}, options.json)
    return 1 if failed else 0


def _simulate_run(options: argparse.Namespace) -> int:
    from ..sim.scenario import Run, simulate

    options.overrides.append(f"run.seed={options.seed}")
    loaded = load(options)
    folder = run_folder(options.out, loaded)
    if loaded.gossip is not None:
        return _simulate_gossip(options, loaded, folder)
    if loaded.sim.compute == "tensors":
        from ..roles.simulation import train_virtually

        outcome, losses = train_virtually(loaded, loaded.sim, seed=options.seed, folder=folder)
        _keep_losses(folder, losses.points)
        report({**outcome.figures(), "losses": losses.points}, options.json)
    else:
        run = Run(loaded.sync, loaded.sim, loaded.run.name, options.seed, loaded.data.shards)
        outcome = simulate(run, folder=folder)
        report(outcome.figures(), options.json)
    return 0 if outcome.complete else 1


def _simulate_gossip(options: argparse.Namespace, loaded: Any, folder: Path) -> int:
    from ..sim.gossip_scenario import GossipRun, simulate

    if loaded.sim.compute == "tensors":
        from ..roles.gossiping import gossip_virtually

        outcome, figures = gossip_virtually(loaded, loaded.sim, seed=options.seed, folder=folder)
        _keep_losses(folder, figures.points)
        ended = outcome.witness.concluded
        mean = dict(ended.figures) if ended is not None else {}
        report({**outcome.figures(), **mean, "losses": figures.points}, options.json)
    else:
        run = GossipRun(loaded.gossip, loaded.sim, loaded.run.name, options.seed, loaded.data.shards)
        outcome = simulate(run, folder=folder)
        report(outcome.figures(), options.json)
    return 0 if outcome.complete else 1


def _keep_losses(folder: Path, points: list[dict[str, Any]]) -> None:
    """Leave the losses of a simulated run where the evaluator of a live one leaves them."""
    import msgspec

    lines = [
        {"time": point["at_s"], "worker": "evaluator", "kind": "validation", "round": point["round"],
         "loss": point["loss"], "accuracy": point["accuracy"]}
        for point in points
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def add_plan(commands: Any) -> None:
    parser = command(
        commands, "plan", _plan, "recommend M, K, P, H, overlap and bits for a cluster and its links"
    )
    parser.add_argument("config", nargs="?", default=None, help="TOML file with a [plan] section")
    add_overrides(parser, "describe the cluster, as in plan.chips=150000")
    parser.add_argument("--paper", choices=["table13"], help="the paper's bandwidth table, from this model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def _plan(options: argparse.Namespace) -> int:
    from .. import config
    from ..sim import bandwidth, planner

    if options.paper:
        return _paper(bandwidth.table13(), options)
    section = config.section(options.config, "plan", planner.PlanOptions, options.overrides)
    plan = planner.plan(section, options.seed)
    if options.json:
        report(planner.as_dict(plan), True)
    else:
        print(planner.render(plan))
    return 0


def add_replay(commands: Any) -> None:
    parser = command(
        commands, "replay", _replay, "replay a run: bit for bit, or the same storm with one thing changed"
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument(
        "--verify-only", action="store_true", help="only check that decisions follow from events"
    )
    add_overrides(parser, "change one thing, as in sync.merge=average: an ablation, not a copy")
    parser.add_argument(
        "--resume", action="store_true", help="go on where a replay of this run was interrupted"
    )
    parser.add_argument(
        "--work",
        default="",
        metavar="DIR",
        help="keep there what to go on from, and go on from what is there; default: RUN/replay",
    )
    parser.add_argument(
        "--save-every", type=pause, default=60.0, metavar="SECONDS", help="how often that is written"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def _replay(options: argparse.Namespace) -> int:
    import msgspec

    from ..tape.replay import verify
    from ..tape.tape import digest

    began = time.monotonic()
    verified = verify(options.run)
    found: dict[str, Any] = {
        "equal": verified.equal,
        "records": verified.records,
        "first_difference": msgspec.to_builtins(verified.first_difference),
        "tape_digest": digest(options.run),
    }
    headers, warnings = _begun(Path(options.run))
    lacking = _without_centre(Path(options.run), headers)
    followed = verified.equal and not options.verify_only
    if followed:
        if lacking:
            raise TapeError(f"{lacking}, or check what is here with --verify-only")
        if not any("model" in header.settings for header in headers):
            raise TapeError(
                f"{options.run} was simulated with costs only and has no tensors to follow: check its "
                "decisions with --verify-only, or simulate it with --set sim.compute=tensors"
            )
        from ..roles.replaying import ReplayStopped

        try:
            found = msgspec.to_builtins(_follow(options, verified.records))
        except ReplayStopped as stopped:
            print(f"archipel: {stopped}", file=sys.stderr)
            return 1
    found["seconds"] = round(time.monotonic() - began, 3)
    found["warnings"] = [*warnings, *([lacking] if lacking else [])]
    report(found, options.json)
    return 0 if found["equal"] or (followed and options.overrides) else 1


def _begun(run: Path) -> tuple[list[Any], list[str]]:
    """Return the headers of the tapes that hold records, and a warning for each that holds none.

    TapeError where there is no record at all.
    """
    from ..tape.tape import read, workers

    headers, warnings = [], []
    for path in [file.path for file in workers(run)] if run.is_dir() else [run]:
        tape = read(path)
        if next(iter(tape), None) is None:
            warnings.append(
                f"{path} has no record: its process was killed at once, or the file was emptied; nothing of "
                "it was verified"
            )
        else:
            headers.append(tape.header)
        tape.close()
    if not headers:
        raise TapeError(f"{run} has no record in any tape: there is nothing to replay; copy the tapes again")
    return headers, warnings


def _without_centre(run: Path, headers: list[Any]) -> str:
    """Return what to say of a run folder that lacks its syncer's or rendezvous's tape; peers of a list have
    neither."""
    centre = any(header.role in ("syncer", "rendezvous") for header in headers)
    if not run.is_dir() or centre or any(header.settings["machine"].get("members") for header in headers):
        return ""
    return (
        f"{run} has no tape of the run's syncer or rendezvous: what it decided is not verified; copy its "
        f"tape files to {run / 'tape'}"
    )


def _follow(options: argparse.Namespace, records: int) -> Any:
    from ..roles.followed_peers import is_gossip, replay_gossip
    from ..roles.replaying import conditions, replay
    from ..roles.resuming import Work
    from ..roles.worker import StopFlag
    from .progress import Bar

    run = Path(options.run)
    for line in conditions(run):
        print(f"archipel: this replay may not be bit for bit: {line}", file=sys.stderr)
    work = Work(
        Path(options.work or run / "replay"), options.resume or bool(options.work), options.save_every
    )
    follow: Callable[..., Any] = replay_gossip if is_gossip(run) else replay
    with Bar(records) as bar:
        return follow(run, options.overrides, work=work, progress=bar.show, stopped=StopFlag())
