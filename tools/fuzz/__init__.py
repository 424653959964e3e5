"""Random sequences of operations on two contexts of one model, with the engine and without: the same bits.

plan (a seed's operations) -> child (a process of its own: pair, operations) -> verdict -> shrink
"""
