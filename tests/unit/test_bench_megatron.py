"""The table of tools/bench_megatron.py."""

from __future__ import annotations

from tools.bench_megatron import report


def test_ratios_are_to_megatrons_alltoall_and_refusals_are_said() -> None:
    times = {"megatron alltoall": [300.0, 200.0, 100.0], "direct": [50.0, 150.0, 100.0]}
    first, native, ours, missing = report("qwen3", times, {"deepep": "Unavailable: not installed"}).splitlines()
    assert first == "qwen3: forward + backward, us"
    assert native.split() == ["megatron", "alltoall", "200", "p90", "200", "1.00", "x"]
    assert ours.split() == ["direct", "100", "p90", "100", "2.00", "x"]
    assert missing.split(maxsplit=1)[1] == "does not run here: Unavailable: not installed"
