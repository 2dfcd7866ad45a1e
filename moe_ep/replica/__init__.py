"""Copies of hot experts, planned from the load of the very micro-batch that they are made for."""

from .checks import verify
from .plan import Plan, plan, plan_together
from .reroute import reroute

__all__ = ["Plan", "plan", "plan_together", "reroute", "verify"]
