"""One worker of a run: `syncer`, `learner`, `evaluator`; of a gossip run: `rendezvous`, `peer`."""

import argparse
from pathlib import Path
from typing import Any

from .shared import add_config, command, device, load, log, natural


def _add_worker(parser: argparse.ArgumentParser, home: str = "--syncer", *, required: bool = True) -> None:
    add_config(parser)
    note = None if required else "none: the others are those of the file's section [members]"
    parser.add_argument(home, required=required, default="", metavar="HOST:PORT", help=note)
    parser.add_argument("--out", default="out/learner", help="folder for tape, journal and metrics")
    parser.add_argument("--nice", type=natural, default=0, help="lower the priority of computing by so much")
    parser.add_argument(
        "--tls", default="", metavar="DIR", help="folder of certificates (archipel certs DIR)"
    )


def _add_center(parser: argparse.ArgumentParser, out: str) -> None:
    add_config(parser)
    parser.add_argument(
        "--listen", default="127.0.0.1:7000", metavar="HOST:PORT", help=":7000 for all interfaces"
    )
    parser.add_argument("--out", default=out, help="run folder: tape, checkpoints, result")
    parser.add_argument(
        "--tls", default="", metavar="DIR", help="folder of certificates (archipel certs DIR)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest valid checkpoint")
    parser.add_argument("--address-file", default="", help="write the address really bound to this file")


def _opening(options: argparse.Namespace, init: str = "") -> Any:
    from ..roles.syncer import Opening

    return Opening(
        out=Path(options.out),
        listen=options.listen,
        tls=options.tls,
        resume=options.resume,
        init=init,
        address_file=options.address_file,
    )


def add_syncer(commands: Any) -> None:
    parser = command(commands, "syncer", _syncer, "run a syncer that learners connect to")
    _add_center(parser, "out/syncer")
    parser.add_argument("--init", default="", help="safetensors file of weights to start from")


def _syncer(options: argparse.Namespace) -> int:
    from ..roles.syncer import serve

    finish = serve(load(options), _opening(options, options.init))
    return 0 if finish.complete else 1


def add_rendezvous(commands: Any) -> None:
    text = "run the rendezvous of a gossip run: it says who is a member, and carries no weights"
    _add_center(command(commands, "rendezvous", _rendezvous, text), "out/rendezvous")


def _rendezvous(options: argparse.Namespace) -> int:
    from ..roles.rendezvous import serve

    finish = serve(load(options), _opening(options))
    return 0 if finish.complete else 1


def add_learner(commands: Any) -> None:
    parser = command(commands, "learner", _learner, "train the run's built-in model as one of its learners")
    _add_worker(parser)
    _add_trainer(parser)


def _add_trainer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="", help="unique in the run; the same name continues its data")
    parser.add_argument("--threads", type=natural, default=0, help="computing threads; 0: torch's own choice")
    parser.add_argument("--device", type=device, default="cpu", help="cpu, cuda or cuda:N")


def _learner(options: argparse.Namespace) -> int:
    from ..roles.fragments import Fragments
    from ..roles.worker import Worker, train

    loaded = load(options)
    learner = Worker(Fragments(), role="learner", home=options.syncer, **_known(options, loaded))
    train(loaded, learner, threads=options.threads, nice=options.nice, device=options.device)
    return 0


def _known(options: argparse.Namespace, loaded: Any) -> dict[str, Any]:
    return {
        "name": options.name,
        "run": loaded.run.name,
        "out": options.out,
        "tls": options.tls,
        "network": loaded.network,
    }


def add_peer(commands: Any) -> None:
    text = "train the run's built-in model as a peer of a gossip run"
    parser = command(commands, "peer", _peer, text)
    _add_worker(parser, "--rendezvous", required=False)
    _add_trainer(parser)
    text = "where other peers reach this one; default: its address in [members], else any port of this host"
    parser.add_argument("--listen", default="", metavar="HOST:PORT", help=text)
    parser.add_argument(
        "--advertise",
        default="",
        metavar="HOST:PORT",
        help="where they do, if a gateway forwards to --listen",
    )
    parser.add_argument("--resume", action="store_true", help="start from the newest valid checkpoint here")


def _peer(options: argparse.Namespace) -> int:
    from ..roles.peer import exchanges_of, peer_worker, train_peer
    from ..roles.worker import name_of

    loaded = load(options)
    options.name = name_of(options.name)
    listed = None if options.rendezvous else loaded
    if options.rendezvous and loaded.members:
        log.warning("[members] is not used: with --rendezvous=%s that one names them", options.rendezvous)
    half = exchanges_of(options.name, options.out, loaded.run.name)
    known = {"home": options.rendezvous, "listed": listed, **_known(options, loaded)}
    worker = peer_worker(
        half, listen=options.listen, advertise=options.advertise, resume=options.resume, **known
    )
    train_peer(loaded, worker, half, threads=options.threads, nice=options.nice, device=options.device)
    return 0


def add_evaluator(commands: Any) -> None:
    parser = command(
        commands, "evaluator", _evaluator, "follow a run and measure its merged model's validation loss"
    )
    _add_worker(parser)
    parser.add_argument("--fresh", action="store_true", help="evaluate the configuration's own weights first")


def _evaluator(options: argparse.Namespace) -> int:
    from ..roles.evaluator import watch

    watch(
        load(options),
        syncer=options.syncer,
        out=Path(options.out),
        tls=options.tls,
        nice=options.nice,
        fresh=options.fresh,
    )
    return 0
