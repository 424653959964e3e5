"""Decides which experts belong on the device: activation counts in, one plan of loads per step out.

    counts -> activations -> estimator -> balancer -> prefetch -> plan
                                             ^
              cost_model, occupancy ---------+

`scheduler.py` runs them once per decoding step, on any board: the engine's, a server's, or a local one.
"""
