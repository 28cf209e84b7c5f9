"""The scorer picks the likeliest ending, whatever the batch, the padding and the file format."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel.errors import DataError, ModelError
from archipel.train import models
from archipel.train.choices import Question, likelihoods, load_questions, score
from archipel.train.corpus import Encoder, load_tokenizer, train_bpe
from archipel.train.options import ModelOptions

BYTES = load_tokenizer("bytes")
SPACE = ord(" ")


class Successor(nn.Module):
    """Sure that each byte is followed by the next one in the alphabet; spaces between them do not count."""

    def __init__(self, sureness: float = 20.0) -> None:
        super().__init__()
        self.sureness = nn.Parameter(torch.tensor(sureness))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.where(tokens == SPACE, 0, torch.arange(tokens.shape[1])).cummax(-1).values
        follows = tokens.gather(-1, places) + 1
        return self.sureness * nn.functional.one_hot(follows % 256, 256).float()


ALPHABET = [
    Question("abc", ("xyz", "defgh"), 1),
    Question("klm", ("nop", "zz"), 0),
    Question("a long context 0123", ("456", "654", "999"), 0),
]


def decoder(**changes: Any) -> nn.Module:
    """Return a small decoder whose weights are far from zero, so that its likelihoods differ."""
    sizes = {"vocabulary": 256, "width": 32, "layers": 2, "heads": 4, "sequence": 24}
    model = models.build(ModelOptions(**{**sizes, **changes}), 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model


def one_at_a_time(model: nn.Module, context: list[int], ending: list[int], context_max: int) -> float:
    """Return the log-likelihood of an ending the slow way: a forward pass a token, no padding, no batch."""
    total = 0.0
    tokens = (context + ending)[-(context_max + 1) :]
    with torch.no_grad():
        for at in range(len(tokens) - len(ending), len(tokens)):
            row = models.logits(model, torch.tensor([tokens[:at]]))[0, -1].double()
            total += float(row[tokens[at]] - torch.logsumexp(row, 0))
    return total


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_the_likeliest_ending_wins(batch: int) -> None:
    found = score(Successor(), ALPHABET, BYTES, context_max=64, batch=batch)
    assert (found.accuracy, found.normalised, found.questions, found.ties) == (1.0, 1.0, 3, 0)
    assert found.chance == pytest.approx((1 / 2 + 1 / 2 + 1 / 3) / 3)


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_likelihoods_are_those_of_one_token_at_a_time(batch: int) -> None:
    model = decoder()
    questions = [
        Question("The sky is", ("blue", "green as grass"), 0),
        Question("", ("begins a document", "é"), 0),
        Question("much longer than the twenty-four bytes of context", ("that it holds", "x"), 0),
        Question("a space ends it ", ("here", "and here"), 0),
    ]
    found = likelihoods(model, questions, BYTES, context_max=24, batch=batch)
    for question, values in zip(questions, found, strict=True):
        context = list(question.context.rstrip().encode()) or [0]
        spaces = question.context[len(question.context.rstrip()) :] + " "
        expected = [
            one_at_a_time(model, context, list((spaces + ending).encode()), 24) for ending in question.endings
        ]
        np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_a_context_that_is_too_long_loses_its_beginning() -> None:
    question = Question("q" * 500 + "abc", ("def", "zzz"), 0)
    assert score(Successor(), [question], BYTES, context_max=8).accuracy == 1.0


def test_an_ending_fills_the_whole_context_but_is_never_cut() -> None:
    fits = Question("c", ("defghij", "zzzzzzz"), 0)  # with the space between, 8 tokens
    assert score(Successor(), [fits], BYTES, context_max=8).accuracy == 1.0
    longer = Question("c", ("defghij", "zzzzzzzz"), 0, "file.jsonl, line 7")
    with pytest.raises(DataError, match=r"file.jsonl, line 7: ending 1 has 9 tokens.* context holds 8"):
        score(Successor(), [longer], BYTES, context_max=8)


def test_length_normalisation_does_not_favour_short_endings() -> None:
    question = Question("abc", ("z", "defzg"), 1)  # two surprises in all against one at once
    found = score(Successor(), [question], BYTES, context_max=64)
    assert (found.accuracy, found.normalised) == (0.0, 1.0)


def test_length_counts_characters_not_bytes() -> None:
    question = Question("abc", ("ééé", "zzzz"), 0)  # 6 surprises over 3 characters, 4 over 4
    assert score(Successor(), [question], BYTES, context_max=64).normalised == 0.0


def test_a_model_that_knows_nothing_scores_chance_wherever_the_answers_are() -> None:
    questions = [Question("abc", ("one", "two", "six", "ten"), 0)] * 5
    found = score(Successor(sureness=0.0), questions, BYTES, context_max=64)
    assert (found.accuracy, found.normalised, found.chance, found.ties) == (0.25, 0.25, 0.25, 5)


class Drifting(Successor):
    """Rounds otherwise in a wider batch, as kernels do, only more."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (1 + tokens.shape[1] / 1000)


