"""Multiple choice by likelihood: which ending does the model find likeliest after the context?

Questions come from a local JSONL file, a line each, in the format of HellaSwag (`ctx`, `endings`, `label`) or
of ARC (`question`, `choices`, `answerKey`), and are put to the model as lm-eval's tasks of those names put
them. An ending's score is the sum of its tokens' log-probabilities given the context; the normalised one is
that sum by the ending's length in characters.

Invariants: a score depends on the question alone, not on the batch it was computed in but for the last bits.
An ending is never cut, a context loses its beginning if it must. Where k endings score highest, exactly
alike, the answer among them is worth 1/k: a model that knows nothing scores what chance does, wherever the
answers are. lm-eval takes the first of them.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor, nn

from ..errors import DataError, ModelError
from .corpus import Encoder
from .evaluate import evaluating
from .models import device_of, logits

DELIMITER = " "  # between context and ending
FORMATS = "HellaSwag has ctx, endings, label; ARC has question, choices, answerKey"


class Question(NamedTuple):
    """`answer`: index into `endings`. `place`: the file and the line it is from, for messages."""

    context: str
    endings: tuple[str, ...]
    answer: int
    place: str = "a question"


class Score(NamedTuple):
    """Shares of questions answered right, by plain and by length-normalised likelihood, and their standard
    errors (NaN for a single question); what chance would give; questions whose best endings tie."""

    accuracy: float
    accuracy_error: float
    normalised: float
    normalised_error: float
    chance: float
    questions: int
    ties: int


class HellaSwag(Struct):
    """A line of HellaSwag. The data set's own files have the last three fields, a home-made one may not."""

    endings: list[str]
    label: int | str
    ctx: str = ""
    activity_label: str | None = None
    ctx_a: str | None = None
    ctx_b: str | None = None


class Choice(Struct):
    """One choice as ARC's own files have it."""

    text: str
    label: str


class Choices(Struct):
    """The choices as the Hugging Face data set has them."""

    text: list[str]
    label: list[str]


class Stem(Struct):
    """A question as ARC's own files have it."""

    stem: str
    choices: list[Choice]


class Arc(Struct):
    """A line of ARC, in either of its two forms."""

    question: Any
    answerKey: str
    choices: Choices | None = None


def load_questions(path: str | Path, limit: int = 0) -> list[Question]:
    """Return the questions of a JSONL file; limit: the first so many, 0: all.

    Raises DataError that names the line and what is wrong with it.
    """
    found = []
    try:
        lines = Path(path).read_bytes().split(b"\n")  # not splitlines: text may hold other line separators
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give a JSONL file of questions") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_question(line, f"{path}, line {number}"))
        if limit and len(found) == limit:
            break
    if not found:
        raise DataError(f"{path} has no question: {FORMATS}")
    return found


def _question(line: bytes, place: str) -> Question:
    try:
        row = msgspec.json.decode(line)
        if not isinstance(row, dict):
            raise ValueError(f"a question is an object, not {type(row).__name__}")
        context, endings, answer = _hellaswag(row) if "endings" in row else _arc(row)
        _check(context, endings, answer)
    except (ValueError, msgspec.DecodeError) as error:
        raise DataError(f"{place}: {error}; {FORMATS}") from None
    return Question(context, tuple(endings), answer, place)


def _hellaswag(row: dict[str, Any]) -> tuple[str, list[str], int]:
    read = msgspec.convert(row, HellaSwag)
    if isinstance(read.label, str) and not re.fullmatch("[0-9]+", read.label):
        raise ValueError(f"label {read.label!r} is no index of an ending")
    if read.activity_label is None or read.ctx_a is None or read.ctx_b is None:
        if "ctx" not in row:
            raise ValueError("there is no ctx")
        return read.ctx, read.endings, int(read.label)
    context = f"{read.activity_label}: {read.ctx_a} {read.ctx_b.capitalize()}"
    return _tidied(context), [_tidied(ending) for ending in read.endings], int(read.label)


def _tidied(text: str) -> str:
    """Return text of HellaSwag without the marks that WikiHow left in it."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _arc(row: dict[str, Any]) -> tuple[str, list[str], int]:
    if "question" not in row:
        raise ValueError(f"of unknown format, its fields are {', '.join(sorted(row)) or 'none'}")
    read = msgspec.convert(row, Arc)
    if isinstance(read.question, dict):
        stem = msgspec.convert(read.question, Stem)
        question, choices = stem.stem, stem.choices
    else:
        question, held = msgspec.convert(read.question, str), msgspec.convert(read.choices, Choices)
        if len(held.text) != len(held.label):
            raise ValueError(f"{len(held.text)} choices have {len(held.label)} labels")
        choices = [Choice(*pair) for pair in zip(held.text, held.label, strict=True)]
    labels = [choice.label for choice in choices]
    if read.answerKey not in labels:
        raise ValueError(f"answerKey {read.answerKey!r} is none of the labels {labels}")
    return (
        f"Question: {question}\nAnswer:",
        [choice.text for choice in choices],
        labels.index(read.answerKey),
    )


def _check(context: str, endings: list[str], answer: int) -> None:
    if len(endings) < 2:
        raise ValueError(f"{len(endings)} endings leave nothing to choose: give two or more")
    if not 0 <= answer < len(endings):
        raise ValueError(f"answer {answer} of {len(endings)} endings: it must be 0 to {len(endings) - 1}")
    if not all(endings):
        raise ValueError(f"ending {endings.index('')} is empty")
    if any("\0" in text for text in (context, *endings)):
        raise ValueError("a NUL character, which separates documents, is in its text")


class Row(NamedTuple):
    """One ending to score. tokens: (n,) int64, of context and ending; the last `count` are the ending's."""

    question: int
    ending: int
    tokens: np.ndarray
    count: int


