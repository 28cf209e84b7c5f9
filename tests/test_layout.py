"""The house rules that a reader relies on: who may import whom, what the protocol may not touch, and
sizes."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "archipel"
FILES = sorted(SOURCE.rglob("*.py"))

# folder or file -> (ours it may import, others it may import); DESIGN.md section 2 of the project.
OURS = {
    "errors": set(),
    "numerics": {"errors"},
    "protocol": {"errors"},
    "chaos": {"errors"},
    "tape": {"protocol", "errors"},
    "train": {"numerics", "protocol", "errors"},
    "sim": {"protocol", "tape", "chaos", "errors"},
    "runtime": {"protocol", "tape", "chaos", "errors", "numerics.codec"},
    "dashboard": {"tape", "protocol", "errors"},
    "config": {
        "errors",
        "numerics.stability",
        "protocol.gossip",
        "protocol.schedule",
        "runtime.checkpoint",
        "runtime.launch",
        "runtime.wire",
        "sim.scenario",
        "train.options",
    },
}
OTHERS = {
    "errors": set(),
    "numerics": {"torch"},
    "protocol": {"msgspec"},
    "chaos": {"msgspec"},
    "tape": {"msgspec", "zstandard", "xxhash"},
    "train": {
        "torch", "numpy", "msgspec", "xxhash", "safetensors",
        "transformers", "datasets", "tokenizers", "pyarrow", "sklearn",
    },
    "sim": {"numpy", "msgspec"},
    "runtime": {"grpc", "msgspec", "xxhash", "safetensors", "cryptography", "numpy"},
    "dashboard": {"rich", "msgspec", "matplotlib"},
    "config": {"msgspec"},
}  # fmt: skip
PURE = {"time", "random", "asyncio", "threading", "socket", "os", "logging", "datetime", "secrets", "uuid"}


def part_of(path: Path) -> str:
    """Return the folder a file is in, or its own name at the top."""
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(path: Path) -> list[str]:
    """Return the absolute dotted names a file imports."""
    package = ["archipel", *path.relative_to(SOURCE).parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
            found += names if module.startswith("archipel") else [module]
    return found


def ours(name: str) -> str:
    """Return an import of ours without the package's name."""
    return name.removeprefix("archipel").removeprefix(".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_file_imports_only_what_its_folder_may(path: Path) -> None:
    part = part_of(path)
    if part not in OURS:
        return
    for name in imports_of(path):
        if name.startswith("archipel"):
            inner = ours(name)
            allowed = {part, *OURS[part]}
            assert any(inner == a or inner.startswith(a + ".") for a in allowed), f"{part} imports {inner}"
        else:
            root = name.split(".")[0]
            if path.name == "codec.py":
                assert root in sys.stdlib_module_names | {"numpy", "numba"}, f"codec imports {name}"
            else:
                assert root in sys.stdlib_module_names or root in OTHERS[part], f"{part} imports {name}"


def test_only_pictures_draw_and_only_when_asked() -> None:
    for path in FILES:
        drawing = [name for name in imports_of(path) if name.split(".")[0] == "matplotlib"]
        assert not drawing or path.name == "pictures.py", path
    import subprocess

    code = "import sys, archipel.cli, archipel.dashboard.pictures as p; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_protocol_has_no_clock_chance_or_io() -> None:
    for path in FILES:
        if part_of(path) == "protocol":
            assert not {name.split(".")[0] for name in imports_of(path)} & PURE, path


def test_nothing_imports_the_interface() -> None:
    for path in FILES:
        if part_of(path) not in ("api", "cli", "commands", "__init__", "__main__"):
            assert not {ours(n).split(".")[0] for n in imports_of(path) if n.startswith("archipel")} & {
                "api",
                "cli",
                "commands",
            }


def test_package_files_import_nothing() -> None:
    for path in FILES:
        if path.name == "__init__.py" and path.parent != SOURCE:
            assert not imports_of(path), path


def test_files_and_functions_keep_their_size() -> None:
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name}"


def test_no_drawers() -> None:
    assert not [p for p in FILES if p.stem in ("utils", "util", "helpers", "helper", "common", "misc")]


def test_every_module_says_what_it_is() -> None:
    for path in FILES:
        if path.stat().st_size:
            assert ast.get_docstring(ast.parse(path.read_text())), path


@pytest.mark.parametrize(
    "module", ["protocol.syncer", "tape.tape", "cli", "config", "roles.courier", "dashboard.terminal"]
)
def test_module_loads_without_torch(module: str) -> None:
    import subprocess

    code = f"import sys, archipel.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