def test_equal_endings_tie_whatever_the_batches_they_are_in() -> None:
    questions = [Question("x" * length, ("same", "other", "same"), 0) for length in range(1, 20)]
    for values in likelihoods(Drifting(), questions, BYTES, context_max=64, batch=2):
        assert values[0] == values[2]


def test_standard_error_is_that_of_the_mean() -> None:
    wrong = Question("abc", ("def", "zzz"), 1)
    found = score(Successor(), [*ALPHABET, wrong], BYTES, context_max=64)
    assert found.accuracy == 0.75
    assert found.accuracy_error == pytest.approx(math.sqrt(0.75 * 0.25 / 3))  # of 4 questions
    assert math.isnan(score(Successor(), [wrong], BYTES, context_max=64).accuracy_error)


def test_a_model_that_says_nan_is_refused() -> None:
    with pytest.raises(ModelError, match=r"a question: log-likelihoods \[nan nan\]"):
        score(Successor(math.nan), ALPHABET, BYTES, context_max=64)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_text("the sky is blue, the grass is green, the blueprint is here\n" * 50)
    train_bpe(str(folder / "text.txt"), folder / "bpe.json", vocabulary=300)
    return load_tokenizer(str(folder / "bpe.json"))


def encoded(encoder: Encoder, text: str) -> list[int]:
    return next(encoder.encode([text.encode()])).tolist()[:-1]


def test_words_are_cut_as_in_running_text(bpe: Encoder) -> None:
    model = decoder(vocabulary=300)
    question = Question("the sky is", ("blue", "green"), 0)
    (found,) = likelihoods(model, [question], bpe, context_max=24)
    context = encoded(bpe, "the sky is")
    expected = [
        one_at_a_time(model, context, encoded(bpe, f"the sky is {ending}")[len(context) :], 24)
        for ending in question.endings
    ]
    assert len(context) < len(b"the sky is")
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_token_across_the_border_does_not_change_the_context() -> None:
    """Where "is blue" is one token, "is" and " blue" are scored after it, so that endings compare."""
    vocabulary = {b"is": 1, b"is blue": 2, b" blue": 3, b" green": 4, b"": 0}

    def encode(texts):
        for text in texts:
            rest, found = text, []
            while rest:
                longest = max((entry for entry in vocabulary if rest.startswith(entry)), key=len)
                found.append(vocabulary[longest])
                rest = rest[len(longest) :]
            yield np.array([*found, 0])

    greedy = Encoder("greedy", "greedy", 5, encode)
    model = decoder(vocabulary=5)
    (found,) = likelihoods(model, [Question("is", ("blue", "green"), 0)], greedy, context_max=24)
    np.testing.assert_allclose(found, [one_at_a_time(model, [1], [entry], 24) for entry in (3, 4)], rtol=1e-5)


