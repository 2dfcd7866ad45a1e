"""What `nccl_ep` refuses before anything is allocated, the sizes it hands to the library, and how it looks for it."""

from __future__ import annotations

import ctypes
import types
from pathlib import Path
from typing import Any

import pytest

from moe_ep.config import DispatchConfig
from moe_ep.dispatch import nccl_ep_library as found
from moe_ep.dispatch.capabilities import capability_reasons
from moe_ep.dispatch.nccl_ep_sizes import CAPABILITIES, make_sizes, option_reasons


def make(**fields: Any) -> DispatchConfig:
    options = fields.pop("options", {})
    sizes: dict[str, Any] = {
        "num_experts": 64,
        "top_k": 8,
        "hidden_size": 7168,
        "dtype": "bfloat16",
        "max_tokens": 4096,
    }
    return DispatchConfig(name="nccl_ep", **(sizes | fields), options=tuple(sorted(options.items())))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"options": {"layout": "rank_major"}}, "layout = 'rank_major' is not one of 'expert_major', 'flat'"),
    ({"options": {"budget_rows": "all"}}, "budget_rows = 'all' must be a number of rows, at least 1"),
    ({"options": {"budget_rows": True}}, "budget_rows = True must be a number of rows"),
    (
        {"options": {"budget_rows": 4095}},
        "budget_rows = 4095 is less than max_tokens = 4096, which the library refuses",
    ),
    ({"options": {"budget_rows": 9000}, "capacity_factor": 2.0}, "both say how many rows a rank can receive; set one"),
    ({"options": {"budget_rows": 9000, "layout": "flat"}}, "layout = 'flat' reads the number of received rows"),
    ({"capacity_factor": 2.0, "options": {"layout": "flat"}}, "leave budget_rows and capacity_factor unset"),
    ({"options": {"low_latency": 1}}, "low_latency = 1 must be true or false"),
    ({"hidden_size": 15868, "options": {"low_latency": True}}, "rows of 32768 bytes for hidden_size = 15868"),
    ({"max_tokens": 8193}, "max_tokens = 8193 is more than the 8192 that the library serves"),
    ({"num_sms": 17}, "num_sms = 17 is outside of 1 to 16, the barriers that the library has for its blocks"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=[words[:30] for _, words in REFUSED])
def test_options_that_do_not_fit_are_refused(fields: dict[str, Any], words: str) -> None:
    assert any(words in reason for reason in option_reasons(make(**fields)))


def test_what_fits_is_not_refused() -> None:
    for fields in ({}, {"num_sms": 16}, {"capacity_factor": 1.0}, {"options": {"budget_rows": 4096}},
                   {"options": {"layout": "flat", "low_latency": True}}):  # fmt: skip
        assert option_reasons(make(**fields)) == []


LIMITS: list[tuple[dict[str, Any], int, str]] = [
    ({}, 1, "the group has 1; take another dispatcher"),
    ({"num_experts": 66}, 3, "it serves 2, 4, 8"),
    ({"num_experts": 66}, 6, "the group has 6"),
    ({"top_k": 33}, 2, "it serves a top_k of at most 32, got 33"),
    ({"dtype": "float64"}, 2, "it moves float32, bfloat16, float16, dtype is float64"),
    ({"max_tokens": None}, 2, "max_tokens, which is not set"),
    ({"num_experts": 63}, 2, "num_experts = 63 is not divisible by the 2 ranks"),
]


@pytest.mark.parametrize(("fields", "num_ranks", "words"), LIMITS, ids=[words[:30] for *_, words in LIMITS])
def test_the_librarys_limits_are_refused(fields: dict[str, Any], num_ranks: int, words: str) -> None:
    assert any(words in reason for reason in capability_reasons(CAPABILITIES, make(**fields), num_ranks))


def test_sizes_are_rounded_to_what_the_library_takes() -> None:
    sizes = make_sizes(make(num_experts=10, max_tokens=3, hidden_size=7), 2, 2)
    assert (sizes.num_experts, sizes.max_tokens, sizes.row, sizes.row_bytes) == (12, 16, 16, 32)
    for hidden, element_bytes, row in ((7, 4, 8), (12, 4, 16), (9, 2, 16), (17, 2, 24), (2880, 2, 2880), (1, 4, 8)):
        assert make_sizes(make(hidden_size=hidden), 2, element_bytes).row == row
    assert make_sizes(make(num_experts=10), 2, 2).local_experts == 6
    assert make_sizes(make(num_experts=20), 4, 2).local_experts == 5
    assert make_sizes(make(max_tokens=17), 2, 2).max_tokens == 32
    assert make_sizes(make(capacity_factor=1.5), 2, 2).budget == 49152
    assert make_sizes(make(options={"budget_rows": 4097}), 2, 2).budget == 4097
    assert make_sizes(make(max_tokens=4090, options={"budget_rows": 4090}), 2, 2).budget == 4096


