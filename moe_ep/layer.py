"""A Mixture-of-Experts layer: router, dispatcher, experts, shared experts.

The forward is cut into three parts that a scheduler of several micro-batches can call on its own; `forward` calls them
one after the other. Nothing of a micro-batch is kept on the module: it lives in the `LayerFlight` handed along.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .config import DispatchConfig, MoEConfig
from .dispatch.agreement import agree
from .dispatch.registry import build_dispatcher, refusal
from .eager import eager
from .errors import MoEError
from .experts_registry import build_experts
from .flights import LayerFlight, MoEAux, Routed, copies_held, given, releasing
from .layer_checks import check_config, check_layer_index, check_shapes
from .load import rank_load
from .losses import RouterAux
from .peers import is_early_stop, mark_everywhere, mark_reported, placed
from .replica.build import build_runtime, check_replicas
from .replica.lease import Lease
from .router import build_router
from .routing import Routing
from .schedule_steps import Link
from .shared_experts import SharedExperts
from .tracing import stage_range


class MoELayer(nn.Module):
    """Drop-in feed-forward block: x [..., H] to (y [..., H], MoEAux).

    Args:
        config: sizes, back ends, router.
        group: the expert-parallel group of R ranks; None: this rank holds all experts and no process group is needed.
        layer_index: for messages, counters and initial weights; each layer of a model has its own.

    All ranks of the group call forward (and backward) equally often and in the same order, also with zero tokens. The
    experts differ from rank to rank: keep them out of what a framework makes equal (DistributedDataParallel over the
    expert-parallel group copies rank 0's parameters to all, unless `experts` is in its ignored parameters).

    Where several micro-batches interleave, the experts leave free the SMs that the dispatcher says its communication
    takes, if they can (see `moe_ep.sms`). The attribute `reserve_sms` sets another number; experts that cannot keep to
    one then refuse it.

    Inside a compiled model (torch.compile) the layer runs eagerly between the graphs in front of it and behind it, so
    changing routes recompile nothing; `fullgraph=True` cannot work around it. See `moe_ep.eager`.

    Raises:
        RecipeError: a configuration that can never work.
        Unavailable: a back end that cannot run here, with the reason and the way out.
        PeerError: the ranks disagree about the configuration.
    """

    def __init__(self, config: MoEConfig, group: dist.ProcessGroup | None = None, *, layer_index: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layer_index = layer_index
        error: MoEError | None = None
        try:
            self._build_local(group)
        except MoEError as err:
            error = err
        fields = asdict(config) if isinstance(config, MoEConfig) else {}  # refused above, and all ranks hear of it
        agree(f"MoE layer {layer_index}", {"layer_index": layer_index, **fields}, error, group)
        self.dispatcher = build_dispatcher(_seen_by_dispatcher(config, group), group)
        self.router.kernels = self.dispatcher.kernels
        self.replicas = build_runtime(config, self.dispatcher, type(self.experts))
        self.reserve_sms: int | None = None

    def _build_local(self, group: dist.ProcessGroup | None) -> None:
        """Everything that can fail on this rank alone, before the ranks agree to go on."""
        config, layer_index = self.config, self.layer_index
        check_config(config)
        error = refusal(_seen_by_dispatcher(config, group), group)
        if error is not None:
            raise error
        check_replicas(config, group)
        check_layer_index(layer_index)
        rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())
        num_local = config.num_experts // num_ranks
        self.router = build_router(config, layer_index, rank=rank, num_ranks=num_ranks)
        self.experts = build_experts(config, num_local, rank * num_local, layer_index)
        self.shared = SharedExperts(config, layer_index) if config.num_shared_experts else None

    def reset_parameters(self, seed: int) -> None:
        """Initial weights, a function of (seed, layer, global expert id) only, so equal for every R."""
        self.router.reset_parameters(seed)
        self.experts.reset_parameters(seed)
        if self.shared is not None:
            self.shared.reset_parameters(seed)

    def extra_repr(self) -> str:
        """The resolved dispatcher and what copies experts, as `print(model)` shows it."""
        copies = "" if self.replicas is None else f", {self.replicas.describe()}"
        return f"dispatcher={self.dispatcher.describe()}{copies}"

    @eager
    def forward(self, x: Tensor, valid: Tensor | None = None, *, micro_batch: int = 0) -> tuple[Tensor, MoEAux]:
        """Run the layer on one micro-batch.

        Args:
            x: [..., S, H] in the configured dtype, sequences of S tokens (for the sequence-level balancing loss).
            valid: bool [...], False for padding, which may hold anything: no route, output zero, in no loss, gradient
                or counter.
            micro_batch: for messages.

        Raises:
            InputError, CapacityError, NonFiniteError: a fault of this rank's input; the other ranks get a PeerError.
            PeerError: another rank raised, here or in its experts.
        """
        flight = self.launch_dispatch(x, valid, micro_batch=micro_batch)
        self.launch_combine(flight)
        with self._telling(flight, "shared experts"), stage_range("shared", self.layer_index, micro_batch):
            shared = self.run_shared(x if valid is None else x.masked_fill(~valid[..., None], 0))
        y = self.resolve(flight)
        return (y if shared is None else y + shared), self.aux_of(flight)

    @eager
    def launch_dispatch(self, x: Tensor, valid: Tensor | None = None, *, micro_batch: int = 0) -> LayerFlight:
        """Router, dispatch_preprocess, dispatch."""
        flight = self.prepare(x, valid, micro_batch=micro_batch)
        with releasing(flight.lease):
            self.dispatcher.dispatch(flight.ticket)
        return flight

    @eager
    def prepare(
        self,
        x: Tensor,
        valid: Tensor | None = None,
        *,
        micro_batch: int = 0,
        waits: frozenset[Link] | None = None,
        num_micro_batches: int = 1,
        lease: Lease | None = None,
    ) -> LayerFlight:
        """Router, replicas, dispatch_preprocess; `dispatcher.dispatch(flight.ticket)` is next.

        `waits`: of its stages. `num_micro_batches`: how many interleave, the same on all ranks. `lease`: of replicas,
        where one was opened before.
        """
        lease = self.open_replicas(micro_batch, num_micro_batches) if lease is None else lease
        routed = self.run_router(x, valid, micro_batch=micro_batch, lease=lease)
        self.place([routed])
        return self.pack(routed, waits=waits, num_micro_batches=num_micro_batches)

    @property
    def joint_replicas(self) -> bool:
        """Whether micro-batches that interleave are placed together, so that all are routed before one is packed."""
        return self.config.replica.joint

    @eager
    def open_replicas(self, micro_batch: int, num_micro_batches: int, users: int = 1) -> Lease | None:
        """A lease for one micro-batch, or for `users` from it on; None in a layer without replicas.

        The earlier it is made, the more of backward hides the way home of the gradients. Experts that are a unit of
        FSDP2 have their parameters inside of their forward alone, and everything is done there.
        """
        if self.replicas is None:
            return None
        sharded = hasattr(self.experts, "unshard")
        weights = self.experts.w_gate_up, self.experts.w_down
        return self.replicas.open(
            None if sharded else weights,
            self.layer_index,
            micro_batch,
            num_micro_batches=num_micro_batches,
            users=users,
            trained=any(weight.requires_grad for weight in weights),
        )

    @eager
    def run_router(self, x: Tensor, valid: Tensor | None, *, micro_batch: int, lease: Lease | None = None) -> Routed:
        """The router on one micro-batch; `place` is next, for all that share a lease."""
        try:
            with stage_range("route", self.layer_index, micro_batch):
                x_TH, routing, router_aux = self._route(x, valid)
        except BaseException as err:
            self._announce_failure(err, x.device if isinstance(x, Tensor) else None, micro_batch, lease)
            if not isinstance(err, MoEError):
                raise
            raise placed(err, f"layer {self.layer_index}, micro-batch {micro_batch}") from err
        return Routed(x=x, x_TH=x_TH, routing=routing, router_aux=router_aux, micro_batch=micro_batch, lease=lease)

    def _announce_failure(
        self, err: BaseException, device: torch.device | None, micro_batch: int, lease: Lease | None
    ) -> None:
        """The other ranks are on their way to the exchange of counts; they must not wait there for this one."""
        if self.replicas is not None and lease is not None:
            self.replicas.announce_failure(lease, device)
        else:
            self.dispatcher.announce_failure(device, layer=self.layer_index, micro_batch=micro_batch)
            mark_reported(err)
        mark_everywhere(err)

    @eager
    def place(self, routed: Sequence[Routed]) -> None:
        """Plan the replicas of the micro-batches that share a lease, if any, and route them to instances."""
        lease = routed[0].lease
        if self.replicas is None or lease is None:
            return
        with stage_range("replicas", self.layer_index, routed[0].micro_batch):
            moved = self.replicas.route(lease, [each.routing for each in routed])
            for each, routing in zip(routed, moved, strict=True):
                each.routing, each.rank_rows = routing, self.replicas.rank_rows(routing)

    @eager
    def pack(self, routed: Routed, *, waits: frozenset[Link] | None = None, num_micro_batches: int = 1) -> LayerFlight:
        """dispatch_preprocess of what `place` has been through."""
        with releasing(routed.lease):
            ticket = self.dispatcher.dispatch_preprocess(
                routed.x_TH,
                routed.routing,
                layer=self.layer_index,
                micro_batch=routed.micro_batch,
                waits=waits,
                num_micro_batches=num_micro_batches,
            )
        return LayerFlight(
            x=routed.x, ticket=ticket, router_aux=routed.router_aux, lease=routed.lease, rank_rows=routed.rank_rows
        )

    def _route(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Routing, RouterAux]:
        check_shapes(x, valid, self.config.hidden_size)
        if self.replicas is not None:
            self.replicas.check_device(x.device)
        x_TH = x.reshape(-1, x.shape[-1])
        valid_T = None if valid is None else valid.reshape(-1)
        sequences = math.prod(x.shape[:-2])  # a batch without sequences has no tokens: one of none
        return x_TH, *self.router(x_TH, valid_T=valid_T, num_sequences=max(sequences, 1))

    @eager
    def launch_combine(self, flight: LayerFlight) -> None:
        """dispatch_postprocess, experts, combine_preprocess, combine."""
        self.compute(flight)
        self.dispatcher.combine(flight.ticket)

    @eager
    def compute(self, flight: LayerFlight, *, beside_others: bool = False) -> None:
        """dispatch_postprocess, experts, combine_preprocess; `dispatcher.combine(flight.ticket)` is next.

        Args:
            flight: of this micro-batch.
            beside_others: communication of other micro-batches is under way: the experts leave it SMs of a GPU.

        Raises:
            Exception: whatever the experts raise; the other ranks get a PeerError.
        """
        with self._telling(flight, "experts"):
            if flight.lease is not None:
                flight.lease.join()
            expert_input = self.dispatcher.dispatch_postprocess(flight.ticket)
            reserve = self._reserve_for(expert_input.source.device) if beside_others else 0
            with stage_range("experts", self.layer_index, flight.ticket.micro_batch):
                y_NH = self.experts(expert_input, reserve_sms=reserve, **given("replicas", flight.lease))
            self.dispatcher.combine_preprocess(flight.ticket, y_NH)

    @contextlib.contextmanager
    def _telling(self, flight: LayerFlight, stage: str) -> Iterator[None]:
        """Around what runs while the other ranks expect this one's next communication."""
        try:
            with releasing(flight.lease):
                yield
        except BaseException as err:
            if not is_early_stop(err):
                where = flight.ticket.where
                flight.ticket.release()
                self.dispatcher.raise_everywhere(err, f"{where} ({stage})")
            raise

    def _reserve_for(self, device: torch.device) -> int:
        if self.reserve_sms is not None:
            return self.reserve_sms
        return 0 if self.experts.reserve_refusal(device) else self.dispatcher.comm_sms

    def run_shared(self, x: Tensor) -> Tensor | None:
        """The shared experts' output [..., H], None where there are none."""
        return None if self.shared is None else self.shared(x.reshape(-1, x.shape[-1])).view(x.shape)

    @eager
    def resolve(self, flight: LayerFlight) -> Tensor:
        """combine_postprocess: the routed experts' y [..., H]."""
        y = self.dispatcher.combine_postprocess(flight.ticket).view(flight.x.shape)
        return y if flight.lease is None else flight.lease.bring(y)

    def aux_of(self, flight: LayerFlight) -> MoEAux:
        """Losses and loads of a micro-batch."""
        aux = flight.router_aux
        load_R = rank_load(aux.load, self.dispatcher.num_ranks) if flight.rank_rows is None else flight.rank_rows
        return MoEAux(
            loss=aux.loss,
            aux_loss=aux.aux_loss,
            z_loss=aux.z_loss,
            load=aux.load,
            num_tokens=aux.num_tokens,
            cross_rank_routes=load_R.sum() - load_R[self.dispatcher.rank],
            rank_load=load_R,
            replicas=copies_held(self.replicas, flight.lease, load_R),
        )


def _seen_by_dispatcher(config: MoEConfig, group: dist.ProcessGroup | None) -> DispatchConfig:
    num_ranks = group.size() if isinstance(group, dist.ProcessGroup) else 1  # what is none is refused later
    # where R does not divide E there is no P: the refusal is to name E
    return config.dispatch(num_ranks if config.num_experts % num_ranks == 0 else 0)