def written(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


CHOICES = {"text": ["x", "y"], "label": ["A", "B"]}
ARC = {"question": "Which?", "choices": CHOICES, "answerKey": "B"}


def test_both_formats_are_read(tmp_path: Path) -> None:
    stem = {"stem": "Which?", "choices": [{"text": "x", "label": "A"}, {"text": "y", "label": "B"}]}
    plain = {"ctx": "one", "endings": ["two", "ten"], "label": "0"}
    path = written(tmp_path / "q.jsonl", plain, "", ARC, {"id": "7", "question": stem, "answerKey": "B"})
    first, second, third = load_questions(path)
    assert first == Question("one", ("two", "ten"), 0, f"{path}, line 1")
    assert second == Question("Question: Which?\nAnswer:", ("x", "y"), 1, f"{path}, line 3")
    assert third[:3] == second[:3]
    assert load_questions(path, limit=2) == [first, second]


def test_hellaswags_own_lines_are_tidied(tmp_path: Path) -> None:
    row = {
        "activity_label": "Baking",
        "ctx_a": "A cook stirs.",
        "ctx_b": "the cook",
        "ctx": "A cook stirs. the cook",
        "endings": [" tastes it [title] Next [step] slowly.", "sings."],
        "label": 1,
    }
    (found,) = load_questions(written(tmp_path / "q.jsonl", row))
    assert found[:3] == (
        "Baking: A cook stirs. The cook",
        ("tastes it. Next slowly.", "sings."),
        1,
    )


def test_a_line_ends_only_at_a_newline(tmp_path: Path) -> None:
    row = {"ctx": "one\u2028more", "endings": ["two", "ten"], "label": 0}
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_questions(path)[0].context == "one\u2028more"


HELLASWAG = {"ctx": "a", "endings": ["b", "c"], "label": 1}


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{", "JSON|truncated"),
        ("[1]", "a question is an object, not list"),
        ('"endings"', "a question is an object, not str"),
        ({"text": "a"}, "of unknown format, its fields are text"),
        ({**HELLASWAG, "label": 2}, "answer 2 of 2 endings: it must be 0 to 1"),
        ({**HELLASWAG, "label": -1}, "answer -1 of 2 endings"),
        ({**HELLASWAG, "label": ""}, "label '' is no index"),
        ({**HELLASWAG, "label": 0.5}, r"\$.label"),
        ({"ctx": "a", "endings": ["b", "c"]}, "missing required field `label`"),
        ({"endings": ["b", "c"], "label": 0}, "there is no ctx"),
        ({**HELLASWAG, "endings": ["b"], "label": 0}, "1 endings leave nothing to choose"),
        ({**HELLASWAG, "endings": ["b", 3]}, r"\$.endings\[1\]"),
        ({**HELLASWAG, "endings": ["b", ""]}, "ending 1 is empty"),
        ({**HELLASWAG, "ctx": "a\0b"}, "NUL"),
        ('{"ctx": "\\ud800", "endings": ["b", "c"], "label": 0}', "surrogate"),
        ({**ARC, "answerKey": "C"}, r"answerKey 'C' is none of the labels \['A', 'B'\]"),
        ({**ARC, "choices": {"text": ["x"], "label": ["A", "B"]}}, "1 choices have 2 labels"),
        ({"question": "a", "answerKey": "A"}, "Expected `object`, got `null`"),
        ({"question": 3, "choices": CHOICES, "answerKey": "A"}, "Expected `str`, got `int`"),
        ({"question": {"stem": "a"}, "answerKey": "A"}, "missing required field `choices`"),
    ],
)
def test_a_bad_line_is_named_with_its_rule(tmp_path: Path, line: Any, rule: str) -> None:
    path = written(tmp_path / "q.jsonl", HELLASWAG, line)
    with pytest.raises(DataError, match=f"q.jsonl, line 2: .*({rule}).*; HellaSwag has ctx"):
        load_questions(path)


def test_a_file_that_is_not_text_or_has_no_question_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00{}")
    with pytest.raises(DataError, match="binary, line 1"):
        load_questions(tmp_path / "binary")
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(DataError, match="empty has no question"):
        load_questions(tmp_path / "empty")
    with pytest.raises(DataError, match="nowhere"):
        load_questions(tmp_path / "nowhere")