def test_memory_is_counted_from_the_configuration() -> None:
    """dsv3 on two ranks: 112 MiB of rows each way; 65536 expert rows of scales, 896 MiB; weights 16 MiB each way."""
    grouped = make_sizes(make(), 2, 2)
    assert grouped.most_rows == 65536
    assert grouped.group_bytes() == (2 * 112 + 896 + 2 * 16 + 32 << 20) + 8192 * 8
    flat = make_sizes(make(options={"layout": "flat"}), 2, 2)
    assert flat.most_rows == 8192
    assert flat.group_bytes() == (2 * 112 + 112 + 2 * 2 + 32 << 20) + 8192 * 8
    # maps 25 T + 32 N bytes, dense weights 4 T E, ids 8 T K, slots 8 N K + 4 R T
    assert grouped.handle_bytes() == 4096 * 25 + 65536 * 32 + 4096 * 256 + 4096 * 64 + 65536 * 64 + 8192 * 4
    assert flat.handle_bytes() == 4096 * 25 + 8192 * 32 + 4096 * 256 + 4096 * 64


def test_low_latency_rows_have_room_for_their_number() -> None:
    assert make_sizes(make(hidden_size=7168), 2, 2).low_latency_row == 7680
    assert make_sizes(make(hidden_size=504), 2, 2).low_latency_row == 512
    assert make_sizes(make(hidden_size=505), 2, 2).low_latency_row == 1024
    assert make_sizes(make(hidden_size=7), 2, 4).low_latency_row == 512
    sizes = make_sizes(make(max_tokens=128), 8, 2)
    home = 128 * (8 + 8) * (7680 * 2 + 60 * 4)
    assert sizes.low_latency_bytes() == 2 * home + 2 * 256 + (32 << 20)


@pytest.fixture
def nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Headers of NCCL 2.30.7, and a library that has every symbol."""
    (tmp_path / "include").mkdir()
    header = tmp_path / "include" / "nccl.h"
    header.write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 30\n#define NCCL_PATCH 7\n")
    monkeypatch.setenv("NCCL_HOME", str(tmp_path))
    library = types.SimpleNamespace(**dict.fromkeys(found.NCCL_SYMBOLS, object()))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    return header


def test_the_loaded_nccl_is_judged_by_what_it_offers(nccl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found._nccl_reasons("2.30.7") == []
    assert "no NCCL library is loaded" in found._nccl_reasons(None)[0]
    old = types.SimpleNamespace(ncclDevCommCreate=object())
    monkeypatch.setattr(ctypes, "CDLL", lambda name: old)
    (reason,) = found._nccl_reasons("2.28.9")
    assert "2.28.9, lacks ncclCommQueryProperties, ncclGetPeerDevicePointer, ncclWinGetUserPtr" in reason
    assert "LD_PRELOAD" in reason


def test_headers_must_be_those_of_the_loaded_nccl(nccl: Path) -> None:
    (reason,) = found._nccl_reasons("2.30.4")
    assert "against the headers of NCCL 2.30.7, and NCCL 2.30.4 is loaded" in reason
    nccl.unlink()
    assert "finds none; set NCCL_HOME" in found._nccl_reasons("2.30.7")[0]


def test_the_compiler_is_looked_for_where_the_library_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_EP_JIT_NVCC", "NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert found.find_nvcc() is None
    assert "no nvcc is found; set CUDA_HOME" in found._compiler_reasons()[0]
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert found.find_nvcc() == str(nvcc)
    assert found._nvcc_version() == "13.0"
    monkeypatch.setenv("NVCC", str(tmp_path / "other"))
    assert found.find_nvcc() is None


def test_a_package_that_is_missing_or_lacks_what_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    (reason,) = found._import_reasons()
    assert (
        reason.startswith("nccl.ep cannot be imported (") and "pip install --no-deps nccl-extensions==0.1.0" in reason
    )
    monkeypatch.setattr(found.importlib, "import_module", lambda name: types.SimpleNamespace(Group=object()))
    (reason,) = found._import_reasons()
    assert "the nccl.ep that was found lacks GroupConfig, Tensor" in reason


def test_versions_that_were_found_are_named(nccl: Path) -> None:
    versions = found.found_versions()
    assert versions["NCCL headers"] == "2.30.7"
    assert set(versions) == {"nccl-extensions", "nccl4py", "NCCL loaded", "NCCL headers", "nvcc"}
