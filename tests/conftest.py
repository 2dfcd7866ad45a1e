"""What all tests share: the gpu marker with its option, and hypothesis' settings."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

# The machines that run these tests are shared, so a slow example is no failure. CI repeats the same examples.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share-gpus",
        action="store_true",
        help="let several ranks of a test share a GPU where there are too few: results are held, times say nothing; "
        "needs NCCL 2.30 or newer",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    needed = marker.args[0] if marker.args else 1
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    shared = present > 0 and item.config.getoption("--share-gpus") and not marker.kwargs.get("apart", False)
    if present < needed and not shared:
        pytest.skip(f"needs {needed} CUDA GPU(s), this machine has {present}")
