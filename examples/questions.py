"""Multiple-choice questions from text a model has not seen: how does the line go on?

python examples/questions.py questions.jsonl                         # the default corpus: its validation part
python examples/questions.py questions.jsonl --source 'notes/*.txt'  # text of yours, none of it trained on
archipel score out/tiny questions.jsonl

The wrong endings are those of lines of other documents. `--format` writes HellaSwag's fields or ARC's.
"""

import argparse
import json
import random
from collections.abc import Iterator

from archipel.train import corpus
from archipel.train.options import DataOptions

LINES = 2  # of context, before the line that is cut
ENDING_CHARACTERS = 12, 48


def held_out(documents: list[bytes]) -> list[bytes]:
    """Return the documents that lie whole in the part of a run's bytes that `data.valid_fraction` keeps."""
    left = int(sum(len(text) + 1 for text in documents) * DataOptions().valid_fraction)
    found = []
    for text in reversed(documents):
        left -= len(text) + 1
        if left < 0:
            break
        found.append(text)
    return found


def passages(documents: list[bytes]) -> Iterator[tuple[int, str, str]]:
    """Yield a document's number, some of its text up to a space in a line, and the rest of that line."""
    shortest, longest = ENDING_CHARACTERS
    for number, text in enumerate(documents):
        lines = [
            line for line in text.decode(errors="replace").replace("\0", "").splitlines() if line.strip()
        ]
        for at in range(LINES, len(lines), LINES + 1):
            line = lines[at].rstrip()
            border = line.find(" ", (len(line) + len(line) - len(line.lstrip())) // 2)
            begun, ending = line[:border], line[border + 1 :]
            if border > 0 and begun.strip() and shortest <= len(ending) <= longest and ending[0] != " ":
                yield number, "\n".join([*lines[at - LINES : at], begun]), ending


def questions(documents: list[bytes], count: int, seed: int) -> Iterator[tuple[str, list[str], int]]:
    """Yield contexts, four different endings each, and the index of the right one."""
    found, chosen = list(passages(documents)), random.Random(seed)
    chosen.shuffle(found)
    for number, context, ending in found[:count]:
        others = {line for other, _, line in chosen.sample(found, min(64, len(found))) if other != number}
        wrong = sorted(others - {ending})
        if len(wrong) >= 3:
            endings = [ending, *chosen.sample(wrong, 3)]
            chosen.shuffle(endings)
            yield context, endings, endings.index(ending)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--source", default="python", help="file, folder or glob; python: the default corpus")
    parser.add_argument("--format", choices=["hellaswag", "arc"], default="hellaswag")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    documents = list(corpus.documents(options.source))
    if options.source == "python":
        documents = held_out(documents)
    with open(options.out, "w", encoding="utf-8") as file:
        for context, endings, answer in questions(documents, options.count, options.seed):
            row = {"ctx": context, "endings": endings, "label": answer}
            if options.format == "arc":
                choices = {"text": endings, "label": list("ABCD")}
                row = {"question": context, "choices": choices, "answerKey": "ABCD"[answer]}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
