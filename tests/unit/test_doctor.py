"""The doctor's report, its exit codes, and that it notices a default dispatcher that does not work."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_ep import doctor, machine
from moe_ep.__main__ import main
from moe_ep.dispatch import Capabilities, Dispatcher, Ticket, register_dispatcher, registry
from moe_ep.dispatch.all2all import All2All
from moe_ep.errors import Unavailable

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-15\t0
GPU1\tNV18\t X \tSYS\t0-15\t0
NIC0\tPIX\tSYS\t X

Legend:
  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_report_as_a_person_reads_it() -> None:
    command = [sys.executable, "-m", "moe_ep", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"torch       {torch.__version__}" in lines
    assert f"Python      {platform.python_version()} on {platform.system()} {platform.machine()}" in done.stdout
    assert lines[-1] == "The default dispatcher, all2all, works."


def test_json_has_the_same_facts_and_nothing_that_identifies_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert report["works"] is True
    assert report["default"] == "all2all"
    found = report["dispatchers"]["all2all"]
    assert (found["usable"], found["reasons"], found["conditions"]) == (True, [], [])
    assert found["capabilities"] == json.loads(json.dumps(dataclasses.asdict(All2All.capabilities)))
    assert report["dispatchers"]["local"]["conditions"] == ["1 rank(s)"]
    assert len(report["gpus"]) == machine.num_gpus() == len(report["peer_access"])
    assert (report["cuda_missing"] is None) == torch.cuda.is_available()
    assert platform.node() not in text
    assert str(ROOT) not in text


def test_no_command_prints_usage_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m moe_ep")


def test_a_default_that_fails_is_exit_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(self: All2All, ticket: Ticket) -> None:
        raise RuntimeError("no such link")

    monkeypatch.setattr(All2All, "_dispatch", refuse)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "not usable  a trial on one rank failed: RuntimeError: no such link" in printed
    assert printed.endswith("The default dispatcher, all2all, does not work here.\n")


def test_a_default_that_swaps_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = All2All._combine_postprocess

    def swap(self: All2All, ticket: Ticket) -> Tensor:
        return original(self, ticket)[[1, 0, 2]]

    monkeypatch.setattr(All2All, "_combine_postprocess", swap)
    assert doctor.examine("all2all")["reasons"] == ["a trial on one rank moved rows to wrong places"]


def register(monkeypatch: pytest.MonkeyPatch, capabilities: Capabilities, reason: object = None) -> None:
    """Make a dispatcher `planted` known for one test; its own check returns `reason` or raises it."""

    class Planted(Dispatcher):
        @classmethod
        def unavailable_reasons(cls, config: object, group: object) -> list[str]:
            if isinstance(reason, Exception):
                raise reason
            return [str(reason)] if reason else []

    Planted.name, Planted.capabilities = "planted", capabilities
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    register_dispatcher("planted")(Planted)


def test_a_gpu_dispatcher_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "num_gpus", lambda: 0)
    register(monkeypatch, Capabilities(devices=("cuda",), dtypes=("bfloat16",), rank_counts=(2, 4, 8)))
    found = doctor.diagnose()["dispatchers"]["planted"]
    assert not found["usable"]
    assert found["reasons"][0].startswith("it needs a CUDA GPU, and torch ")
    assert found["conditions"] == ["2, 4, 8 rank(s)", "tensors on cuda", "dtype bfloat16"]


def test_too_few_gpus_for_every_group_size(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Capabilities(devices=("cuda",), rank_counts=(2, 4, 8)))
    monkeypatch.setattr(doctor, "num_gpus", lambda: 1)
    reason = "it serves 2, 4, 8 ranks, one GPU each, and this machine has 1 GPU(s)"
    assert doctor.examine("planted")["reasons"] == [reason]
    monkeypatch.setattr(doctor, "num_gpus", lambda: 5)
    assert doctor.examine("planted")["usable"]


LIMITS = [
    Capabilities(hidden_multiple=48, max_top_k=1, dtypes=("bfloat16",)),
    Capabilities(routers=("grouped",), needs_max_tokens=True, rank_counts=(4,)),
    Capabilities(routers=("sigmoid",), max_hidden=64, duplicates=False),
]


@pytest.mark.parametrize("capabilities", LIMITS)
def test_limits_that_a_configuration_can_meet_do_not_make_it_unusable(
    monkeypatch: pytest.MonkeyPatch, capabilities: Capabilities
) -> None:
    register(monkeypatch, capabilities)
    found = doctor.examine("planted")
    assert found["reasons"] == []
    assert found["conditions"]


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("package x 1.2 is missing; pip install x", "package x 1.2 is missing; pip install x"),
        (Unavailable("library y is too old"), "library y is too old"),
        (KeyError("z"), "finding out failed: KeyError: 'z'"),
    ],
)
def test_a_dispatchers_own_reason_is_shown(monkeypatch: pytest.MonkeyPatch, reason: object, text: str) -> None:
    register(monkeypatch, Capabilities(), reason)
    report = doctor.diagnose()
    assert report["dispatchers"]["planted"]["reasons"] == [text]
    assert f"not usable  {text}" in doctor.to_text(report)
    assert report["works"]


def test_an_installed_dispatcher_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "outside_ep-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-ep\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[moe_ep.dispatchers]\noutside = outside_ep.missing:Outside\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor.diagnose()["dispatchers"]["outside"]
    assert not found["usable"]
    assert "outside-ep" in found["reasons"][0]
    assert "No module named 'outside_ep'" in found["reasons"][0]


def test_no_gloo_and_no_gpu_leaves_the_default_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "num_gpus", lambda: 0)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    report = doctor.diagnose()
    assert not report["works"]
    assert report["dispatchers"]["all2all"]["reasons"] == [
        "its ranks on CPUs talk through gloo, and torch is built without it"
    ]
    assert report["dispatchers"]["local"]["usable"]


def test_topology_of_two_gpus() -> None:
    assert machine.parse_topology(TOPOLOGY) == [["X", "NV18"], ["NV18", "X"]]


@pytest.mark.parametrize("text", ["", "No devices were found", "Legend:\n  X = Self\n"])
def test_no_topology(text: str) -> None:
    assert machine.parse_topology(text) is None


def test_links_are_shown_once_a_pair() -> None:
    gpu = {"name": "GPU of a test", "memory_mib": 1024, "sm": "9.0", "sms": 132, "kernels": "built for sm_90a"}
    report = {
        **doctor.diagnose(),
        "gpus": [gpu, gpu],
        "peer_access": [[True, False], [False, True]],
        "links": machine.parse_topology(TOPOLOGY),
    }
    lines = doctor.to_text(report).splitlines()
    assert "GPU 1       GPU of a test, 1024 MiB, compute capability 9.0, 132 SMs; kernels built for sm_90a" in lines
    assert [line for line in lines if line.startswith("GPU 0 - 1")] == ["GPU 0 - 1   NV18, peer access no"]
