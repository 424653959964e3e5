"""One run in this process: options -> preflight -> session -> decode loop -> report.

`llama` wraps libllama, `sampling` and `drafting` serve the loop. `split` puts engine and scheduler
beside it, `speculation_hook` a controller of draft lengths. `profiler` times forward passes instead.
"""
