"""One model open in this process, for what measures and does not generate: tokens in, logits out.

ForwardOptions -> Loading (all checks) -> Forward: a model, a context, and unless stock the engine with its
scheduler. Nothing here samples, drafts, or makes text: that is llama-server's. `profiler` and `sweeper` time
forward passes.
"""
