"""`score`: how well an exported model answers multiple-choice questions."""

import argparse
import math
import sys
from typing import Any

from ..errors import ConfigError, DataError
from .shared import command, device


def add_score(commands: Any) -> None:
    parser = command(commands, "score", _score, "multiple-choice accuracy of an exported model")
    parser.add_argument("model", help="run folder, or a folder of exported weights")
    parser.add_argument("questions", nargs="+", help="JSONL file in the format of HellaSwag or of ARC")
    parser.add_argument("--limit", type=int, default=0, help="first questions of each file; 0: all")
    parser.add_argument("--batch", type=int, default=16, help="endings at once")
    parser.add_argument(
        "--tokenizer", default="", help="bytes, or a tokenizers JSON; default: the one that was exported"
    )
    parser.add_argument("--device", type=device, default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=0, help="computing threads; 0: torch's own choice")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def _score(options: argparse.Namespace) -> int:
    import torch

    from ..roles.worker import device_of
    from ..train import choices, exported
    from ..train.corpus import load_tokenizer

    if options.limit < 0 or options.threads < 0 or options.batch < 1:
        raise ConfigError(
            f"--limit={options.limit} and --threads={options.threads} must be at least 0, "
            f"--batch={options.batch} at least 1"
        )
    if options.threads:
        torch.set_num_threads(options.threads)
    files = {path: choices.load_questions(path, options.limit) for path in options.questions}
    folder = exported.folder_of(options.model)
    encoder = load_tokenizer(options.tokenizer) if options.tokenizer else exported.load_encoder(folder)
    loaded = exported.load_model(folder)
    if encoder.vocabulary > loaded.vocabulary:
        raise DataError(
            f"tokenizer {encoder.name} has {encoder.vocabulary} entries, the model {loaded.vocabulary}: "
            "give the one the model was trained with"
        )
    model = loaded.model.to(device_of(options.device))
    scores = {
        path: choices.score(model, held, encoder, context_max=loaded.context_max, batch=options.batch)
        for path, held in files.items()
    }
    _print(str(folder), scores, options.json)
    return 0


def _print(folder: str, scores: dict[str, Any], as_json: bool) -> None:
    import msgspec

    if as_json:
        rows = [{"file": path, **score._asdict()} for path, score in scores.items()]
        print(msgspec.json.encode({"model": folder, "files": rows}).decode(), flush=True)  # NaN becomes null
        return
    for path, score in scores.items():
        print(f"{path}: {score.questions} questions, chance {score.chance:.3f}")
        print(f"  accuracy            {_with_error(score.accuracy, score.accuracy_error)}")
        print(f"  normalised accuracy {_with_error(score.normalised, score.normalised_error)}")
        if score.ties:
            print(f"  {score.ties} ties for the likeliest ending, each counted as the answer's share")
    sys.stdout.flush()


def _with_error(share: float, error: float) -> str:
    return f"{share:.3f}" if math.isnan(error) else f"{share:.3f} ± {error:.3f}"
