"""The policies by name: `@register("name")` adds a class to its dimension, `find` returns it.

A file outside the package is loaded with `load_file` (`--policy-file`).
"""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from pyspac.errors import ConfigError, PyspacError, UsageError
from pyspac.lab.policy import DIMENSIONS, Policy

PolicyClass = TypeVar("PolicyClass", bound=type[Policy])
_REGISTRY: dict[str, dict[str, type[Policy]]] = {dimension: {} for dimension in DIMENSIONS}


def register(name: str) -> Callable[[PolicyClass], PolicyClass]:
    """Return a class decorator that makes a policy known by name, in its base class's dimension.

    It raises ConfigError if another class has the name.
    """

    def add(cls: PolicyClass) -> PolicyClass:
        known = _REGISTRY[cls.dimension].setdefault(name, cls)
        if _full_name(known) != _full_name(cls):  # a file may be loaded twice
            raise ConfigError("the name of a policy", name, f"one that {_full_name(known)} does not have")
        cls.name = name
        _REGISTRY[cls.dimension][name] = cls
        return cls

    return add


def _full_name(cls: type[Policy]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def load_builtin() -> None:
    """Import every policy of the package, once."""
    for dimension in DIMENSIONS:
        package = import_module(f"pyspac.lab.{dimension}")
        for module in pkgutil.iter_modules(package.__path__):
            import_module(f"{package.__name__}.{module.name}")


def load_file(path: Path) -> None:
    """Import a file that registers policies of its own; PyspacError if it fails."""
    load_builtin()  # first, as their names are taken
    name = f"pyspac_policy_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError("--policy-file", str(path), "a Python file that registers policies")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except PyspacError as error:
        raise UsageError(f"{path}: this policy file cannot be used: {error}") from error
    except Exception as error:
        raise PyspacError(f"{path}: this policy file cannot be imported, as it raises {error!r}") from error


def names(dimension: str) -> list[str]:
    """Return the known names, sorted."""
    load_builtin()
    return sorted(_REGISTRY[dimension])


def find(dimension: str, name: str) -> Any:
    """Return a policy class; ConfigError lists the known names."""
    load_builtin()
    if name not in _REGISTRY[dimension]:
        raise ConfigError(f"--{dimension}", name, f"one of {', '.join(names(dimension))}")
    return _REGISTRY[dimension][name]
