"""Whole runs on this machine: `demo`, `train`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .shared import add_config, command, load, report, run_folder

DEMO_LEARNERS, DEMO_TICKS = 3, 480


def add_demo(commands: Any) -> None:
    parser = command(
        commands, "demo", _demo, "train on this machine for a minute, killing a learner half-way"
    )
    parser.add_argument("--gossip", action="store_true", help="four peers that exchange models, no syncer")
    parser.add_argument("--learners", type=int, default=None, help=f"default: {DEMO_LEARNERS}")
    ticks = f"global steps of the run; default: {DEMO_TICKS}"
    parser.add_argument("--ticks", type=int, default=None, help=ticks)
    parser.add_argument("--rounds", type=int, default=None, help="rounds of the run with --gossip")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="", help="run folder; default: a new one under out/")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def _demo(options: argparse.Namespace) -> int:
    from .. import config
    from ..dashboard.collect import longest_pause
    from ..roles.fleet import Fleet, Kill
    from ..roles.summary import closes, records_of

    _refuse_what_does_not_apply(options)
    if options.gossip:
        return _demo_gossip(options)
    learners = DEMO_LEARNERS if options.learners is None else options.learners
    ticks = DEMO_TICKS if options.ticks is None else options.ticks
    overrides = [f"sync.learners={learners}", f"sync.steps={ticks}", f"run.seed={options.seed}"]
    loaded = config.load(Path(__file__).parents[1] / "demo.toml", overrides)
    victim = f"learner-{learners - 1}"
    fleet = Fleet(loaded, run_folder(options.out, loaded), [Kill(victim, ticks // 4)])
    fleet.quiet = options.json and not sys.stdout.isatty()
    summary = fleet.run()
    learner = fleet.series.learners.get(victim)
    # From when all are there: while processes start, those that train have less than their share.
    pause = longest_pause(records_of(fleet.out, "syncer"), loaded.sync.quorum, learners=learners)
    checks = {
        "the run reached its end": summary["complete"],
        "validation loss fell": _fell(summary),
        "a learner was killed": summary["kills"] == 1,
        "the others' rounds went on": pause.longest_pause_s < _pause_limit_s(summary),
        "the victim is back and merged again": learner is not None and _merged_again(learner),
        "every token has a fate": closes(summary),
    }
    summary["checks"] = checks
    report(summary, options.json)
    return 0 if all(checks.values()) else 1


def _refuse_what_does_not_apply(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option of the other demo, which would be ignored."""
    for name in ("learners", "ticks") if options.gossip else ("rounds",):
        value = getattr(options, name)
        if value is None:
            continue
        if options.gossip:
            why = "the gossip demo has four peers and is as long as --rounds says; leave it out"
        else:
            why = "the demo with a syncer is as long as --ticks says; leave it out, or add --gossip"
        raise ConfigError(f"--{name} {value} does not apply: {why}")


def _demo_gossip(options: argparse.Namespace) -> int:
    from .. import config
    from ..roles.fleet import Fleet, Kill
    from ..roles.summary import closes

    rounds = [] if options.rounds is None else [f"gossip.rounds={options.rounds}"]
    overrides = [f"run.seed={options.seed}", *rounds]
    loaded = config.load(Path(__file__).parents[1] / "demo_gossip.toml", overrides)
    victim = f"peer-{loaded.gossip.peers - 1}"
    fleet = Fleet(loaded, run_folder(options.out, loaded), [Kill(victim, loaded.gossip.rounds // 3)])
    fleet.quiet = options.json and not sys.stdout.isatty()
    summary = fleet.run()
    limit_s = loaded.gossip.timeout_s_max + 2.5 * loaded.gossip.local_steps * (summary["step_s"] or 0.0) + 0.5
    checks = {
        "the run reached its end": summary["complete"],
        "validation loss fell": _fell(summary),
        "a peer was killed": summary["kills"] == 1,
        "the others' rounds went on": summary["longest_pause_s"] < limit_s,
        "the victim cloned a state and exchanged again": victim in fleet.series.back,
        "all peers hold the one mean model": set(summary["digests"].values()) == {summary["digest"]},
        "every token has a fate": closes(summary),
    }
    summary["checks"] = checks
    report(summary, options.json)
    return 0 if all(checks.values()) else 1


def _fell(summary: dict[str, Any]) -> bool:
    first, last = summary["val_loss_first"], summary["val_loss_last"]
    return first is not None and last is not None and last < 0.9 * first


def _pause_limit_s(summary: dict[str, Any]) -> float:
    return float(summary["grace_cap_s"] + 2.5 * (summary["step_s"] or 0.0) + 0.5)


def _merged_again(learner: Any) -> bool:
    return learner.tokens_before > 0 and learner.rounds > learner.rounds_before > 0


def add_train(commands: Any) -> None:
    parser = command(
        commands, "train", _train, "run a syncer, learners and an evaluator, or peers, on this machine"
    )
    add_config(parser)
    parser.add_argument("--seed", type=int, default=None, help="the run's seed (run.seed)")
    parser.add_argument("--out", default="", help="run folder; default: a new one under run.out")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest valid checkpoint of --out"
    )
    parser.add_argument("--init", default="", help="safetensors file of weights to start from")
    parser.add_argument(
        "--tls", default="", metavar="DIR", help="folder of certificates (archipel certs DIR)"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def _train(options: argparse.Namespace) -> int:
    from ..roles.fleet import Fleet

    if options.seed is not None:
        options.overrides.append(f"run.seed={options.seed}")
    loaded = load(options)
    fleet = Fleet(
        loaded,
        run_folder(options.out, loaded),
        resume=options.resume,
        init=options.init,
        tls=options.tls,
        quiet=options.json and not sys.stdout.isatty(),
    )
    summary = fleet.run()
    report(summary, options.json)
    return 0 if summary["complete"] else 1
