"""`import moe_ep` brings nothing that a user did not ask for, seen in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    *("triton", "deep_ep", "nccl", "megatron", "quack", "transformer_engine", "grouped_gemm"),
    *("matplotlib", "transformers"),
}
PROBE = """
import json, sys
import torch
before = set(sys.modules)
{imports}
print(json.dumps({{
    "new": sorted({{name.split(".")[0] for name in set(sys.modules) - before}}),
    "cuda": torch.cuda.is_initialized(),
    "group": torch.distributed.is_available() and torch.distributed.is_initialized(),
}}))
"""


def probe(imports: str, folder: Path = ROOT) -> dict[str, Any]:
    """What the import statements add to a fresh interpreter that already holds torch."""
    command = [sys.executable, "-c", PROBE.format(imports=imports)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_import_is_light() -> None:
    found = probe("import moe_ep, moe_ep.config, moe_ep.routing, moe_ep.dispatch, moe_ep.layer, moe_ep.integrations")
    assert "moe_ep" in found["new"]
    assert HEAVY & set(found["new"]) == set()
    assert not found["cuda"]
    assert not found["group"]


def test_the_probe_sees_a_heavy_import(tmp_path: Path) -> None:
    (tmp_path / "deep_ep.py").write_text("")
    (tmp_path / "innocent.py").write_text("def f(): pass\nimport deep_ep")
    assert HEAVY & set(probe("import innocent", tmp_path)["new"]) == {"deep_ep"}
