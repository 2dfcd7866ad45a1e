"""Domino: a layer takes M micro-batches together, so that communication of one hides behind computation of the others.

`moe_ep.schedule` says in which order and what waits for what, and `moe_ep.domino_executor` walks through that very
object. A layer does not wait for its last communications: it returns `Pending` outputs, and whoever needs one resolves
it. Between layers that is the next layer, right before its attention, so the last combine of a layer hides behind the
next layer's first attention.

    stack = DominoStack(layers)                     # DominoLayers: attention, moe, shared
    ys, auxes = stack([x0, x1])                     # M = 2; M = 1 is the plain model
    (loss(ys[0]) + loss(ys[1])).backward()          # one backward for all, or nothing interleaves in backward

All ranks of an expert-parallel group pass the same M. Values do not depend on M: outputs, losses, counters and each
micro-batch's own gradients are those of M = 1, bit for bit where the operations are deterministic. What is summed over
micro-batches is summed in a fixed order: autograd reaches the last micro-batch first, so a parameter used once in each
gets ((g[M-1] + g[M-2]) + ... + g[0]), and that is added to what its `.grad` held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, overload

from torch import Tensor, nn

from .domino_checks import check_listed, check_taken_apart, check_waits
from .domino_executor import Group, Region, execute, name_of
from .eager import eager
from .errors import InputError, RecipeError
from .flights import MoEAux
from .layer import MoELayer
from .pending import Pending
from .schedule import Schedule, schedule
from .schedule_steps import Kind
from .step import check_layer_indices, moe_layers


class DominoLayer(nn.Module):
    """A decoder layer in the pieces that can be interleaved. Derive from it, set `moe`, write the two methods.

    Called with a tensor it is the plain layer: (x [..., H], valid) to (y [..., H], MoEAux or None). Called with M
    pending outputs it gives M pending outputs and M MoEAux. Both are one code path. Hooks on the module's call, such as
    FSDP2's, see either. `moe` is taken apart: only the calls of its router, experts and shared experts see hooks.
    """

    moe: MoELayer | None
    # which sum is rounded first: False: (residual stream + shared) + routed; True: residual stream + (routed + shared)
    shared_joins_routed: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._region: Region | None = None
        self._outside: tuple[Kind, ...] = ()

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(h, n), shaped as x: the residual stream after attention, and its norm, which experts and MLP read."""
        raise NotImplementedError(f"{type(self).__name__} must define attention")

    def attention_of(self, micro_batch: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """`attention`, told which of the M micro-batches x is; override it where a mask or the like belongs to each."""
        return self.attention(x)

    def shared(self, n: Tensor) -> Tensor | None:
        """What needs no dispatcher: output of the MLP or of the shared experts, [..., H]; None where there is none."""
        return None if self.moe is None else self.moe.run_shared(n)

    def recompute_in(self, region: Region | None, *, attention: bool = True) -> None:
        """Run the layer's computation inside `region`, which may run it again in backward.

        The routes must be replayed: `functools.partial(checkpoint, use_reentrant=False,
        context_fn=recompute_context_fn)`. What is pending is resolved outside; all M of them first, since one region
        holds all M micro-batches. The second pass dispatches again, but combines nothing: nobody needs that.

        Args:
            region: None: nothing is recomputed.
            attention: False: only from the router on.

        Raises:
            RecipeError: `region` cannot be called; at the layer's call: it records no gradients where the caller does
                (use_reentrant=True), or returns something else than what it was given to run.
        """
        if region is not None and not callable(region):
            raise RecipeError(
                f"region must be a function of a function and tensors, or None, got {type(region).__name__}; pass "
                "moe_ep.recompute_region"
            )
        self._region = region
        self._outside = () if region is None else (Kind.RESOLVE,) if attention else (Kind.RESOLVE, Kind.ATTENTION)

    @overload
    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, MoEAux | None]: ...

    @overload
    def forward(self, x: Sequence[Pending], valid: Sequence[Tensor | None] | None = None) -> Group: ...

    def forward(self, x: Any, valid: Any = None) -> Any:
        """See the class. `valid` bool [...] (for each micro-batch): tokens with False visit no routed expert."""
        try:
            if isinstance(x, Tensor):
                (pending,), (aux,) = self._run([Pending(base=x)], [valid])
                return pending.resolve(), aux
            check_listed(x, valid, Pending)
            return self._run(list(x), [None] * len(x) if valid is None else list(valid))
        except BaseException as err:
            _tell(err, [self], name_of(self))
            raise

    def _run(self, inputs: list[Pending], valid: list[Tensor | None]) -> Group:
        if self.moe is not None:
            check_taken_apart(self.moe)
            self.moe.dispatcher.check_interleaving(len(inputs))
        plan = self._plan(len(inputs), _host_runs_ahead(inputs[0].base))
        return execute(self, plan, inputs, valid, self._region)

    @eager  # a trace cannot make a schedule again
    def _plan(self, num_micro_batches: int, host_ahead: bool) -> Schedule:
        dense = self.moe is None
        joint = getattr(self.moe, "joint_replicas", False)
        plan = schedule(num_micro_batches, dense=dense, outside=self._outside, host_ahead=host_ahead, joint=joint)
        return check_waits(plan)


