"""lm-eval on exported weights and local tasks finds what `archipel score` finds, question by question.

Needs the extra `evaluation`, which neither `make test` nor CI installs.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archipel.train import choices, corpus, exported, models
from archipel.train.options import DataOptions, ModelOptions

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `evaluation`")
pytest.importorskip("accelerate", reason="lm-eval's hf models need it")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TASKS = Path(__file__).parent.parent / "examples" / "lm_eval_tasks"
FILES = {
    "archipel_endings": "questions.jsonl",
    "archipel_hellaswag": "hellaswag.jsonl",
    "archipel_arc": "arc.jsonl",
}
TEXT = (
    "the sky is blue today, the grass is green, and a cook tastes the soup; which is it, the lid or the spoon"
)


def written(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that lm-eval is started in, with a file for each task."""
    contexts = [
        "the sky is",
        "ends with a space ",
        "é, 日本:",
        "x" * 200 + " longer than the context",
        "\ta\n\n",
    ]
    endings = ["blue", "green, and a cook tastes", "ééé", "the lid\nor the spoon"]
    numbered = [(at, context, endings[at % 2 :]) for at, context in enumerate(contexts)]
    plain = [{"ctx": text, "endings": held, "label": at % len(held)} for at, text, held in numbered]
    swag = [
        {
            "activity_label": f"Baking {at}",
            "ctx_a": text,
            "ctx_b": "the COOK [substeps] stirs",
            "ctx": text,
            "endings": [f" {ending} [title] More [step]  of it." for ending in held],
            "label": str(at % len(held)),
        }
        for at, text, held in numbered
    ]
    arc = [
        {
            "question": text,
            "choices": {"text": held, "label": list("1234")[: len(held)]},
            "answerKey": "1234"[at % len(held)],
        }
        for at, text, held in numbered
    ]
    for name, rows in zip(FILES.values(), (plain, swag, arc), strict=True):
        written(tmp_path / name, rows)
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return tmp_path


def tokens_of(tokenizer: str, folder: Path) -> DataOptions:
    if tokenizer == "bytes":
        return DataOptions()
    (folder / "text.txt").write_text(f"{TEXT}\n" * 50)
    corpus.train_bpe(str(folder / "text.txt"), folder / "bpe.json", vocabulary=320)
    return DataOptions(tokenizer=str(folder / "bpe.json"))


@pytest.mark.parametrize(
    ("kind", "tokenizer"), [("decoder", "bytes"), ("decoder", "bpe"), ("gemma", "bytes"), ("moe", "bpe")]
)
def test_both_find_the_same_likelihoods_and_shares(kind: str, tokenizer: str, questions: Path) -> None:
    from lm_eval.tasks import TaskManager

    options = ModelOptions(kind=kind, vocabulary=320, width=32, layers=2, heads=4, sequence=96, experts=4)  # type: ignore[arg-type]
    model = models.build(options, 7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # far from uniform
    folder = questions / "model"
    models.export(model.state_dict(), options, folder)
    exported.write_tokenizer(tokens_of(tokenizer, questions), options, folder)

    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder)},
        tasks=list(FILES),
        device="cpu",
        batch_size=4,
        task_manager=TaskManager(include_path=str(TASKS)),
    )

    loaded, encoder = exported.load_model(folder), exported.load_encoder(folder)
    for task, name in FILES.items():
        ours = choices.load_questions(questions / name)
        values = choices.likelihoods(loaded.model, ours, encoder, context_max=loaded.context_max)
        samples = sorted(theirs["samples"][task], key=lambda sample: sample["doc_id"])
        for mine, sample in zip(values, samples, strict=True):
            given = [float(response[0][0]) for response in sample["resps"]]
            np.testing.assert_allclose(mine, given, rtol=1e-4, err_msg=f"{task} {sample['arguments']}")
        found = choices.score(loaded.model, ours, encoder, context_max=loaded.context_max)
        shares = theirs["results"][task]
        assert found.accuracy == pytest.approx(shares["acc,none"])
        assert found.accuracy_error == pytest.approx(shares["acc_stderr,none"])
        assert found.normalised == pytest.approx(shares["acc_norm,none"])
