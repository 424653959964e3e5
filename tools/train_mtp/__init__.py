"""Trains a drafter into a model: a Hugging Face folder in, an adapter that acts only at mask tokens out.

    base (the frozen model) -> texts (it writes them) -> layout (masks behind their anchors)
    -> adapter (gated LoRA), sampler -> run (loss, checkpoints) -> held_out (the report)

`scripts/train_mtp.py` is the door, `scripts/convert_mtp_to_gguf.py` makes a GGUF of the result. The packages
that they need are the extra `train`. Method: Samragh et al., arXiv 2507.11851; what that leaves out is in
docs/gated-lora.md.
"""
