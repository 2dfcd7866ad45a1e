"""Copies of hot experts, planned from the load of the very micro-batch that they are made for."""

from .plan import Plan, plan, verify
from .reroute import reroute

__all__ = ["Plan", "plan", "reroute", "verify"]
