"""Multiple choice by likelihood: which ending does the model find likeliest after the context?

Questions come from a local JSONL file in the format of HellaSwag (`ctx`, `endings`, `label`) or ARC
(`question`, `choices`, `answerKey`). An ending's score is the sum of its tokens' log-probabilities given the
context; the normalised accuracy divides it by the ending's length in bytes, as the usual harnesses do.
lm-eval (on local tasks, with exported weights) covers the rest.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import DataError
from .corpus import Encoder
from .evaluate import evaluating
from .models import device_of, logits


class Question(NamedTuple):
    """`answer`: index into `endings`."""

    context: str
    endings: tuple[str, ...]
    answer: int


class Score(NamedTuple):
    """Shares of questions answered right, by plain and by length-normalised likelihood; what chance would
    give."""

    accuracy: float
    normalised: float
    chance: float
    questions: int


def load_questions(path: str | Path) -> list[Question]:
    """Return the questions of a JSONL file. Raises DataError that names the line and what is wrong with
    it."""
    found = []
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give a JSONL file of questions") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_question(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}, line {number}: {error!r}; HellaSwag has ctx, endings, label; "
                    "ARC has question, choices, answerKey"
                ) from None
    if not found:
        raise DataError(f"{path} has no question")
    return found


def _question(row: dict[str, Any]) -> Question:
    if "endings" in row:
        question = Question(row["ctx"], tuple(" " + ending for ending in row["endings"]), int(row["label"]))
    else:
        choices = row["choices"]
        texts = tuple(" " + text for text in choices["text"])
        question = Question(
            f"Question: {row['question']}\nAnswer:", texts, list(choices["label"]).index(row["answerKey"])
        )
    if not 0 <= question.answer < len(question.endings) or len(question.endings) < 2:
        raise ValueError(f"answer {question.answer} of {len(question.endings)} endings")
    return question


def score(
    model: nn.Module, questions: Sequence[Question], encoder: Encoder, *, context_max: int, batch: int = 16
) -> Score:
    """Return how a model does. context_max: the model's longest context; what is too long loses its
    beginning."""
    rows = [
        (at, choice, *_encode(encoder, question.context, ending, context_max))
        for at, question in enumerate(questions)
        for choice, ending in enumerate(question.endings)
    ]
    rows.sort(key=lambda row: len(row[2]))  # batches of like length waste little on padding
    sums = [[0.0] * len(question.endings) for question in questions]
    with evaluating(model):
        for start in range(0, len(rows), batch):
            part = rows[start : start + batch]
            for (at, choice, *_), value in zip(part, _likelihoods(model, part), strict=True):
                sums[at][choice] = value
    right = normalised = 0
    for question, values in zip(questions, sums, strict=True):
        lengths = [len(ending.encode()) for ending in question.endings]
        right += int(np.argmax(values)) == question.answer
        normalised += int(np.argmax(np.divide(values, lengths))) == question.answer
    chance = sum(1 / len(question.endings) for question in questions) / len(questions)
    return Score(right / len(questions), normalised / len(questions), chance, len(questions))


def _encode(encoder: Encoder, context: str, ending: str, context_max: int) -> tuple[np.ndarray, int]:
    """Return the tokens of context and ending, and how many belong to the ending."""
    before, after = (
        np.asarray(tokens[:-1], np.int64)  # without the separator
        for tokens in encoder.encode([context.encode(), ending.encode()])
    )
    tokens = np.concatenate([before, after])[-(context_max + 1) :]
    return tokens, min(len(after), len(tokens) - 1)


def _likelihoods(model: nn.Module, part: Sequence[tuple[int, int, np.ndarray, int]]) -> list[float]:
    width = max(len(tokens) for _, _, tokens, _ in part)
    padded = torch.zeros(len(part), width, dtype=torch.int64)
    for row, (_, _, tokens, _) in enumerate(part):
        padded[row, : len(tokens)] = torch.from_numpy(tokens)
    scores: Tensor = logits(model, padded[:, :-1].to(device_of(model))).float().log_softmax(-1).cpu()
    found = scores.gather(-1, padded[:, 1:, None]).squeeze(-1)  # (rows, width - 1)
    return [
        float(found[row, len(tokens) - 1 - count : len(tokens) - 1].sum())
        for row, (_, _, tokens, count) in enumerate(part)
    ]
