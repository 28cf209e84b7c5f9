"""What README and guide tell people to type exists, and the files they point to are there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "guide.md"]


def blocks(page: Path) -> list[str]:
    """Return the lines of a page's code blocks."""
    inside, found = False, []
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside = not inside
        elif inside:
            found.append(line)
    return found


def commands() -> list[str]:
    """Return every `archipel …` command line in the code blocks, comments cut off."""
    parts = [part for page in PAGES for line in blocks(page) for part in line.split("#")[0].split("  |  ")]
    return sorted({" ".join(part.split()) for part in parts if part.strip().startswith("archipel ")})


def test_the_documents_have_commands() -> None:
    assert len(commands()) >= 15


@pytest.mark.parametrize("command", commands())
def test_options_in_the_documents_exist(command: str) -> None:
    from archipel.cli import parser

    parser().parse_args(shlex.split(command)[1:])


def test_files_the_documents_name_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
    for command in commands():
        for word in shlex.split(command):
            if word.endswith(".toml"):
                assert (ROOT / word).exists(), command


def test_make_targets_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", (ROOT / "README.md").read_text(), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_options_the_guide_lists_exist() -> None:
    from archipel.config import Config

    config = Config()
    for section, key in re.findall(
        r"`(sync|data|optimizer|run)\.(\w+)\b(?!\()", (ROOT / "docs" / "guide.md").read_text()
    ):
        assert hasattr(getattr(config, section), key), f"{section}.{key}"


def test_every_section_of_a_run_is_in_the_guides_table_with_its_class() -> None:
    from archipel.config import Config

    row = re.compile(r"^\| (?:… )?`\[?([\w.]+)\]?` \| .* \| `(\w+)` \| `([\w/]+\.py)` \|$", re.M)
    listed = row.findall((ROOT / "docs" / "guide.md").read_text())
    for _, kind, file in listed:
        assert f"class {kind}(Struct" in (ROOT / "src" / "archipel" / file).read_text(), kind
    assert {*Config.__struct_fields__, "plan"} == {name for name, *_ in listed if "." not in name}


def test_the_guide_quotes_what_a_second_syncer_is_told() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    (quoted,) = re.findall(r"\| `([^`]*)` \| two syncers on one run folder", guide)
    told = (ROOT / "src" / "archipel" / "runtime" / "checkpoint.py").read_text()
    assert all(part in told for part in quoted.split(" … "))


def test_what_is_installed_is_a_checkout() -> None:
    extras = (ROOT / "pyproject.toml").read_text()
    for page in PAGES:
        for words, extra in re.findall(r"pip install ([^`\n]*?)\[([\w,]+)\]", page.read_text()):
            assert words == '-e ".', f"{page.name}: the package is in no index"
            assert all(re.search(rf"^{name} = \[", extras, re.M) for name in extra.split(",")), extra


def test_benchmarks_the_readme_names_exist_and_make_runs_the_first_two() -> None:
    named = re.findall(r"`(\w+\.py)`", (ROOT / "README.md").read_text().partition("Measured claims")[2])
    assert all((ROOT / "benchmarks" / name).exists() for name in named)
    made = re.findall(r"benchmarks/(\w+\.py)", (ROOT / "Makefile").read_text())
    assert named[: len(made)] == made


def test_help_of_every_command_is_quick_and_without_torch() -> None:
    code = "import sys; sys.argv = ['archipel', '--help']\nfrom archipel.cli import main\ntry: main()\n"
    code += "except SystemExit: sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0
    )