def score(
    model: nn.Module, questions: Sequence[Question], encoder: Encoder, *, context_max: int, batch: int = 16
) -> Score:
    """Return how a model does. context_max: its longest context in tokens; batch: endings at once.

    Raises DataError for an ending longer than the context, ModelError where the model says NaN.
    """
    found = likelihoods(model, questions, encoder, context_max=context_max, batch=batch)
    plain, normalised, ties = [], [], 0
    for question, values in zip(questions, found, strict=True):
        lengths = [len(ending) for ending in question.endings]
        plain.append(_credit(values, question.answer))
        normalised.append(_credit(values / lengths, question.answer))
        ties += int((values == values.max()).sum()) > 1
    chance = sum(1 / len(question.endings) for question in questions) / len(questions)
    return Score(*_mean(plain), *_mean(normalised), chance, len(questions), ties)


def _credit(values: np.ndarray, answer: int) -> float:
    """Return the answer's share of the best values."""
    best = values == values.max()
    return float(best[answer] / best.sum())


def _mean(credits: list[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    count = len(credits)
    error = float(np.std(credits, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return sum(credits) / count, error


def likelihoods(
    model: nn.Module, questions: Sequence[Question], encoder: Encoder, *, context_max: int, batch: int = 16
) -> list[np.ndarray]:
    """Return for each question the log-likelihoods (nats, float64) of its endings."""
    rows = list(_rows(questions, encoder, context_max))
    rows.sort(key=lambda row: -len(row.tokens))  # like lengths waste little on padding; the longest first
    sums = [np.zeros(len(question.endings)) for question in questions]
    known: dict[bytes, float] = {}  # of this question and ending: equal endings are to tie exactly
    with evaluating(model):
        for start in range(0, len(rows), batch):
            part = rows[start : start + batch]
            for row, value in zip(part, _sums(model, part), strict=True):
                key = row.question.to_bytes(8) + row.tokens.tobytes()
                sums[row.question][row.ending] = known.setdefault(key, value)
    for question, values in zip(questions, sums, strict=True):
        if not np.isfinite(values).all():
            raise ModelError(f"{question.place}: log-likelihoods {values}: are the model's weights sound?")
    return sums


def _rows(questions: Sequence[Question], encoder: Encoder, context_max: int) -> Iterator[Row]:
    (separator,) = next(encoder.encode([b""]))
    for at, question in enumerate(questions):
        body = question.context.rstrip()
        spaces = question.context[len(body) :] + DELIMITER
        endings = [spaces + ending for ending in question.endings]
        before, *apart = _encoded(encoder, [body, *endings])
        joined = _encoded(encoder, [body + ending for ending in endings])
        for choice, (whole, alone) in enumerate(zip(joined, apart, strict=True)):
            # As the text is cut in training; apart only where a token would lie across the border, so that
            # every ending has the same context.
            begins = np.array_equal(whole[: len(before)], before) and len(whole) > len(before)
            after = whole[len(before) :] if begins else alone
            if len(after) > context_max:
                raise DataError(
                    f"{question.place}: ending {choice} has {len(after)} tokens, the model's context holds "
                    f"{context_max}: shorten it or score a model of a longer context"
                )
            context = before if len(before) else np.array([separator])  # as a document begins
            yield Row(at, choice, np.concatenate([context, after])[-(context_max + 1) :], len(after))


def _encoded(encoder: Encoder, texts: list[str]) -> list[np.ndarray]:
    """Return the tokens of each text, without the separator."""
    found = encoder.encode(text.encode() for text in texts)
    return [tokens[:-1].astype(np.int64) for tokens in found]


def _sums(model: nn.Module, part: Sequence[Row]) -> list[float]:
    """Return the summed log-probability of each row's ending."""
    width = max(len(row.tokens) for row in part)
    padded = torch.zeros(len(part), width, dtype=torch.int64)  # on the right: no token sees what follows it
    for at, row in enumerate(part):
        padded[at, : len(row.tokens)] = torch.from_numpy(row.tokens)
    padded = padded.to(device_of(model))
    scores: Tensor = logits(model, padded[:, :-1])  # (rows, width - 1, vocabulary)
    found = []
    for at, row in enumerate(part):
        end = len(row.tokens)
        targets = padded[at, end - row.count : end, None]
        held = scores[at, end - row.count - 1 : end - 1].float().log_softmax(-1).gather(-1, targets)
        found.append(float(held.double().sum()))
    return found
