"""The client of one llama-server: what `run`, `chat`, `demo` and `bench` say to it, and what they show.

OwnServer (or a URL) -> Client -> Answer -> report
"""