def _host_runs_ahead(x: Tensor) -> bool:
    """Whether what the host issues on x runs later, so that the host may wait while it runs."""
    return x.device.type != "cpu"


def launch(
    layers: Iterable[nn.Module], xs: Sequence[Tensor], valid: Sequence[Tensor | None] | None = None
) -> tuple[list[Pending], list[list[MoEAux]]]:
    """Run M micro-batches through DominoLayers. The outputs are pending, so what follows can hide the last combine.

    Args:
        layers: each is called with M pending outputs.
        xs: M tensors [..., H], of any number of tokens each.
        valid: M masks bool [...] or None.

    Returns:
        M pending outputs, and for each micro-batch the MoEAux of every layer with experts.

    Raises:
        InputError: no micro-batch, another number of masks, a tensor in place of a list; pieces of a layer that return
            something else than tensors shaped as their input.
        PeerError: another rank raised; this one's own errors are raised as they are.
    """
    layers = list(layers)
    try:
        check_listed(xs, valid)
    except InputError as err:
        _tell(err, layers, "the inputs of a stack")
        raise
    pending, auxes = [Pending(base=x) for x in xs], [list[MoEAux]() for _ in xs]
    for number, layer in enumerate(layers):
        try:
            pending, said = layer(pending, valid)
        except BaseException as err:
            _tell(err, layers, f"layer {number} of {len(layers)}")
            raise
        for collected, aux in zip(auxes, said, strict=True):
            collected += [] if aux is None else [aux]
    return pending, auxes


def _tell(err: BaseException, layers: Sequence[nn.Module], where: str) -> None:
    """For dense layers, and what a framework does around a layer."""
    found = [moe for layer in layers if isinstance(layer, nn.Module) for moe in moe_layers(layer)]
    for dispatcher in {moe.dispatcher: None for moe in found}:
        dispatcher.raise_everywhere(err, where)


class DominoStack(nn.Module):
    """DominoLayers one after the other: M tensors to M tensors.

    M is known at the call. Say it in the layers' configuration, too (`MoEConfig.num_micro_batches`), and a dispatcher
    that holds fewer micro-batches in flight is refused when the layer is built, not at the first call.

    Args:
        layers: modules with the pieces of `DominoLayer`.

    Raises:
        RecipeError: a module without them, or two layers with one layer_index.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for number, layer in enumerate(self.layers):
            missing = [name for name in ("attention", "shared", "moe") if not hasattr(layer, name)]
            if missing:
                raise RecipeError(
                    f"layer {number} ({type(layer).__name__}) has no {', '.join(missing)}; derive it from DominoLayer"
                )
        check_layer_indices(self)

    def forward(
        self, xs: Sequence[Tensor], valid: Sequence[Tensor | None] | None = None
    ) -> tuple[list[Tensor], list[list[MoEAux]]]:
        """See `launch`; here everything is resolved."""
        pending, auxes = launch(self.layers, xs, valid)
        try:
            return [output.resolve() for output in pending], auxes
        except BaseException as err:
            _tell(err, list(self.layers), "the outputs of a stack")
            raise
