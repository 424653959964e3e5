"""How experts are chosen for the device: a name, or settings as TOML or in a file, in; a `Policy` out.

    ema, lru+fetch             # an estimator, or EVICTION+MISS by the lab's names

estimator = "spac"             # a field of SchedulerConfig
threshold = 2
without = ["prefetch"]         # parts that are left out, to see what they are worth
copy_gb_s = [20.0, 2.0]        # emulates other links, one for each device
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from pyspac.checks import check_range
from pyspac.errors import ConfigError
from pyspac.scheduler.baseline import baseline_settings, names_baseline, with_baseline
from pyspac.scheduler.config import ESTIMATORS, LINK_GB_S, SchedulerConfig

FLAG: Final = "--policy"
DEFAULT_POLICY: Final = SchedulerConfig().estimator
COPY_GB_S: Final = "copy_gb_s"
_OTHER_FLAGS: Final = ("n_draft_max", "predict")  # fields that --draft-max and --predict set
KEYS: Final = (*(f.name for f in fields(SchedulerConfig) if f.name not in _OTHER_FLAGS), COPY_GB_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`text`: as given. `copy_gb_s`: throttle of copies in 1e9 bytes/s, of all devices or each; (): none."""

    text: str = DEFAULT_POLICY
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    copy_gb_s: tuple[float, ...] = ()

    @classmethod
    def read(cls, text: str) -> Self:
        """An estimator's name, EVICTION+MISS, settings as TOML, or a file of them. Raises ConfigError."""
        if text in ESTIMATORS:
            return cls(text=text, config=SchedulerConfig(estimator=text))
        if names_baseline(text) and not Path(text).is_file():
            return cls(text=text, config=SchedulerConfig(**baseline_settings(FLAG, text)))
        try:
            is_text = "=" in text and not Path(text).is_file()
            values = tomllib.loads(text if is_text else Path(text).read_text(encoding="utf-8"))
        except OSError as error:
            wanted = (
                f"one of {', '.join(ESTIMATORS)}, EVICTION+MISS such as lru+fetch, or a TOML file "
                f"({error.strerror})"
            )
            raise ConfigError(FLAG, text, wanted) from None
        except (ValueError, RecursionError) as error:
            wanted = f'settings as TOML, texts in quotes (estimator = "spac"): {error}'
            raise ConfigError(FLAG, text, wanted) from None
        if unknown := sorted(values.keys() - set(KEYS)):
            raise ConfigError(FLAG, text, f"other settings than {unknown[0]}: {', '.join(KEYS)}")
        try:
            copy = _speeds(values.pop(COPY_GB_S, ()))
            config = SchedulerConfig(**with_baseline(FLAG, values))
            return cls(text=text, config=config, copy_gb_s=copy)
        except (TypeError, AttributeError) as error:
            raise ConfigError(FLAG, text, f"values of the right types ({error})") from None

    def with_drafts(self, n_draft_max: int, predict: tuple[str, ...]) -> SchedulerConfig:
        """With what other flags say. Raises ConfigError."""
        return replace(self.config, n_draft_max=n_draft_max, predict=predict)


def _speeds(value: Any) -> tuple[float, ...]:
    found = tuple(value) if isinstance(value, list | tuple) else (value,)
    for speed in found:
        if not (isinstance(speed, int | float) and speed == 0):
            check_range(COPY_GB_S, speed, *LINK_GB_S)
    return found
