"""What the experts' benchmark runs is right and complete: on a CPU, with doubles in the libraries' places."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import quack_library
from tests.unit.gemm_doubles import put_in_place
from tests.unit.quack_double import Double
from tools.bench_experts import BACK_ENDS, Rank, _refused, _rows, compare, main
from tools.shapes import Shape

SHAPE = Shape(T=20, H=16, I=8, E=8, K=2)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    double = Double()
    monkeypatch.setattr(quack_library, "require_device", lambda device: None)
    monkeypatch.setattr(quack_library, "load", lambda: (double.library, ""))
    return double


def test_both_agree_on_even_unique_rows(double: Double) -> None:
    rank = Rank(SHAPE, torch.device("cpu"))
    assert rank.num_rows == SHAPE.T * SHAPE.K and set(rank.inp.tokens_per_expert.tolist()) == {10}
    errors, wrong = compare(rank, ["torch", "quack"])
    assert 0 < errors["quack"] < 0.1 and wrong == []


def test_every_back_end_agrees_and_has_its_rows(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch)
    rank = Rank(SHAPE, torch.device("cpu"))
    errors, wrong = compare(rank, BACK_ENDS)
    assert wrong == [] and all(0 < errors[name] < 0.1 for name in BACK_ENDS[1:])
    runs = rank.whole(BACK_ENDS)
    rows = _rows(rank, runs, {key: [2.0] for key in runs}, errors) + _refused(rank, {"te": "", "quack": "is missing"})
    assert {row["experts"] for row in rows if row["api"] == "fwd+bwd" and row["status"] == "ok"} == set(BACK_ENDS)
    assert {row["experts"] for row in rows if "left free" in row["api"]} == {"torch", "quack"}
    assert [(row["experts"], row["reason"]) for row in rows if row["status"] == "refused"] == [("quack", "is missing")]
    rank.split_experts("te").compute_set = lambda inp, weights: 2 * rank.forward("torch")  # type: ignore[attr-defined]
    assert [sentence.split()[:2] for sentence in compare(rank, BACK_ENDS)[1]][:1] == [["te:", "y"]]


def test_a_wrong_product_is_found(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    def gemm(*args: Any, **kwargs: Any) -> Tensor:
        return double.gemm(*args, **kwargs).mul_(1.5)

    monkeypatch.setattr(quack_library, "load", lambda: (dataclasses.replace(double.library, gemm=gemm), ""))
    _, wrong = compare(Rank(SHAPE, torch.device("cpu")), ["torch", "quack"])
    assert [sentence.split()[1] for sentence in wrong] == ["dx", "d_gate_up", "d_down"]


def test_every_part_runs_and_has_a_row(double: Double, capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank(SHAPE, torch.device("cpu"))
    runs = dict(rank.parts(double.library))
    for _, run in runs.values():
        run()
    runs |= {key: run for key, run in rank.whole(["torch", "quack"]).items() if "left" not in key[1]}
    for _, run in runs.values():
        run()
    rows = _rows(rank, runs, {key: [2.0, 1.0, 3.0] for key in runs}, {"torch": 0.0, "quack": 0.01})
    floors = {row["api"]: row["floor_us"] for row in rows if row["experts"] == "quack"}
    one = floors["up, gathering"] / 4
    assert floors["fwd"] == pytest.approx(6 * one) and floors["fwd+bwd"] == pytest.approx(18 * one)
    assert floors["gather_rows"] is None and all(row["us_p50"] == 2.0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows) == 15


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "nothing to time on a CPU" in capsys.readouterr().err
