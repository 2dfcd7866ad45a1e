"""Public test tools: ranks on one machine, a dense oracle, and the contract that every dispatcher keeps.

- `ranks`: a pool of processes that is started once and fed with functions;
- `oracle`: what a Mixture-of-Experts layer computes, forward and backward, route by route in float64;
- `contract`: the suite that a dispatcher, ours or yours, has to pass;
- `chrome_trace` and `host_syncs`: a profiler's trace, and the CUDA calls in it that held the host.
"""
