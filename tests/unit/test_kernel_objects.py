"""The built libraries hold code of every kernel for every architecture; the reader sees where one does not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from moe_ep.kernels.build import FLAGS, FOLDER, build, find_nvcc

from tools.kernel_objects import Objects, main, plain_name, problems, read_objects, source_kernels

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc is found")
ARCHS = ("sm_80", "sm_90a", "sm_100")
SOURCE = """
namespace {
__global__ void everywhere(float* x) {
    for (int i = threadIdx.x; i < 1000; i += blockDim.x) x[i] = x[i] * x[i + 1] + sqrtf(x[i + 2]) / x[i + 3];
}
__global__ void __launch_bounds__(64) newer_only(float* x) {
#if __CUDA_ARCH__ >= 900
    for (int i = threadIdx.x; i < 1000; i += blockDim.x) x[i] = x[i] * x[i + 1] + sqrtf(x[i + 2]) / x[i + 3];
#endif
}
}
extern "C" void run(float* x) { everywhere<<<1, 32>>>(x); newer_only<<<1, 32>>>(x); }
"""


@needs_nvcc
def test_a_kernel_that_is_compiled_out_for_one_architecture_is_found(tmp_path: Path) -> None:
    (tmp_path / "guarded.cu").write_text(SOURCE)
    kernels = source_kernels(tmp_path)
    assert kernels == {"everywhere", "newer_only"}
    made: dict[str, Objects] = {}
    for arch in ("sm_80", "sm_90a"):
        out = tmp_path / f"{arch}.so"
        code = f"-gencode=arch=compute_{arch[3:]},code={arch}"
        nvcc = str(find_nvcc())
        subprocess.run([nvcc, *FLAGS, code, str(tmp_path / "guarded.cu"), "-o", str(out)], check=True, cwd=tmp_path)
        made[arch] = read_objects(out.read_bytes())
    assert [objects.archs for objects in made.values()] == [{80}, {90}]
    (wrong,) = problems(made, kernels)
    assert wrong.startswith("sm_80: ") and "newer_only" in wrong and "bytes of code" in wrong
    assert problems({"sm_90a": made["sm_90a"]}, kernels) == []


def test_what_is_missing_is_named() -> None:
    whole = Objects({90}, {"_ZN6moe_epa.3addEv": 4096, "_ZN6moe_epa.6swigluIfEv": 4096})
    part = Objects({90}, {"_ZN6moe_epa.3addEv": 4096})
    assert problems({"sm_90a": whole}, {"add", "swiglu"}) == []
    assert problems({"sm_90a": whole}, {"add", "swi"}) == ["sm_90a: kernel swi of the sources has no code"]
    assert problems({"sm_90a": whole, "sm_80": part}, {"swiglu"}) == [
        "sm_80: its images are for [90]",
        "sm_80: kernel swiglu of the sources has no code",
        "sm_80: _ZN6moe_epa.6swigluIfEv is there for other architectures alone",
    ]


def test_names_without_the_hashes_of_a_build() -> None:
    symbol = "_ZN6moe_ep41_GLOBAL__N__c7c184b6_9_routes_cu_76897df212count_routesEPKliiiPi"
    assert plain_name(symbol) == "_ZN6moe_eproutes_cu.12count_routesEPKliiiPi"


@needs_nvcc
@pytest.mark.slow
def test_every_kernel_has_code_for_three_generations(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = source_kernels(FOLDER)
    assert len(kernels) >= 20
    assert problems({arch: read_objects(build(arch).read_bytes()) for arch in ARCHS}, kernels) == []
    assert main(ARCHS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[1:]} == kernels


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and main(["volta"]) == 2
    assert "architecture 'volta' is none" in capsys.readouterr().err
