"""Result rows and their file: every field always there, nothing that names a host or a place on its disk."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moe_ep.errors import RecipeError
from tools.rows import (
    MACHINE_FIELDS,
    ROOT,
    ROW_FIELDS,
    RowFile,
    git_state,
    link_name,
    machine_header,
    make_row,
    read_rows,
    relative,
    scrub,
)

KNOWN: dict[str, Any] = {
    "level": "stage", "pass_": "fwd", "dispatcher": "all2all", "shape": {"T": 1, "H": 1, "I": 1, "E": 1, "K": 1},
    "R": 1, "skew": 1.0, "M": 1, "S": 0, "dtype": "float32", "status": "ok", "us_p50": 3.0,
}  # fmt: skip


def test_unknown_values_are_null_not_left_out() -> None:
    row = make_row(**KNOWN)
    assert tuple(row) == ROW_FIELDS
    assert row["kind"] == "row" and row["pass"] == "fwd" and row["host_syncs"] is None and row["reason"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"us": 1}, "no field us"),
        ({"dtype": None}, "needs dtype"),
        ({"status": "fine"}, "status = 'fine' is not one of 'ok', 'refused', 'oom', 'failed'"),
        ({"pass_": "bwd"}, "pass = 'bwd' is not one of"),
        ({"us_p50": None}, "a row has a time and no reason where it is ok"),
        ({"reason": "x"}, "a row has a time and no reason where it is ok"),
        ({"status": "refused"}, "a row has a time and no reason where it is ok"),
        ({"status": "refused", "us_p50": None}, "a row has a time and no reason where it is ok"),
        ({"status": "refused", "reason": "x"}, "a row has a time and no reason where it is ok"),
    ],
)
def test_a_bad_row_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_row(**{**KNOWN, **change})


def test_a_file_reads_back_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    header = machine_header(["tools/x.py", "--out", str(path)])
    for err in (0.5, float("nan")):
        file = RowFile(path, header)
        file.append([make_row(**KNOWN, err=err)])
    got_header, rows = read_rows(path)
    assert tuple(got_header) == MACHINE_FIELDS
    assert len(rows) == 1 and rows[0]["err"] is None, "NaN is no JSON"
    file.append([make_row(**KNOWN), make_row(**KNOWN)])
    assert len(read_rows(path)[1]) == 3


def test_no_file_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RowFile(None, {}).append([make_row(**KNOWN)])
    assert list(tmp_path.iterdir()) == []


def test_the_header_says_what_ran_and_not_where(tmp_path: Path) -> None:
    header = machine_header(["tools/bench.py", f"--out={tmp_path}/x.jsonl", str(ROOT / "recipes" / "tiny.toml")])
    assert header["argv"] == ["tools/bench.py", "--out=x.jsonl", "recipes/tiny.toml"]
    text = json.dumps(header)
    assert str(ROOT) not in text and str(tmp_path) not in text and socket.gethostname() not in text


def test_a_machine_without_gpus_has_null_gpu_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {"gpus": [], "links": None, "driver": None, "torch": "2", "cuda": None, "nccl_loaded": None}
    monkeypatch.setattr("tools.rows.machine", lambda: bare)
    header = machine_header([])
    assert header["gpu"] is None and header["gpus"] is None and header["link"] is None


def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    links = [["X", "NV18"], ["NV18", "X"]]
    full = {"gpus": [{"name": "H"}] * 2, "links": links, "driver": "1", "torch": "2", "cuda": "3", "nccl_loaded": "4"}
    monkeypatch.setattr("tools.rows.machine", lambda: full)
    header = machine_header([])
    assert (header["gpu"], header["gpus"], header["link"]) == ("H", 2, "NV18")
    assert link_name([["X", "NV18", "SYS"], ["NV18", "X", "SYS"], ["SYS", "SYS", "X"]]) == "NV18/SYS"
    assert link_name([["X"]]) is None and link_name(None) is None


def test_reasons_lose_paths_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17")
    text = "cannot load /usr/lib/x86/libfoo.so.1 on node-17: see https://a.org/b/c, 3/4 done, ratio us/us"
    want = "cannot load libfoo.so.1 on HOST: see https://a.org/b/c, 3/4 done, ratio us/us"
    assert scrub({"reason": [text]}) == {"reason": [want]}
    assert scrub((1, 2.5, None, True, float("inf"))) == [1, 2.5, None, True, None]


def test_relative_arguments_stay() -> None:
    for argument in ("tools/results/a.jsonl", "--shape", "64,32,48,8,2", "--out=a.jsonl", "../a.jsonl"):
        assert relative(argument) == argument


def test_git_state(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=tmp_path, check=True,
            capture_output=True,
        )  # fmt: skip

    assert git_state(tmp_path) == (None, None)
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    commit, dirty = git_state(tmp_path)
    assert commit is not None and len(commit) == 40 and dirty is False
    (tmp_path / "tools" / "results").mkdir(parents=True)
    (tmp_path / "tools" / "results" / "x.jsonl").write_text("1")
    assert git_state(tmp_path) == (commit, False), "the result being written makes no run dirty"
    (tmp_path / "b").write_text("1")
    assert git_state(tmp_path) == (commit, True)


def test_a_copied_tree_can_be_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.rows.git_state", lambda root: (None, None))
    for text, want in (("0123abc", ("0123abc", False)), ("0123abc-dirty", ("0123abc", True)), (None, (None, None))):
        header = machine_header([], text)
        assert (header["commit"], header["dirty"]) == want
    with pytest.raises(RecipeError, match="commit 'main' must be 7 to 40 hex digits"):
        machine_header([], "main")
    monkeypatch.setattr("tools.rows.git_state", lambda root: ("f" * 40, False))
    with pytest.raises(RecipeError, match="these stand in git, at fff"):
        machine_header([], "0123abc")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no machine header"),
        ('{"kind": "row"}\n', "no machine header"),
        ('{"kind": "machine"\n', ":1: the line is no JSON .*; give a file that --out of a benchmark wrote"),
        ('{"kind": "machine"}\n{"ki', ":2: the line is no JSON .*; the run that wrote it was cut off"),
        ('{"kind": "machine"}\n', ":1: field gpu, gpus"),
    ],
)
def test_what_is_no_result_file_is_refused_with_its_path(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"f\.jsonl.*{message}"):
        read_rows(path)


def test_a_row_with_a_field_left_out_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    row = make_row(**KNOWN)
    del row["sms"]
    path.write_text(json.dumps(dict.fromkeys(MACHINE_FIELDS) | {"kind": "machine"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"f\.jsonl:2: field sms is missing"):
        read_rows(path)
