"""Which predictor a run gets: the trace's own guesses where it holds them, else assumed ones."""

from __future__ import annotations

from pyspac.lab.predict.assumed import AssumedPredictor
from pyspac.lab.predict.predictor import Predictor, Source
from pyspac.lab.predict.recorded import RecordedPredictor
from pyspac.lab.trace import Trace


def choose_predictor(source: Source, trace: Trace, accuracy: float, seed: int) -> Predictor:
    """Return a predictor; `accuracy` is that of assumed guesses.

    A draft gate's guesses are assumed, as are those of a next layer that the trace lacks. `--predict
    draft-gate` replays recorded ones (`pyspac.lab.look_ahead`).
    """
    if source == "next-layer" and trace.early_logits is not None:
        return RecordedPredictor(trace.early_logits[0])
    return AssumedPredictor(trace, accuracy, seed)
