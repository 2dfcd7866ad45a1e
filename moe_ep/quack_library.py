"""Finds quack-kernels (github.com/Dao-AILab/quack), says what is missing for it, and limits its GEMMs' grids.

Nothing here is imported before a configuration names these experts or the doctor asks, and `quack` not before
`load` is called.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch

from .errors import Unavailable

INSTALL = "pip install 'quack-kernels[cu13]==0.6.5'"
PACKAGES = ("quack-kernels", "nvidia-cutlass-dsl")
# what moe_ep.quack_gemms calls: (module, attribute)
_PARTS = {
    "gemm": ("quack.gemm_interface", "gemm"),
    "gemm_act": ("quack.gemm_interface", "gemm_act"),
    "gemm_dact": ("quack.gemm_interface", "gemm_dact"),
    "norm_act_mod": ("quack.epilogue.library", "norm_act_mod"),
}
_MOST_PLANS = 4096  # launch plans that quack may keep of one kind; it makes one for each number of rows


@dataclass(frozen=True, slots=True)
class Library:
    """The parts of quack that are used, and its launch plans where this version's are where we look for them."""

    gemm: Callable[..., Any]
    gemm_act: Callable[..., Any]
    gemm_dact: Callable[..., Any]
    norm_act_mod: Callable[..., Any]
    plans: Plans | None = None


@functools.cache
def load() -> tuple[Library | None, str]:
    """quack and "", or None and why it cannot be used. Tried once in a process; imports it, which takes seconds."""
    why = not_installed() or outside_site_packages()
    if why is not None:
        return None, why
    try:
        parts = {name: getattr(importlib.import_module(module), part) for name, (module, part) in _PARTS.items()}
    except Exception as err:  # the CUTLASS DSL checks its own binaries, the driver and Python while it is imported
        text = " ".join(str(err).split()) or "no message"
        return None, f"{versions()} is installed, but it cannot be used: {type(err).__name__}: {text}; {INSTALL}"
    return Library(**parts, plans=_find_plans()), ""


def not_installed() -> str | None:
    """Which module is missing, without importing any; None: none."""
    for module in ("quack", "cutlass"):
        if importlib.util.find_spec(module) is None:
            return f"no module {module} is installed; {INSTALL}"
    return None


def outside_site_packages() -> str | None:
    """Why quack would refuse the place where the CUTLASS DSL lies; None: it would not.

    It fingerprints what an epilogue calls, and takes a file for an installed library, which it does not look into,
    only in a folder of one of two names (`_is_extern_function` of quack/gemm_runtime/identity.py). Elsewhere the first
    GEMM fails with "no fail-closed semantic key".
    """
    spec = importlib.util.find_spec("cutlass")
    origin = (spec.origin if spec is not None else None) or ""
    if {"site-packages", "dist-packages"} & set(PurePath(origin).parts):
        return None
    return (
        "the CUTLASS DSL (module cutlass) lies outside of any folder called site-packages, where quack cannot "
        "fingerprint it (it fails with 'no fail-closed semantic key'); install both into a folder of that name"
    )


def versions() -> str:
    """Names and versions of what is installed, such as "quack-kernels 0.6.5 and nvidia-cutlass-dsl 4.7.0"."""
    return " and ".join(_version(name) for name in PACKAGES)


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} of an unknown version"


def findings() -> list[str]:
    """What was found, for a person; imports nothing."""
    why = not_installed()
    if why is not None:
        return [f"quack: {why}"]
    place = outside_site_packages()
    return [f"quack: {versions()}; it compiles a kernel at first use, for seconds", *([place] if place else [])]


def gpu_reasons() -> list[str]:
    """What this machine's GPU lacks, sentences."""
    if not torch.cuda.is_available():
        return ["it needs a CUDA GPU, and torch finds none"]
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return [f"its kernels are written for compute capability 9.0 and newer, this GPU has {major}.{minor}"]
    return []


def machine_reasons() -> list[str]:
    """Why quack cannot run in this process, sentences; empty: it can. Imports it only where there is a GPU for it."""
    reasons = gpu_reasons()
    if reasons:
        return reasons
    library, why = load()
    return [] if library is not None else [why]


