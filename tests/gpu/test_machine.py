"""What the doctor reads off real GPUs."""

from __future__ import annotations

import pytest
import torch

from moe_ep import doctor, machine

pytestmark = pytest.mark.gpu


def test_gpus_and_versions_agree_with_torch() -> None:
    found = machine.machine()
    assert found["cuda"] == torch.version.cuda
    assert found["cuda_missing"] is None
    assert [gpu["name"] for gpu in found["gpus"]] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
    assert all(row[index] for index, row in enumerate(found["peer_access"]))


def test_the_loaded_nccl_is_read_from_the_library() -> None:
    version = machine.loaded_nccl()
    assert version is not None
    assert len([int(part) for part in version.split(".")]) == 3


@pytest.mark.gpu(2, apart=True)
def test_every_pair_of_gpus_has_a_line() -> None:
    lines = doctor.to_text(doctor.diagnose()).splitlines()
    pairs = torch.cuda.device_count() * (torch.cuda.device_count() - 1) // 2
    assert len([line for line in lines if line.startswith("GPU") and "peer access" in line]) == pairs
