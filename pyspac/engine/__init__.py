"""How Python reaches libspac: the engine and its board, devices, cores, the limits that spac.h
states, and values that libspac reads from text.

`board` and `step` can be imported without the native library; a board is made by it.
"""
