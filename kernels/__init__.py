"""Ops of moe_ep, installed as `moe_ep.kernels`. Nothing happens on import."""
