"""Predictors: which experts a layer will want, said before its router has run.

`predictor.py` says what one is, the files beside it are one way of guessing each. They stand between the
activations and the decision what to copy.
"""
