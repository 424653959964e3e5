"""What a `pyspac.Llama` has in the place of llama_cpp.Llama's fields: structs with ours on top, and a context
and a model that are gone.
"""

from __future__ import annotations

from typing import Any

from pyspac.drop_in.errors import InputError


class Fields:
    """A struct that llama_cpp.Llama fills in field by field and then loads with: ours come on top.

    Its constructor has no other place to put them in: between filling the struct in and loading the model it
    calls nothing. `Llama._ours` has the fields by the struct's name.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, llm: Any, owner: type) -> Any:
        params = llm.__dict__[self.name]
        for name, value in llm._ours[self.name].items():
            setattr(params, name, value)
        return params

    def __set__(self, llm: Any, params: Any) -> None:
        llm.__dict__[self.name] = params


class Closed:
    """What a closed Llama has for a context and a model: llama.cpp would read freed memory."""

    def __getattr__(self, name: str) -> Any:
        raise InputError("this Llama is closed: make a new one")
