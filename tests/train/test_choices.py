"""The scorer picks the likeliest ending, whatever the batch, the padding and the file format."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from archipel.errors import DataError
from archipel.train.choices import Question, load_questions, score
from archipel.train.corpus import load_tokenizer


class Successor(nn.Module):
    """Sure that each byte is followed by the next one in the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return 20.0 * nn.functional.one_hot((tokens + 1) % 256, 256).float()


BYTES = load_tokenizer("bytes")
ALPHABET = [
    Question("abc", ("xyz", "defgh"), 1),
    Question("klm", ("nop", "zz"), 0),
    Question("a long context 0123", ("456", "654", "999"), 0),
]


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_the_likeliest_ending_wins(batch: int) -> None:
    found = score(Successor(), ALPHABET, BYTES, context_max=64, batch=batch)
    assert (found.accuracy, found.normalised, found.questions) == (1.0, 1.0, 3)
    assert found.chance == pytest.approx((1 / 2 + 1 / 2 + 1 / 3) / 3)


def test_a_context_that_is_too_long_loses_its_beginning() -> None:
    question = Question("q" * 500 + "abc", ("def", "zzz"), 0)
    assert score(Successor(), [question], BYTES, context_max=8).accuracy == 1.0


def test_length_normalisation_does_not_favour_short_endings() -> None:
    question = Question("abc", ("z", "defzg"), 1)  # two surprises in all against one at once
    found = score(Successor(), [question], BYTES, context_max=64)
    assert (found.accuracy, found.normalised) == (0.0, 1.0)


def test_both_formats_are_read(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    arc = {"question": "Which?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}
    rows = [{"ctx": "one", "endings": ["two", "ten"], "label": 0}, arc]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    first, second = load_questions(path)
    assert first == Question("one", (" two", " ten"), 0)
    assert second == Question("Question: Which?\nAnswer:", (" x", " y"), 1)


@pytest.mark.parametrize("line", ["{", '{"ctx": "a", "endings": ["b"], "label": 0}', '{"question": "a"}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"ctx": "a", "endings": ["b", "c"], "label": 1}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        load_questions(path)
