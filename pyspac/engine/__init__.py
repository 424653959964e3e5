"""How Python reaches libspac: the engine and its board, devices, cores, the limits that spac.h
states, and values that libspac reads from text.

`board` and `step` work without the native library: a `LocalBoard` is plain memory.
"""
