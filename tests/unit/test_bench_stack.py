"""Sizes of a measured stack's attention."""

from __future__ import annotations

import pytest

from tools.bench_stack import parse_attention
from tools.shapes import PRESETS, Shape


@pytest.mark.parametrize(
    ("preset", "sizes"), [("dsv3", "56,7,128,4096"), ("qwen3", "16,2,128,4096"), ("mixtral", "32,4,128,4096")]
)
def test_attention_follows_the_shape(preset: str, sizes: str) -> None:
    assert str(parse_attention("gqa", PRESETS[preset])) == f"gqa:{sizes}"
    assert parse_attention("none", PRESETS[preset]) is None


def test_attention_of_a_small_shape_and_of_stated_sizes() -> None:
    small = Shape(T=24, H=16, I=8, E=4, K=2)
    assert str(parse_attention("gqa", small)) == "gqa:1,1,16,24"
    assert str(parse_attention("gqa:4,2,6,12", small)) == "gqa:4,2,6,12"
