"""The steps of `bench_suite.py`: which commands, on which sizes, and how long each may take."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

GROUPS = ("contract", "stages", "layers", "domino", "replicas", "megatron", "charts")
SHAPES = {"dsv3": "dsv3_full", "qwen3": "qwen3", "mixtral": "mixtral"}  # experts as in the models
FEW = {"dsv3": "dsv3", "qwen3": "qwen3", "mixtral": "mixtral"}  # on two ranks: a quarter of dsv3's experts
HOT = {"dsv3": 1, "dsv3_full": 1, "qwen3": 4}  # experts whose routes make the skew, where as many copies even it out
TINY = {"tiny": "64,32,48,16,2"}
ON_GPUS = (
    *("all2all", "all2all:num_sms=8", "agrs", "direct", "direct:capacity_factor=1.2"),
    *("deepep:api=v1", "deepep:api=v2", "deepep:api=v2:expand=true", "nccl_ep", "nccl_ep:layout=flat"),
)
ON_CPUS = ("all2all", "agrs")
SKEWS = "1,1.5,2,3"
SMS = (4, 8, 16, 32, 64)  # that a dispatcher of peer memory may use
CTAS = (4, 6, 8, 16)  # thread blocks of NCCL beside the experts' GEMMs
CONTRACT = {"messages": "all2all or agrs or local", "direct": "direct", "deepep": "deepep", "nccl_ep": "nccl_ep"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command.

    Attributes:
        name: of its files; group: what --only calls it.
        argv: the command.
        limit_s: seconds after which it is killed.
        rows: the file of rows that it writes, None: none.
        environment: added to this process's.
    """

    name: str
    group: str
    argv: tuple[str, ...]
    limit_s: float
    rows: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The command as one would type it."""
        return shlex.join(self.argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    ranks: int
    out: Path
    rehearsal: bool
    commit: str | None

    @property
    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.rehearsal else {}

    def measured(self, group: str, name: str, program: str, limit_s: float, *arguments: str) -> Step:
        rows = self.out.absolute() / f"{group}-{name}.jsonl"
        launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks))
        given = (*arguments, "--out", str(rows), *(("--commit", self.commit) if self.commit else ()))
        return Step(
            name=f"{group}-{name}", group=group, argv=(*launch, f"tools/{program}", *given), limit_s=limit_s, rows=rows,
            environment=self.environment,
        )  # fmt: skip

    def tested(self, name: str, *where: str) -> Step:
        argv = (sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *where)
        return Step(
            name=f"contract-{name}", group="contract", argv=argv, limit_s=580, environment=self.environment
        )  # fmt: skip


def steps(ranks: int, out: Path, *, rehearsal: bool, commit: str | None) -> list[Step]:
    """All steps of a host, in the order in which they are worth most.

    Args:
        ranks: R.
        out: folder of their files.
        rehearsal: tiny sizes on CPUs.
        commit: of copied sources, None where git knows.
    """
    host = _Host(ranks=ranks, out=out, rehearsal=rehearsal, commit=commit)
    charts = (sys.executable, "tools/bench_chart.py", str(out.absolute()))
    return [
        *_contract(host),
        *_benchmarks(host),
        Step(name="charts", group="charts", argv=charts, limit_s=120),
    ]


def _contract(host: _Host) -> Iterator[Step]:
    at = f"R{host.ranks}"
    if host.rehearsal:
        path = "tests/ranks/test_contract_eight.py" if host.ranks == 8 else "tests/ranks/test_contract.py"
        yield host.tested("messages", path, "-m", "slow or not slow", "-k", f"test_contract and {at}")
        return
    own = {"messages": "test_contract_gpu.py", "direct": "test_direct_gpu.py", "deepep": "test_deepep_gpu.py"}
    for name, which in CONTRACT.items():
        alone = host.ranks < 8 and name in own
        path = f"tests/gpu/{own[name] if alone else 'test_many_gpus.py'}"
        yield host.tested(name, path, "-m", "slow or not slow", "-k", at if alone else f"{at} and ({which})")


def _benchmarks(host: _Host) -> Iterator[Step]:
    fewer = ("--iterations", "2", "--warmup", "1") if host.rehearsal else ("--iterations", "10", "--warmup", "3")
    shapes = TINY if host.rehearsal else FEW if host.ranks == 2 else SHAPES
    for name, shape in shapes.items():
        yield from _of_shape(host, name, shape, ("--shape", shape, *fewer))
    if host.rehearsal:
        return
    yield host.measured("replicas", "links", "bench_replica_sync.py", 300, "--messages")
    for name, shape in shapes.items():
        yield host.measured("megatron", name, "bench_megatron.py", 580, "--shape", shape)


def _of_shape(host: _Host, name: str, shape: str, on: tuple[str, ...]) -> Iterator[Step]:
    candidates = ON_CPUS if host.rehearsal else ON_GPUS
    all_, best = ",".join(candidates), ",".join(candidates if host.rehearsal else ("all2all:num_sms=8", "direct"))
    sweep = () if host.rehearsal else tuple(f"direct:capacity_factor=1.2:num_sms={sms}" for sms in SMS)
    beside = candidates if host.rehearsal else ("all2all", *(f"all2all:num_sms={n}" for n in CTAS), "direct")
    experts = () if host.rehearsal else ("--experts", "torch,quack")
    hot = ("--hot-experts", str(HOT[shape])) if shape in HOT else ()
    slots = "0,1" if shape == "mixtral" else "0,1,2,4" if shape == "qwen3" else "0,1,2"
    limit = 120 if host.rehearsal else 580
    skews, both = ("--skew", SKEWS if host.ranks >= 3 else "1,1.5,2"), ("--pass", "fwd+bwd")

    def dispatched(group: str, *arguments: str) -> Step:
        return host.measured(group, name, "bench_dispatch.py", limit, *on, *arguments)

    yield dispatched("stages", *skews, "--dispatchers", ",".join((all_, *sweep)))
    yield dispatched("layers", *skews, *both, *experts, "--level", "layer", "--dispatchers", all_)
    yield dispatched(
        "domino", *both, *experts, "--level", "stack", "--micro-batches", "1,2,4", "--dispatchers", ",".join(beside),
        *(() if host.rehearsal else ("--attention", "gqa")),
    )  # fmt: skip
    yield dispatched(
        "replicas", "--skew", "1,1.5,1.9", *hot, *both, "--level", "layer", "--replica-slots", slots,
        "--dispatchers", best,
    )  # fmt: skip
