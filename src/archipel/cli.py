"""The command line. Its help imports neither torch nor the roles: each command loads what it needs."""

import argparse
import logging
import os
import sys

from .commands import draw, files, runs, score, whatif, workers
from .errors import ArchipelError


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
    runs.add_demo(commands)
    runs.add_train(commands)
    workers.add_syncer(commands)
    workers.add_learner(commands)
    workers.add_evaluator(commands)
    workers.add_rendezvous(commands)
    workers.add_peer(commands)
    files.add_data(commands)
    score.add_score(commands)
    whatif.add_simulate(commands)
    whatif.add_plan(commands)
    whatif.add_replay(commands)
    files.add_tape(commands)
    draw.add_draw(commands)
    files.add_certs(commands)
    return parser
