"""pyspac: Mixture-of-Experts models whose experts are split between a device and the host while they run.

    router top-k -> activations -> estimator -> balancer -> prefetch plan -> engine -> placement -> graph

- router top-k    the model picks n_expert_used experts per token and layer
- activations     the engine counts them, `activations.py` turns them into counts per step [n_layer, n_expert]
- estimator       `estimator.py` turns counts into a utility per expert, 0 .. n_levels
- predictors      `predict/`, where asked for: experts of tokens that are known and not yet computed
- balancer        `balancer.py` picks tau per layer: experts with utility >= tau belong on the device
- prefetch plan   `prefetch.py` lists what to copy, most useful first, within slots and byte budget
- engine          `engine/engine.py`, libspac: a queue, a worker that copies, device slots
- placement       which expert each layer finds on the device when it runs
- graph           llama.cpp, patched: device experts and host experts of one layer, summed as stock does

`scheduler/scheduler.py` runs steps 1 to 4, its neighbours, once per decoding step; `scheduler/cost_model.py`
times them from the running graph.

Each folder may use those above it in this list, never those below:

- engine, _native   how Python reaches libspac: board, step records, devices, cores
- model             what a model's file says
- scheduler         the data flow above
- speculation       how many tokens to draft: pure arithmetic on what steps took
- forward           one model open in this process, for what measures; the checks before anything is loaded
- lab               recorded routing, replayed through any policy
- server            llama-server with a scheduler beside it
- talk              the client of one llama-server, for the commands
- drop_in           `pyspac.Llama`
- commands          the command line
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

# name -> module; imported on first use, so that `import pyspac` needs neither numpy nor the native library
_PUBLIC = {
    "PyspacError": "errors",
    "ConfigError": "errors",
    "ModelError": "errors",
    "EngineError": "errors",
    "SchedulerConfig": "scheduler.config",
    "EngineParams": "engine.params",
    "Board": "engine.board",
    "BoardGeometry": "engine.board",
    "LocalBoard": "engine.board",
    "Scheduler": "scheduler.scheduler",
    "Engine": "engine.engine",
    "Llama": "drop_in.llama",
    "replace_llama_cpp": "drop_in.llama",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'pyspac' has no attribute {name!r}")
    return getattr(import_module(f"pyspac.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    """List the public names without importing them."""
    return sorted([*globals(), *_PUBLIC])
