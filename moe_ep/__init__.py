"""moe_ep: expert-parallel dispatch and communication overlap for Mixture-of-Experts pretraining in PyTorch."""

from .config import DispatchConfig, MoEConfig
from .dispatch import (
    Capabilities,
    Dispatcher,
    LayoutStats,
    Ticket,
    build_dispatcher,
    close_dispatchers,
    known_dispatchers,
    register_dispatcher,
)
from .domino import DominoLayer, DominoStack
from .errors import (
    CapacityError,
    CheckpointError,
    InputError,
    MoEError,
    NonFiniteError,
    PeerError,
    PlanError,
    ProtocolError,
    RecipeError,
    Unavailable,
)
from .expert_input import ExpertInput
from .experts_registry import register_experts
from .flights import MoEAux
from .gradients import clip_grad_norm_, grad_norm
from .layer import MoELayer
from .pending import Pending
from .recompute import recompute_context_fn, recompute_region
from .routing import Routing
from .step import moe_layers, total_aux_loss, update_routers
from .step_end import raise_on_all_ranks

__version__ = "0.1.0"

__all__ = [
    "Capabilities",
    "CapacityError",
    "CheckpointError",
    "DispatchConfig",
    "Dispatcher",
    "DominoLayer",
    "DominoStack",
    "ExpertInput",
    "InputError",
    "LayoutStats",
    "MoEAux",
    "MoEConfig",
    "MoEError",
    "MoELayer",
    "NonFiniteError",
    "PeerError",
    "Pending",
    "PlanError",
    "ProtocolError",
    "RecipeError",
    "Routing",
    "Ticket",
    "Unavailable",
    "build_dispatcher",
    "clip_grad_norm_",
    "close_dispatchers",
    "grad_norm",
    "known_dispatchers",
    "moe_layers",
    "raise_on_all_ranks",
    "recompute_context_fn",
    "recompute_region",
    "register_dispatcher",
    "register_experts",
    "total_aux_loss",
    "update_routers",
]
