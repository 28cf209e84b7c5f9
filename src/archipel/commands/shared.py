"""What the commands have in common: how one is declared, options that recur, how a result is printed."""

import argparse
import logging
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("archipel")


def command(commands: Any, name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=run)
    return parser


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="TOML file of the run")
    add_overrides(parser, "override one option, as in sync.learners=4; may be given several times")


def add_overrides(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text
    )


def natural(text: str) -> int:
    """Return an option's whole number, 0 or more."""
    return _at_least(0, text)


def positive(text: str) -> int:
    """Return an option's whole number, 1 or more."""
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return value


def pause(text: str) -> float:
    """Return an option's pause: a finite length of time, 0 or more."""
    value = _seconds(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of 0 or more")
    return value


def duration(text: str) -> float:
    """Return an option's length of time: finite, above 0."""
    value = _seconds(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _seconds(text: str) -> float:
    """Return a finite number, or -1 for what is none."""
    try:
        value = float(text)
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0


def device(text: str) -> str:
    """Return an option's device; whether there is such a GPU is known later."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no device: use cpu, cuda or cuda:N, N from 0 on")
    return text


def load(options: argparse.Namespace) -> Any:
    from .. import config

    loaded = config.load(options.config, options.overrides)
    for warning in config.warnings(loaded):
        log.warning("%s", warning)
    return loaded


def run_folder(out: str, loaded: Any) -> Path:
    if out:
        return Path(out).resolve()
    return (Path(loaded.run.out) / time.strftime(f"{loaded.run.name}-%Y%m%d-%H%M%S")).resolve()


def report(summary: dict[str, Any], as_json: bool) -> None:
    import msgspec

    if as_json:
        print(msgspec.json.encode(summary).decode(), flush=True)
        return
    for key, value in summary.items():
        if isinstance(value, dict) and key in ("tokens", "checks", "first_difference"):
            print(f"{key}:")
            for name, item in value.items():
                print(f"  {name}: {item}")
        elif key == "warnings":
            for line in value:
                print(f"warning: {line}")
        elif not isinstance(value, dict | list):
            print(f"{key}: {value}")
