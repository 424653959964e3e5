"""`pyspac.Llama`: llama-cpp-python's class with the engine attached, and a scheduler's thread on its board.

It has no step loop: answers are llama-cpp-python's own code, and so is drafting (`draft_model`).
"""
