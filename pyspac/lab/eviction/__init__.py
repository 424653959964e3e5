"""Eviction policies: who leaves when a slot is wanted."""
