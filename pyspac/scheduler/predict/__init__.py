"""Predictors: which experts tokens will use that are known and not yet computed.

`predictor.py` says what one is; the files beside it are one way of predicting each. They stand between the
activations, from which they learn, and the estimator and the plan, which weigh what they say.
"""
