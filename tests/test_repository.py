"""Rules of the repository that no linter checks: sizes, no machine's paths, one version, scripts that answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import ucxkv
from tests.long import LONG

ROOT = Path(__file__).resolve().parent.parent
SKIPPED_FOLDERS = {".git", "__pycache__", "build", "dist", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}
TEXT = {".py", ".pyi", ".sh", ".c", ".h", ".md", ".toml", ".yaml", ".yml", ".json", ".jsonl", ".in", ".cfg", ".txt", ""}


def _files() -> list[Path]:
    """The repository's own files: what git tracks, or, in an unpacked sdist, all but build products."""
    if (ROOT / ".git").exists():
        done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=60)
        if done.returncode == 0:
            named = [ROOT / name for name in done.stdout.decode().split("\0") if name]
            return [path for path in named if path.is_file() and not path.is_symlink()]
    found = []
    for folder, folders, files in os.walk(ROOT, followlinks=False):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".venv")]
        found += [Path(folder) / name for name in files if not name.endswith((".so", ".o", ".pyc"))]
    return [path for path in found if not path.is_symlink()]


FILES = _files()


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def test_no_module_is_over_500_lines_and_no_c_file_over_600() -> None:
    """Goal: one concept a file. Method: lines counted in every Python, C and shell file of the repository."""
    limits = {".py": 500, ".c": 600, ".h": 600, ".sh": 500}
    long = {
        str(path.relative_to(ROOT)): _lines(path) for path in FILES if _lines(path) > limits.get(path.suffix, 10**9)
    }
    assert long == {}


@pytest.mark.parametrize("pattern", LONG)
def test_what_a_full_run_leaves_out_is_there(pattern: str) -> None:
    """Goal: a renamed test is not run, or left out, by mistake. Method: each pattern's function is looked for."""
    path, _, name = pattern.partition("::")
    name = re.split(r"[\[*]", name)[0]
    assert re.search(rf"def {name}\w*\(", (ROOT / "tests" / path).read_text())


def test_no_file_is_over_one_mebibyte() -> None:
    """Goal: a clone stays small. Method: the size of every file."""
    assert [str(path) for path in FILES if path.stat().st_size > 1 << 20] == []


def test_no_file_names_a_machine_path_or_a_package_registry() -> None:
    """Goal: nothing of the machine where it was written. Method: every text file is searched for such strings."""
    pieces = [("work", "/"), ("farm", "/"), ("root", "/")]
    hosts = ["pypi" + r"\.org", "python" + r"hosted\.org", "registry" + r"\.npmjs", "deb" + r"\.debian\.org"]
    pattern = re.compile("|".join([rf"(?<![\w.}}])/{name}{end}" for name, end in pieces] + hosts))
    found = []
    for path in FILES:
        if path.suffix in TEXT and path.name != "LICENSE":
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if pattern.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_the_version_is_the_same_everywhere() -> None:
    """Goal: one version. Method: pyproject.toml, the package and the installed metadata are compared."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert ucxkv.__version__ == declared
    try:
        installed = metadata.version("ucxkv")
    except metadata.PackageNotFoundError:
        pytest.skip("ucxkv runs from the source tree, not installed")
    assert installed == declared


def test_every_package_of_the_source_is_installed() -> None:
    """Goal: no folder is forgotten in the wheel. Method: folders with __init__.py against pyproject's list."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = set()
    for top, package in (("ucxkv", ()), ("transport", ("ucxkv",)), ("tiers", ("ucxkv",))):
        for init in (ROOT / top).rglob("__init__.py"):
            folders = init.parent.relative_to(ROOT).parts
            if folders[:2] not in (("ucxkv", "transport"), ("ucxkv", "tiers")):  # links to the other two
                present.add(".".join((*package, *folders)))
    assert present == listed


def test_every_relative_link_of_the_documents_leads_somewhere() -> None:
    """Goal: no dead link. Method: targets of Markdown links that are no URL and no anchor are looked up."""
    dead = []
    for path in FILES:
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
                if "://" not in target and not target.startswith("mailto:") and not (path.parent / target).exists():
                    dead.append(f"{path.relative_to(ROOT)} -> {target}")
    assert dead == []


SCRIPTS = sorted(path for path in (ROOT / "scripts").glob("*.py") if '__name__ == "__main__"' in path.read_text())


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_every_script_answers_help(script: str) -> None:
    """Goal: each script says what it does. Method: `--help` of each exits with 0 and prints its usage."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), "--help"], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


@pytest.mark.parametrize("script", sorted(str(path.relative_to(ROOT)) for path in FILES if path.suffix == ".sh"))
def test_every_shell_script_parses(script: str) -> None:
    """Goal: no syntax error waits in a branch that is rarely taken. Method: `bash -n`."""
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert done.returncode == 0, done.stderr
