"""Building kernels: the cache, its damage, many processes at once, and what a machine without a compiler hears."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from moe_ep.kernels import build as build_module
from moe_ep.kernels.build import KernelError, arch_of, build, command, find_library, library_path
from moe_ep.kernels.library import state

from moe_ep.__main__ import main
from moe_ep.machine import machine

# Writes its arguments into the file behind -o, counts its runs, and takes long enough for others to come.
COMPILER = """#!/bin/sh
echo run >> "$RUNS"
sleep 0.3
[ -z "$FAIL" ] || { echo "kernel.cu(3): error: expected a ';'" >&2; exit 2; }
for argument; do [ "$previous" = -o ] && out=$argument; previous=$argument; done
echo "$@" > "$out"
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that only pretends, alone on the PATH, and an empty cache; the file that counts its runs."""
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_built_once_and_then_found(runs: Path) -> None:
    assert find_library("sm_90a") is None
    path = build("sm_90a")
    assert path == library_path("sm_90a") == find_library("sm_90a") == build("sm_90a")
    assert runs.read_text() == "run\n"
    assert b"-gencode=arch=compute_90a,code=sm_90a" in path.read_bytes()
    assert [file.suffix for file in path.parent.iterdir() if file != path] == [".lock"]


def test_every_source_is_compiled() -> None:
    sources = {Path(word).name for word in command("nvcc", "sm_80", Path("out")) if word.endswith(".cu")}
    assert {"gather.cu", "sum.cu", "routes.cu"} <= sources
    assert sources == {path.name for path in build_module.FOLDER.glob("*.cu")}


@pytest.mark.parametrize(
    "damage", (lambda content: content[:-1], lambda content: b"x" + content[1:], lambda content: b"")
)
def test_a_damaged_library_is_built_again(runs: Path, damage) -> None:
    path = build("sm_80")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert find_library("sm_80") is None
    assert build("sm_80").read_bytes()[-32:] != b"" and find_library("sm_80") == path
    assert runs.read_text() == "run\nrun\n"


def test_a_changed_source_gets_another_library(runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = library_path("sm_80")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "kernel.cu").write_text("one")
    monkeypatch.setattr(build_module, "FOLDER", tmp_path / "src")
    build_module.source_hash.cache_clear()
    try:
        first = library_path("sm_80")
        (tmp_path / "src" / "kernel.cu").write_text("two")
        build_module.source_hash.cache_clear()
        assert len({before, first, library_path("sm_80")}) == 3
    finally:
        build_module.source_hash.cache_clear()


def test_many_processes_compile_once(runs: Path) -> None:
    code = "from moe_ep.kernels.build import build, find_library; build('sm_80'); assert find_library('sm_80')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    jobs = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [job.wait(timeout=120) for job in jobs] == [0, 0, 0]
    assert runs.read_text() == "run\n"


def test_a_failed_compilation_shows_the_compiler_s_words(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(KernelError, match=r"nvcc failed to compile the kernels for sm_80:\nkernel.cu\(3\): error: exp"):
        build("sm_80")
    monkeypatch.delenv("FAIL")
    assert build("sm_80") == find_library("sm_80")


def test_without_a_compiler(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "find_nvcc", lambda: None)
    with pytest.raises(
        KernelError, match="no nvcc is found to compile the kernels for sm_90a, and the cache holds none"
    ):
        build("sm_90a")
    monkeypatch.undo()


def test_a_compiler_that_is_no_program(runs: Path) -> None:
    (runs.parent / "bin" / "nvcc").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(KernelError, match=r"bin/nvcc cannot be run \(Exec format error\); set CUDA_HOME"):
        build("sm_90a")
    assert machine()["nvcc"] is None


def test_what_a_killed_build_left_is_removed_by_the_next(runs: Path) -> None:
    code = "from moe_ep.kernels.build import build; build('sm_80')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    job = subprocess.Popen([sys.executable, "-c", code], env=environment)
    end = time.monotonic() + 60
    while not runs.exists() and time.monotonic() < end:
        time.sleep(0.01)
    job.kill()
    job.wait()
    folder = library_path("sm_80").parent
    assert find_library("sm_80") is None and any(path.is_dir() for path in folder.iterdir())
    assert build("sm_80") == find_library("sm_80")
    assert {path.suffix for path in folder.iterdir()} == {".lock", ".so"}


def test_a_relative_cache_folder(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert build("sm_80").is_relative_to(runs.parent / "here") and find_library("sm_80") is not None


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(KernelError, match="no home folder to keep built kernels in; set XDG_CACHE_HOME"):
        build("sm_80")
    assert state((8, 0)).startswith("not to be had: this user has no home folder")


def test_a_library_from_elsewhere_needs_no_compiler(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build("sm_90a")
    monkeypatch.setattr(build_module, "find_nvcc", lambda: None)
    assert build("sm_90a") == path


def test_a_cache_that_cannot_be_written(runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(KernelError, match=r"cannot be written .*set XDG_CACHE_HOME to a folder that can"):
        build("sm_80")


def test_architectures() -> None:
    assert [arch_of(c) for c in ((8, 0), (9, 0), (10, 0), (12, 1))] == ["sm_80", "sm_90a", "sm_100", "sm_121"]
    with pytest.raises(KernelError, match="architecture 'hopper' is none; give sm_"):
        library_path("hopper")
    with pytest.raises(KernelError, match="instructions of sm_80 and newer, and sm_75 is older"):
        build("sm_75")
    assert state((7, 5)) == "not to be had: the kernels use instructions of sm_80 and newer, and sm_75 is older"


def test_the_command(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--arch", "sm_80", "sm_90a"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{arch}: {library_path(arch)}" for arch in ("sm_80", "sm_90a")]
    assert main(["build", "--arch", "volta"]) == 1
    assert "architecture 'volta' is none" in capsys.readouterr().err
    assert main(["build", "--arch", "sm_100", "volta"]) == 1
    assert find_library("sm_100") is None  # refused before anything is compiled
