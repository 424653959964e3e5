"""Routing policies: whether the cache may change what the router selects."""
