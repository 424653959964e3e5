"""The door to libspac: the engine and its board, devices, cores, the limits that spac.h
states, and values that libspac reads from text.

`board` alone works without the native library: a `LocalBoard` is plain memory.
"""
