"""Decides which experts belong on the device: activation counts in, one plan of loads per step out.

    counts -> activations -> estimator -> balancer -> prefetch -> plan
                                             ^
              cost_model, occupancy ---------+

`layer_modes` holds layers whole on the device where `whole_layers` says that they are faster so. `fallback`
measures whether that is true and whether copies pay (`paired_timing`), and leaves out what does not pay.

Between steps, `foresight` (the routing log and a predictor of `predict/`) says what the next tokens will use,
and `plan_ahead` plans anew.

`scheduler.py` runs them once per decoding step, on any board: the engine's, a server's, or a local one.
"""
