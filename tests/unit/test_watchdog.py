"""A communication that does not end is named, once; one that ends, or fails, is forgotten."""

from __future__ import annotations

import time

import pytest
import torch

from moe_ep.dispatch.watchdog import Watchdog

CPU = torch.device("cpu")


def wait_for_text(capsys: pytest.CaptureFixture[str], word: str) -> str:
    text = ""
    end = time.monotonic() + 20
    while word not in text and time.monotonic() < end:
        time.sleep(0.01)
        text += capsys.readouterr().err
    return text


def test_an_overdue_communication_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    dog = Watchdog("deepep", 1, 2, timeout_s=0.05)
    with dog.watch("dispatch of layer 3, micro-batch 0", CPU):
        pass
    with dog.watch("combine of layer 3, micro-batch 0", CPU):
        text = wait_for_text(capsys, "wait for\n")
        time.sleep(0.2)
    assert text.count("moe_ep:") == 1
    words = "rank 1 of 2, deepep, communication 2: combine of layer 3, micro-batch 0 was issued"
    assert words in text and "the last one that ended is 1 (dispatch of layer 3, micro-batch 0)" in text
    dog.close()
    assert capsys.readouterr().err == ""


def test_what_ended_or_failed_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    dog = Watchdog("deepep", 0, 2, timeout_s=0.02)
    with pytest.raises(KeyError), dog.watch("dispatch", CPU):
        raise KeyError
    for _ in range(3):
        with dog.watch("combine", CPU):
            pass
    assert dog.num_in_flight == 0 and dog.last_ended == "4 (combine)"
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
    dog.close()


def test_the_thread_ends_with_close() -> None:
    dog = Watchdog("deepep", 0, 2, timeout_s=60)
    with dog.watch("dispatch", CPU):
        pass
    thread = dog._thread
    assert thread is not None and thread.is_alive()
    dog.close()
    dog.close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("timeout_s", [10, 60, 600, 1800])
def test_what_stalls_is_named_before_the_group_or_the_library_gives_up(timeout_s: float) -> None:
    dog = Watchdog("deepep", 0, 2, timeout_s)
    latest = dog.overdue_s * 1.25  # it looks four times in that span
    assert latest < min(timeout_s, 100)  # NUM_CPU_TIMEOUT_SECS, NUM_TIMEOUT_CYCLES of DeepEP's configs.cuh
