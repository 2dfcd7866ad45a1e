"""Dispatchers by name: unknown, registered twice, entry points, refusals, sharing."""

from __future__ import annotations

import copy
import importlib.metadata
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import moe_ep
from moe_ep import (
    DispatchConfig,
    ProtocolError,
    RecipeError,
    Unavailable,
    build_dispatcher,
    known_dispatchers,
    register_dispatcher,
)
from moe_ep.dispatch import Capabilities, close_dispatchers, find_dispatcher, unavailable_reasons
from moe_ep.dispatch import registry as registry_module
from moe_ep.dispatch.capabilities import capability_reasons
from moe_ep.dispatch.local import Local

CONFIG = DispatchConfig(name="all2all", num_experts=8, top_k=2, hidden_size=16)


class FakePoint:
    """What importlib.metadata gives for one line of a package's entry points."""

    def __init__(self, name: str, dist: str, target: object) -> None:
        self.name, self.value, self.dist = name, f"{dist}:X", type("Dist", (), {"name": dist})()
        self._target = target
        self.loads = 0

    def load(self) -> object:
        self.loads += 1
        if isinstance(self._target, Exception):
            raise self._target
        return self._target


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> list[FakePoint]:
    points: list[FakePoint] = []
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: points if group == "moe_ep.dispatchers" else []
    )
    monkeypatch.setattr(registry_module, "_classes", dict(registry_module._classes))
    monkeypatch.setattr(registry_module, "_adopted", set())
    return points


def test_an_unknown_name_gets_the_nearest_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    built_in = {name: cls for name, cls in registry_module._classes.items() if name in registry_module._BUILT_IN}
    monkeypatch.setattr(registry_module, "_classes", built_in)  # without what other tests registered
    with pytest.raises(
        RecipeError, match=r"unknown dispatcher 'al2all'; did you mean 'all2all'\? known: agrs, all2all"
    ):
        build_dispatcher(replace(CONFIG, name="al2all"))


def test_a_third_party_dispatcher_is_found_by_entry_point_and_loaded_only_when_asked_for(
    entry_points: list[FakePoint],
) -> None:
    class Theirs(Local):
        name = "theirs"

    entry_points.append(FakePoint("theirs", "their-package", Theirs))
    assert "theirs" in known_dispatchers()
    assert entry_points[0].loads == 0
    assert find_dispatcher("theirs") is Theirs
    assert find_dispatcher("theirs") is Theirs
    assert entry_points[0].loads == 1


@pytest.mark.parametrize("name", ["twice", "all2all"])
def test_a_name_that_two_distributions_claim_is_an_error_that_names_both(
    entry_points: list[FakePoint], name: str
) -> None:
    entry_points += [FakePoint(name, "package-a", Local), FakePoint(name, "package-b", Local)]
    with pytest.raises(RecipeError, match=rf"{name}.*package-a and by package-b"):
        find_dispatcher(name)


def test_an_entry_point_that_fails_to_import_or_is_no_dispatcher_says_so(entry_points: list[FakePoint]) -> None:
    entry_points += [FakePoint("broken", "package-c", ImportError("no libthing.so")), FakePoint("odd", "package-d", 3)]
    with pytest.raises(Unavailable, match=r"'broken' of package-c cannot be imported: no libthing.so"):
        find_dispatcher("broken")
    with pytest.raises(RecipeError, match=r"'odd' of package-d is 3, not a subclass of Dispatcher"):
        find_dispatcher("odd")
    assert "no libthing.so" in unavailable_reasons(replace(CONFIG, name="broken"), None)[0]


def test_a_name_registered_in_this_process_and_claimed_by_a_distribution_is_an_error_that_names_both(
    entry_points: list[FakePoint],
) -> None:
    @register_dispatcher("mine")
    class Mine(Local):
        pass

    entry_points.append(FakePoint("mine", "package-e", Mine))
    assert find_dispatcher("mine") is Mine
    registry_module._adopted.clear()
    entry_points[:] = [FakePoint("mine", "package-f", Local)]
    with pytest.raises(RecipeError, match=r"'mine' is claimed by package-f and by .*Mine, which was registered"):
        find_dispatcher("mine")


