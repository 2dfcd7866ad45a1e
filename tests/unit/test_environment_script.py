"""Which interpreter `tools/test` and `tools/demo` take, and whether its torch is used: `tools/_env.sh`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENV_SH = Path(__file__).resolve().parents[2] / "tools" / "_env.sh"


def interpreter(folder: Path, name: str, torch: str | None, old: bool = False) -> Path:
    """A python of that name; `torch`: the version that it imports, None where that fails; `old`: no 3.11 yet."""
    packages = folder / f"packages of {name}"
    (packages / "torch").mkdir(parents=True)
    source = "raise ImportError" if torch is None else f"__version__ = {torch!r}"
    (packages / "torch" / "__init__.py").write_text(source)
    program = folder / name
    run = "exit 1" if old else f'PYTHONPATH="{packages}" exec "{sys.executable}" "$@"'
    program.write_text(f"#!/bin/sh\n{run}\n")
    program.chmod(0o755)
    return program


def chosen(folder: Path, **environment: str) -> tuple[str, str, str]:
    """The interpreter, its torch ("": that of constraints.txt), and what was said; in `folder` alone are pythons."""
    script = f'source "{ENV_SH}"; PATH="{folder}"; choose_interpreter; echo "$BASE|$TORCH"'
    done = subprocess.run(
        ["bash", "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    base, _, torch = done.stdout.strip().partition("|")
    return base, torch, done.stderr


@pytest.fixture(autouse=True)
def no_choice_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHON", raising=False)


@pytest.mark.parametrize(
    ("torch", "used"),
    [("2.11.0", True), ("2.13.0+cpu", True), ("3.0.1", True), ("2.10.1", False), ("1.13.1", False), (None, False)],
)
def test_an_installed_torch_is_used_from_2_11_on(tmp_path: Path, torch: str | None, used: bool) -> None:
    interpreter(tmp_path, "python3", torch)
    assert chosen(tmp_path) == ("python3", torch if used else "", "")


def test_a_python_with_torch_goes_before_one_without(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3", None)
    interpreter(tmp_path, "python", "2.9.0")
    interpreter(tmp_path, "python3.12", "2.12.1")
    assert chosen(tmp_path)[:2] == ("python3.12", "2.12.1")


def test_the_users_own_choice_is_the_only_one(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3", "2.13.0")
    mine = interpreter(tmp_path, "mine", None)
    assert chosen(tmp_path, PYTHON=str(mine))[:2] == (str(mine), "")


def test_without_a_new_enough_python_the_way_out_is_said(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3", "2.13.0", old=True)
    assert chosen(tmp_path) == (
        "", "", "error: no Python >= 3.11 found (tried python3, python, python3.13, 3.12, 3.11); set "
        "PYTHON=/path/to/python\n",
    )  # fmt: skip
