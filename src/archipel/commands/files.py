"""Files around a run: `data`, `tape`, `certs`."""

import argparse
from pathlib import Path
from typing import Any

from .shared import command, log, natural, report


def add_data(commands: Any) -> None:
    parser = command(commands, "data", _data, "prepare token files")
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
        "--train-bpe", type=_entries, default=0, metavar="ENTRIES", help="train the tokenizer first"
    )
    prepare.add_argument("--field", default="text", help="field of JSONL, column of Parquet")
    prepare.add_argument("--config", default=None, help="configuration of a hub data set")


def _entries(text: str) -> int:
    entries = natural(text)
    if entries < 257:
        raise argparse.ArgumentTypeError(f"{text} entries are too few: 256 bytes and a separator are 257")
    return entries


def _data(options: argparse.Namespace) -> int:
    from ..train import corpus

    for path in corpus.not_text(options.source):
        log.warning("%s is hardly UTF-8 text: its bytes become tokens all the same; convert it first", path)
    tokenizer = options.tokenizer
    if options.train_bpe:
        tokenizer = str(Path(options.out).with_suffix(".tokenizer.json"))
        corpus.train_bpe(options.source, tokenizer, vocabulary=options.train_bpe, field=options.field)
    header = corpus.prepare(
        options.source, Path(options.out), tokenizer=tokenizer, field=options.field, config=options.config
    )
    print(f"{options.out}: {header.count} tokens, vocabulary {header.vocabulary}, digest {header.digest}")
    return 0


def add_tape(commands: Any) -> None:
    parser = command(commands, "tape", _tape, "tell a run's figures from its tapes, and show its last rounds")
    parser.add_argument("run", help="run folder, of a live run or a simulated one")
    parser.add_argument("--rounds", type=natural, default=10, help="how many of the last rounds to show")
    parser.add_argument(
        "--loss", type=float, action="append", default=[], metavar="LOSS", help="tell when it was reached"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON: all figures")


def _tape(options: argparse.Namespace) -> int:
    if options.json:
        from ..dashboard.figures import figures_of

        report(figures_of(options.run, options.loss), True)
        return 0
    from ..dashboard.terminal import summary

    print(summary(options.run, options.rounds, options.loss))
    return 0


def add_certs(commands: Any) -> None:
    parser = command(commands, "certs", _certs, "make a test authority with certificates for a fleet")
    parser.add_argument("directory")
    parser.add_argument(
        "--host", action="append", default=[], help="name or address the syncer is reached by"
    )


def _certs(options: argparse.Namespace) -> int:
    from ..runtime.security import make_authority

    for path in make_authority(options.directory, options.host):
        print(path)
    return 0