def test_registering_another_class_under_a_taken_name_is_refused(entry_points: list[FakePoint]) -> None:
    find_dispatcher("local")
    with pytest.raises(RecipeError, match=r"'local' is taken by moe_ep.dispatch.local.Local"):

        @register_dispatcher("local")
        class Other(Local):
            pass


def test_layers_of_one_configuration_share_one_dispatcher_until_it_is_closed() -> None:
    first = build_dispatcher(CONFIG)
    assert build_dispatcher(replace(CONFIG)) is first
    assert build_dispatcher(replace(CONFIG, top_k=3)) is not first
    close_dispatchers()
    assert build_dispatcher(CONFIG) is not first


REFUSALS = {
    "indivisible experts": (dict(num_experts=6), Capabilities(), 4, "num_experts = 6 is not divisible by the 4 ranks"),
    "top-k above experts": (dict(top_k=9), Capabilities(), 1, "top_k = 9 is larger than num_experts = 8"),
    "rank count": ({}, Capabilities(rank_counts=(2, 4)), 8, "it serves 2, 4 rank(s), the group has 8"),
    "dtype": (dict(dtype="float16"), Capabilities(dtypes=("bfloat16",)), 1, "it moves bfloat16, dtype is float16"),
    "hidden multiple": (dict(hidden_size=100), Capabilities(hidden_multiple=8), 1, "multiple of 8, got 100"),
    "hidden maximum": ({}, Capabilities(max_hidden=8), 1, "hidden_size of at most 8, got 16"),
    "top-k maximum": ({}, Capabilities(max_top_k=1), 1, "top_k of at most 1, got 2"),
    "max_tokens missing": ({}, Capabilities(needs_max_tokens=True), 1, "max_tokens, which is not set"),
    "max_tokens zero": (dict(max_tokens=0), Capabilities(), 1, "max_tokens must be at least 1, got 0"),
    "router": ({}, Capabilities(routers=("grouped",)), 1, "needs router grouped, got 'softmax'"),
    "capacity": (dict(capacity_factor=2.0), Capabilities(), 1, "capacity_factor = 2.0 would have no effect"),
    "num_sms": (dict(num_sms=8), Capabilities(), 1, "num_sms = 8 would have no effect"),
    "option": (dict(options=(("api", "v2"),)), Capabilities(options=("a",)), 1, "no option 'api'; it knows a"),
}


def test_every_sentence_names_a_way_out() -> None:
    for changes, capabilities, num_ranks, _ in REFUSALS.values():
        (sentence,) = capability_reasons(capabilities, replace(CONFIG, **changes), num_ranks)
        assert ";" in sentence, sentence


@pytest.mark.parametrize("case", REFUSALS)
def test_a_configuration_beyond_a_capability_is_refused_with_value_limit_and_way_out(case: str) -> None:
    changes, capabilities, num_ranks, text = REFUSALS[case]
    reasons = capability_reasons(capabilities, replace(CONFIG, **changes), num_ranks)
    assert len(reasons) == 1 and text in reasons[0]


def test_a_configuration_within_the_capabilities_is_not_refused() -> None:
    assert capability_reasons(Capabilities(), CONFIG, 4) == []


def test_every_name_of_the_package_is_known_before_its_module_is_imported() -> None:
    ask = "import moe_ep.experts_registry as x; from moe_ep.dispatch import known_dispatchers as d"
    ask += "; print(*x.known_experts(), '|', *d())"
    said = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    text = "\n".join(path.read_text() for path in Path(moe_ep.__file__).parent.rglob("*.py"))
    for decorator, known in zip(("experts", "dispatcher"), said.split("|"), strict=True):
        names = re.findall(rf'^@register_{decorator}\("(\w+)"\)', text, re.MULTILINE)
        assert len(names) > 3 and set(names) <= set(known.split())


def test_a_dispatcher_is_not_pickled_and_says_what_to_save() -> None:
    dispatcher = build_dispatcher(DispatchConfig(name="local", num_experts=4, top_k=2, hidden_size=8), None)
    with pytest.raises(ProtocolError, match=r"dispatcher 'local' belongs to a process group .* state_dict"):
        pickle.dumps(dispatcher)
    assert copy.deepcopy(dispatcher) is dispatcher
