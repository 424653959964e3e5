"""The door to libspac: the engine and its board, devices, cores, and the limits that spac.h states.

`board` alone works without the native library: a `LocalBoard` is plain memory.
"""
