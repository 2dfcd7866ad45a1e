"""moe_ep: expert-parallel dispatch, overlap and expert replicas for Mixture-of-Experts pretraining in PyTorch."""

__version__ = "0.1.0"
