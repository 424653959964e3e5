"""Prefetch policies: what is copied before it is asked for."""
