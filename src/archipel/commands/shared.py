"""What the commands have in common: how one is declared, options that recur, how a result is printed."""

import argparse
import logging
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