@dataclass(eq=False, slots=True)
class Plans:
    """quack's launch plans: how many thread blocks each starts is fixed when it is made, and kept with it.

    quack 0.6.5 has no argument for it. A persistent GEMM starts `get_max_active_clusters` clusters and deals out the
    tiles among them, so a smaller answer gives a GEMM that leaves SMs free. Plans are kept by shape alone; ours are
    therefore kept apart for each number of SMs that is left free. As with torch's own switch (`moe_ep.sms`), the
    number is one for the process.

    Attributes:
        modules: those that call `get_max_active_clusters` by that name.
        owners: every (object, attribute) where plans are kept, as of now.
        left_free: SMs that the plans in place leave free.
    """

    modules: tuple[Any, ...]
    owners: Callable[[], list[tuple[Any, str]]]
    left_free: int = 0
    _stored: MutableMapping[tuple[int, int, str], dict[Any, Any]] | None = None

    @contextlib.contextmanager
    def limited(self, num_sms: int) -> Iterator[None]:
        """GEMMs called inside leave that many SMs free."""
        before = self.left_free
        self._switch(num_sms)
        try:
            yield
        finally:
            self._switch(before)

    def forget(self) -> None:
        """Drop plans where there are very many: every number of rows makes new ones, and quack drops none."""
        for owner, name in self.owners():
            if len(getattr(owner, name)) > _MOST_PLANS:
                getattr(owner, name).clear()

    def _switch(self, num_sms: int) -> None:
        if num_sms == self.left_free:
            return
        if self._stored is None:
            self._stored = {}
            for module in self.modules:
                module.get_max_active_clusters = self._wrap(module.get_max_active_clusters)
        for owner, name in self.owners():
            self._stored[self.left_free, id(owner), name] = getattr(owner, name)
            setattr(owner, name, self._stored.get((num_sms, id(owner), name), {}))
        self.left_free = num_sms

    def _wrap(self, most: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(most)
        def fewer(cluster_size: int, *args: Any, **kwargs: Any) -> int:
            taken = -(-self.left_free // cluster_size)  # a cluster has its SMs to itself
            return max(1, most(cluster_size, *args, **kwargs) - taken)

        return fewer


def _find_plans() -> Plans | None:
    """The plans of this version, None where it keeps them elsewhere."""
    try:
        names = ("quack.gemm", "quack.gemm_runtime.host", "quack.epilogue.frontend")
        gemm, host, frontend = map(importlib.import_module, names)
    except ImportError:
        return None
    wanted = [(gemm, "get_max_active_clusters"), (host, "get_max_active_clusters"), (gemm, "_gemm_plan_cache")]
    if not all(hasattr(owner, name) for owner, name in [*wanted, (frontend, "TORCH_OP_EPI_MODS")]):
        return None

    def owners() -> list[tuple[Any, str]]:
        epilogues = list(frontend.TORCH_OP_EPI_MODS.values())
        kinds = [(epilogue, name) for epilogue in epilogues for name in ("_plan_cache", "_call_cache")]
        return [(gemm, "_gemm_plan_cache"), *kinds]

    return Plans((gemm, host), owners)


@contextlib.contextmanager
def leave_free(library: Library, num_sms: int) -> Iterator[None]:
    """GEMMs of the library called inside leave that many SMs free; 0: none."""
    if library.plans is None:
        assert num_sms == 0, "a limit that limit_refusal has a reason against"
        yield
        return
    library.plans.forget()
    with library.plans.limited(num_sms):
        yield


def require_device(device: torch.device) -> None:
    """Raise Unavailable unless quack's kernels take tensors of a device."""
    if device.type != "cuda":
        raise Unavailable(f"experts = 'quack' got rows on {device.type}: its kernels run on CUDA GPUs; move the model")


def limit_refusal(device: torch.device, library: Library | None) -> str | None:
    """Why quack's GEMMs cannot leave SMs free on a device, in a few words; None: they can."""
    if device.type != "cuda":
        return f"tensors are on {device.type}, which has no SMs"
    if library is None or library.plans is None:
        return f"{versions()} keeps its launch plans where moe_ep does not find them"
    found = torch.cuda.get_device_capability(device)
    if found != (9, 0):  # the schedulers of newer ones start a block for each tile
        return f"quack's grids can be limited on compute capability 9.0 only, this one has {found[0]}.{found[1]}"
    return None
