"""Which predictor a run gets: the trace's own guesses where it holds them, else assumed ones."""

from __future__ import annotations

from pyspac.lab.predict.assumed import AssumedPredictor
from pyspac.lab.predict.predictor import Predictor, Source
from pyspac.lab.predict.recorded import RecordedPredictor
from pyspac.lab.trace import Trace


def choose_predictor(source: Source, trace: Trace, accuracy: float, seed: int) -> Predictor:
    """Return a predictor; `accuracy` is that of assumed guesses."""
    early = trace.early_logits[0] if trace.early_logits is not None else None
    recorded = early if source == "next-layer" else trace.draft_logits
    return AssumedPredictor(trace, accuracy, seed) if recorded is None else RecordedPredictor(recorded)
