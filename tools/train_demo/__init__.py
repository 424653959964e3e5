"""Trains the demo pair: in goes the running Python's standard library, out come two Hugging Face folders.

The target is a small mixture of experts (qwen3moe), the draft a smaller dense model (qwen3); both share one
byte-level BPE vocabulary. They are trained together: the target on the text, the draft on the target's
distribution over the same text, so that the draft guesses what the target will say.

    corpus (of pyspac.train) -> tokenizer -> data -> workers (model, distillation, optimiser)
    -> run (held_out, export)

    python -m tools.train_demo          30 minutes on 2 free cores; again: goes on from the last checkpoint

The packages that it needs are the extra `train`.
"""
