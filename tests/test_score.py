"""`archipel score`: from a folder of exported weights and a file of questions to shares, or to one line on
what to mend."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from archipel import cli
from archipel.train import models
from archipel.train.choices import load_questions
from archipel.train.exported import write_tokenizer
from archipel.train.options import DataOptions, ModelOptions

ROOT = Path(__file__).parent.parent
OPTIONS = ModelOptions(width=16, layers=1, heads=2, vocabulary=256, sequence=64)
HELLASWAG = {"ctx": "one", "endings": ["two", "ten", "one"], "label": 1}
ARC = {"question": "Which?", "choices": {"text": ["x", "yy"], "label": ["A", "B"]}, "answerKey": "B"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder whose model is sure that "x" comes next, whatever came before."""
    folder = tmp_path_factory.mktemp("run")
    model = models.build(OPTIONS, 1)
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    state["model.embed_tokens.weight"][:, 0] = 1.0  # every token looks alike
    state["model.embed_tokens.weight"][ord("x"), 0] = 9.0  # but one, which the tied head then prefers
    state["model.norm.weight"] += 1.0
    models.export({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, OPTIONS, folder / "model")
    write_tokenizer(DataOptions(), OPTIONS, folder / "model")
    return folder


def written(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def command(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["score", *arguments])
    return ended.value.code


def test_shares_and_errors_of_each_file_are_one_line_of_json(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = written(
        tmp_path / "first.jsonl", {**HELLASWAG, "endings": ["ab", "x"]}, {**ARC, "answerKey": "A"}
    )
    second = written(tmp_path / "second.jsonl", HELLASWAG)
    assert command(str(run), first, second, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["model"] == str(run / "model")
    assert [row["file"] for row in found["files"]] == [first, second]
    one, other = found["files"]
    assert (one["accuracy"], one["accuracy_error"], one["chance"], one["questions"]) == (1.0, 0.0, 0.5, 2)
    assert (other["questions"], other["accuracy_error"], other["ties"]) == (1, None, 1)
    assert other["accuracy"] == pytest.approx(1 / 3)


def test_a_person_reads_shares_with_their_errors(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = {**ARC, "answerKey": "A"}, ARC
    path = written(tmp_path / "q.jsonl", *[right] * 3, *[wrong] * 2, HELLASWAG)
    assert command(str(run / "model"), path, "--limit", "5", "--batch", "3") == 0
    shown = capsys.readouterr().out
    assert "q.jsonl: 5 questions, chance 0.500" in shown
    assert "  accuracy            0.600 ± 0.245" in shown  # sqrt(0.6 · 0.4 / 4)
    assert "  normalised accuracy 0.600 ± 0.245" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{run}", "{folder}/none.jsonl"], "none.jsonl: No such file or directory"),
        (["{folder}/nowhere", "{good}"], "no model at"),
        (["{folder}", "{good}"], "has no config.json"),
        (["{run}", "{good}", "{bad}"], "bad.jsonl, line 2: answer 3 of 3 endings: it must be 0 to 2"),
        (["{run}", "{long}"], "long.jsonl, line 1: ending 1 has 66 tokens, the model's context holds 64"),
        (["{run}", "{good}", "--tokenizer", "none.json"], "no tokenizer at none.json"),
        (["{run}", "{good}", "--batch", "0"], "--batch=0 at least 1"),
    ],
    ids=lambda value: None if isinstance(value, list) else value.split(",")[0],
)
def test_what_a_person_can_mend_is_one_line(
    arguments: list[str], words: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {
        "run": str(run),
        "folder": str(tmp_path),
        "good": written(tmp_path / "good.jsonl", HELLASWAG),
        "bad": written(tmp_path / "bad.jsonl", HELLASWAG, {**HELLASWAG, "label": 3}),
        "long": written(tmp_path / "long.jsonl", {**HELLASWAG, "endings": ["a", "b" * 65]}),
    }
    assert command(*(argument.format(**places) for argument in arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("archipel: ") and words in line


def test_a_tokenizer_of_more_entries_than_the_model_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    entries = {"<|endoftext|>": 0, **{str(at): at for at in range(1, 300)}}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(entries)).save(str(tmp_path / "large.json"))
    path = written(tmp_path / "q.jsonl", HELLASWAG)
    assert command(str(run), path, "--tokenizer", str(tmp_path / "large.json")) == 2
    assert "tokenizer large.json has 300 entries, the model 256" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["hellaswag", "arc"])
def test_example_makes_questions_from_held_out_text(form: str, tmp_path: Path) -> None:
    for number in range(6):
        lines = [f"        some words of {number} and {at}, then others {number}{at}" for at in range(30)]
        (tmp_path / f"{number}.txt").write_text("\n".join(lines))
    out = tmp_path / "questions.jsonl"
    script = [sys.executable, str(ROOT / "examples" / "questions.py"), str(out), "--count", "20"]
    subprocess.run([*script, "--format", form, "--source", str(tmp_path / "*.txt")], check=True)
    questions = load_questions(out)
    assert len(questions) == 20
    assert all(len(set(question.endings)) == 4 for question in questions)
    assert len({question.answer for question in questions}) > 1
    whole = "".join(path.read_text() for path in sorted(tmp_path.glob("*.txt")))
    for question in questions:
        context = question.context.removeprefix("Question: ").removesuffix("\nAnswer:")
        assert f"{context} {question.endings[question.answer]}" in whole
