"""The door to libspac: the engine and its board, devices, cores, and the limits that spac.h states.

`board` and `step` work without the native library: a `LocalBoard` is plain memory.
"""
