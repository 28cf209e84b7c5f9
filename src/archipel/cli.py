"""The command line. Its help imports neither torch nor the roles: each command loads what it needs."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import ArchipelError

DEMO_TICKS = 480
log = logging.getLogger("archipel")


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 it is done, 1 a run did not reach its end, 2 a person must mend something.

    What must be mended is one line on standard error. 130: interrupted before there was anything to stop.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines about failed handshakes; ours say more
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        code = options.command(options)
    except ArchipelError as error:
        print(f"archipel: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        if error.filename is None:
            raise
        print(f"archipel: {error.filename}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(code)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="archipel",
        description="Train one network on islands of compute that fail, differ in speed and sit far apart.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_train(commands)
    _add_syncer(commands)
    _add_learner(commands)
    _add_evaluator(commands)
    _add_data(commands)
    _add_simulate(commands)
    _add_plan(commands)
    _add_replay(commands)
    _add_tape(commands)
    _add_certs(commands)
    return parser


def _command(commands: Any, name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=run)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="TOML file of the run")
    _add_overrides(parser, "override one option, as in sync.learners=4; may be given several times")


def _add_overrides(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text
    )


def _load(options: argparse.Namespace) -> Any:
    from . import config

    loaded = config.load(options.config, options.overrides)
    for warning in config.warnings(loaded):
        log.warning("%s", warning)
    return loaded


# ---- whole runs on this machine ----


def _add_demo(commands: Any) -> None:
    parser = _command(
        commands, "demo", _demo, "train on this machine for a minute, killing a learner half-way"
    )
    parser.add_argument("--learners", type=int, default=3)
    parser.add_argument("--ticks", type=int, default=DEMO_TICKS, help="global steps of the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="", help="run folder; default: a new one under out/")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def _demo(options: argparse.Namespace) -> int:
    from . import config
    from .roles.fleet import Fleet, Kill, closes

    overrides = [
        f"sync.learners={options.learners}",
        f"sync.steps={options.ticks}",
        f"run.seed={options.seed}",
    ]
    loaded = config.load(Path(__file__).parent / "demo.toml", overrides)
    victim = f"learner-{options.learners - 1}"
    fleet = Fleet(loaded, _run_folder(options.out, loaded), [Kill(victim, options.ticks // 4)])
    fleet.quiet = options.json and not sys.stdout.isatty()
    summary = fleet.run()
    learner = fleet.series.learners.get(victim)
    checks = {
        "the run reached its end": summary["complete"],
        "validation loss fell": _fell(summary),
        "a learner was killed": summary["kills"] == 1,
        "the others' rounds went on": summary["longest_pause_s"] < _pause_limit_s(summary),
        "the victim is back and merged again": learner is not None and _merged_again(learner),
        "every token has a fate": closes(summary),
    }
    summary["checks"] = checks
    _report(summary, options.json)
    return 0 if all(checks.values()) else 1


def _fell(summary: dict[str, Any]) -> bool:
    first, last = summary["val_loss_first"], summary["val_loss_last"]
    return first is not None and last is not None and last < 0.9 * first


def _pause_limit_s(summary: dict[str, Any]) -> float:
    return float(summary["grace_cap_s"] + 2.5 * (summary["step_s"] or 0.0) + 0.5)


def _merged_again(learner: Any) -> bool:
    return learner.tokens_before > 0 and learner.rounds > learner.rounds_before > 0


def _add_train(commands: Any) -> None:
    parser = _command(commands, "train", _train, "run a syncer, learners and an evaluator on this machine")
    _add_config(parser)
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
    from .roles.fleet import Fleet

    if options.seed is not None:
        options.overrides.append(f"run.seed={options.seed}")
    loaded = _load(options)
    fleet = Fleet(
        loaded,
        _run_folder(options.out, loaded),
        resume=options.resume,
        init=options.init,
        tls=options.tls,
        quiet=options.json and not sys.stdout.isatty(),
    )
    summary = fleet.run()
    _report(summary, options.json)
    return 0 if summary["complete"] else 1


def _run_folder(out: str, loaded: Any) -> Path:
    if out:
        return Path(out).resolve()
    return (Path(loaded.run.out) / time.strftime(f"{loaded.run.name}-%Y%m%d-%H%M%S")).resolve()


def _report(summary: dict[str, Any], as_json: bool) -> None:
    import msgspec

    if as_json:
        print(msgspec.json.encode(summary).decode(), flush=True)
        return
    for key, value in summary.items():
        if isinstance(value, dict) and key in ("tokens", "checks"):
            print(f"{key}:")
            for name, item in value.items():
                print(f"  {name}: {item}")
        elif key == "warnings":
            for line in value:
                print(f"warning: {line}")
        elif not isinstance(value, dict | list):
            print(f"{key}: {value}")


# ---- one worker ----


def _add_worker(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--syncer", required=True, metavar="HOST:PORT")
    parser.add_argument("--out", default="out/learner", help="folder for tape, journal and metrics")
    parser.add_argument("--nice", type=int, default=0, help="lower the priority of computing by so much")
    parser.add_argument(
        "--tls", default="", metavar="DIR", help="folder of certificates (archipel certs DIR)"
    )


def _add_syncer(commands: Any) -> None:
    parser = _command(commands, "syncer", _syncer, "run a syncer that learners connect to")
    _add_config(parser)
    parser.add_argument(
        "--listen", default="127.0.0.1:7000", metavar="HOST:PORT", help=":7000 for all interfaces"
    )
    parser.add_argument("--out", default="out/syncer", help="run folder: tape, checkpoints, result")
    parser.add_argument(
        "--tls", default="", metavar="DIR", help="folder of certificates (archipel certs DIR)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest valid checkpoint")
    parser.add_argument("--init", default="", help="safetensors file of weights to start from")
    parser.add_argument("--address-file", default="", help="write the address really bound to this file")


def _syncer(options: argparse.Namespace) -> int:
    from .roles.syncer import Opening, serve

    opening = Opening(
        out=Path(options.out),
        listen=options.listen,
        tls=options.tls,
        resume=options.resume,
        init=options.init,
        address_file=options.address_file,
    )
    finish = serve(_load(options), opening)
    return 0 if finish.complete else 1


def _add_learner(commands: Any) -> None:
    parser = _command(commands, "learner", _learner, "train the run's built-in model as one of its learners")
    _add_worker(parser)
    parser.add_argument("--name", default="", help="unique in the run; the same name continues its data")
    parser.add_argument("--threads", type=int, default=0, help="computing threads; 0: torch's own choice")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")


def _learner(options: argparse.Namespace) -> int:
    from .roles.learner import Learner, train

    loaded = _load(options)
    learner = Learner(
        None,  # type: ignore[arg-type]  # built once the syncer has said which
        None,
        syncer=options.syncer,
        name=options.name,
        run=loaded.run.name,
        out=options.out,
        tls=options.tls,
        network=loaded.network,
    )
    train(loaded, learner, threads=options.threads, nice=options.nice, device=options.device)
    return 0


def _add_evaluator(commands: Any) -> None:
    parser = _command(
        commands, "evaluator", _evaluator, "follow a run and measure its merged model's validation loss"
    )
    _add_worker(parser)
    parser.add_argument("--fresh", action="store_true", help="evaluate the configuration's own weights first")


def _evaluator(options: argparse.Namespace) -> int:
    from .roles.evaluator import watch

    watch(
        _load(options),
        syncer=options.syncer,
        out=Path(options.out),
        tls=options.tls,
        nice=options.nice,
        fresh=options.fresh,
    )
    return 0


# ---- data, tapes, certificates ----


def _add_data(commands: Any) -> None:
    parser = _command(commands, "data", _data, "prepare token files")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    prepare = actions.add_parser(
        "prepare", help="turn text, JSONL, Parquet or a hub data set into a token file"
    )
    prepare.add_argument(
        "source", help="file, folder, glob, hub data set name, or `python`: the standard library"
    )
    prepare.add_argument("out", help="token file to write (.bin)")
    prepare.add_argument("--tokenizer", default="bytes", help="bytes, or a tokenizers JSON file")
    prepare.add_argument(
        "--train-bpe", type=int, default=0, metavar="ENTRIES", help="train the tokenizer first"
    )
    prepare.add_argument("--field", default="text", help="field of JSONL, column of Parquet")
    prepare.add_argument("--config", default=None, help="configuration of a hub data set")


def _data(options: argparse.Namespace) -> int:
    from .train import corpus

    tokenizer = options.tokenizer
    if options.train_bpe:
        tokenizer = str(Path(options.out).with_suffix(".tokenizer.json"))
        corpus.train_bpe(options.source, tokenizer, vocabulary=options.train_bpe, field=options.field)
    header = corpus.prepare(
        options.source, Path(options.out), tokenizer=tokenizer, field=options.field, config=options.config
    )
    print(f"{options.out}: {header.count} tokens, vocabulary {header.vocabulary}, digest {header.digest}")
    return 0


def _add_tape(commands: Any) -> None:
    parser = _command(commands, "tape", _tape, "summarise a run's tapes and show its last rounds")
    parser.add_argument("run", help="run folder")
    parser.add_argument("--rounds", type=int, default=10)


def _tape(options: argparse.Namespace) -> int:
    from .dashboard.terminal import summary

    print(summary(options.run, options.rounds))
    return 0


# ---- what if ----


def _add_simulate(commands: Any) -> None:
    parser = _command(commands, "simulate", _simulate, "run the protocol or a fleet in virtual time")
    parser.add_argument(
        "config", nargs="?", default=None, help="TOML file of a run; [sim] says what things cost"
    )
    _add_overrides(parser, "override one option, as in sim.jitter=0.1")
    parser.add_argument(
        "--out", default="", help="run folder for the tapes; default: a new one under run.out"
    )
    parser.add_argument(
        "--paper",
        choices=["table1", "section3", "gasloc-rounds"],
        help="a table of the papers, from this simulator",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def _simulate(options: argparse.Namespace) -> int:
    if options.paper == "table1":
        from .sim.goodput import table1

        _report(table1(options.seed), options.json)
    elif options.paper == "section3":
        from .sim.section3 import section3

        _report(section3(), options.json)
    elif options.paper == "gasloc-rounds":
        from .sim.rounds import gasloc_rounds

        _report(gasloc_rounds(), options.json)
    elif options.config is None:
        raise ArchipelError("simulate: give the TOML file of a run, or a table with --paper")
    else:
        return _simulate_run(options)
    return 0


def _simulate_run(options: argparse.Namespace) -> int:
    from .sim.scenario import Run, simulate

    loaded = _load(options)
    folder = _run_folder(options.out, loaded)
    if loaded.sim.compute == "tensors":
        from .roles.simulation import train_virtually

        outcome, losses = train_virtually(loaded, loaded.sim, seed=options.seed, folder=folder)
        _report({**outcome.figures(), "losses": losses.points}, options.json)
    else:
        run = Run(loaded.sync, loaded.sim, loaded.run.name, options.seed, loaded.data.shards)
        outcome = simulate(run, folder=folder)
        _report(outcome.figures(), options.json)
    return 0 if outcome.complete else 1


def _add_plan(commands: Any) -> None:
    parser = _command(
        commands, "plan", _plan, "recommend M, K, P, H, overlap and bits for a cluster and its links"
    )
    parser.add_argument("config", nargs="?", default=None, help="TOML file with a [plan] section")
    _add_overrides(parser, "describe the cluster, as in plan.chips=150000")
    parser.add_argument("--paper", choices=["table13"], help="the paper's bandwidth table, from this model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def _plan(options: argparse.Namespace) -> int:
    from . import config
    from .sim import bandwidth, planner

    if options.paper:
        _report(bandwidth.table13(), options.json)
        return 0
    section = config.section(options.config, "plan", planner.PlanOptions, options.overrides)
    plan = planner.plan(section, options.seed)
    if options.json:
        _report(planner.as_dict(plan), True)
    else:
        print(planner.render(plan))
    return 0


def _add_replay(commands: Any) -> None:
    parser = _command(
        commands, "replay", _replay, "replay a run: bit for bit, or the same storm with one thing changed"
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument(
        "--verify-only", action="store_true", help="only check that decisions follow from events"
    )
    _add_overrides(parser, "change one thing, as in sync.merge=average: an ablation, not a copy")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def _replay(options: argparse.Namespace) -> int:
    import msgspec

    from .tape.replay import verify
    from .tape.tape import digest

    began = time.monotonic()
    verified = verify(options.run)
    found: dict[str, Any] = {
        "equal": verified.equal,
        "records": verified.records,
        "first_difference": msgspec.to_builtins(verified.first_difference),
        "tape_digest": digest(options.run),
    }
    if verified.equal and not options.verify_only:
        from .roles.local import replay

        found = msgspec.to_builtins(replay(Path(options.run), options.overrides, progress=_progress))
    found["seconds"] = round(time.monotonic() - began, 3)
    _report(found, options.json)
    return 0 if found["equal"] or options.overrides else 1


def _progress(records: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{records} records", end="", file=sys.stderr, flush=True)


def _add_certs(commands: Any) -> None:
    parser = _command(commands, "certs", _certs, "make a test authority with certificates for a fleet")
    parser.add_argument("directory")
    parser.add_argument(
        "--host", action="append", default=[], help="name or address the syncer is reached by"
    )


def _certs(options: argparse.Namespace) -> int:
    from .runtime.security import make_authority

    for path in make_authority(options.directory, options.host):
        print(path)
    return 0
