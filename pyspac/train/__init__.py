"""Trains an EAGLE-3 head for a model, with nothing but the model's GGUF: `pyspac train-head`.

    corpus -> capture (the model writes on; its hidden states) -> captured (files)
    -> head (what learns), training (clock, checkpoints) -> accepted (the report) -> head_file (a GGUF)

What learns needs torch, of the extra `train`; `packages` says what is missing. tools/train_mtp, which trains
a drafter into a model, uses the parts that know nothing of heads. Method: Li et al., arXiv 2503.01840.
"""
