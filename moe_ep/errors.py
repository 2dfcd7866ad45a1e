"""Every error this package raises on purpose.

A message is one sentence (or a few) with the value that was met, the limit it broke and a way out.
Assertions are kept for invariants of our own; they never report a user's mistake.
"""

from __future__ import annotations


class MoEError(Exception):
    """Base of all errors raised by moe_ep."""


class RecipeError(MoEError, ValueError):
    """A configuration that can never work: unknown key, wrong type, impossible combination."""


class InputError(MoEError, ValueError):
    """A tensor handed to a public function has a wrong shape, dtype, device or value."""


class Unavailable(MoEError, RuntimeError):
    """A back end was asked for that this machine, group or configuration cannot run."""


class ProtocolError(MoEError, RuntimeError):
    """Stages of a ticket called out of order, twice, or after its release."""


class CapacityError(MoEError, RuntimeError):
    """More tokens or rows than the sizes fixed at construction."""


class NonFiniteError(MoEError, RuntimeError):
    """Router logits (or another checked tensor) hold NaN or infinity."""


class PlanError(MoEError, ValueError):
    """A replica plan that cannot be made, or that breaks an invariant."""


class PeerError(MoEError, RuntimeError):
    """Another rank failed, disagrees about the configuration, or was lost."""


class CheckpointError(MoEError, RuntimeError):
    """A checkpoint that is missing, truncated, of another model, or cannot be written."""


def lost_peer(what: str, err: Exception) -> PeerError:
    """What to raise from the error of a collective: `what` names it, such as "dispatch of layer 3, micro-batch 0"."""
    reason = str(err).splitlines()[0] if str(err) else type(err).__name__
    if reason.startswith("[/"):  # gloo puts its own source line in front
        reason = reason.partition("] ")[2] or reason
    reason = reason.partition(". This is typically")[0]  # what gloo advises then fits no user of ours
    return PeerError(
        f"{what}: communication with the other ranks failed ({reason}). A rank was lost, took longer than the group's "
        "timeout, or did not make the same call; look at the first error among all ranks, or set MOE_EP_DEBUG=1 to "
        "compare the ranks' calls"
    )
