"""Sizes as people read them."""

from __future__ import annotations

import pytest

from pyspac.units import GIB, MIB, size_text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 MiB"),
        (MIB // 16, "0.0625 MiB"),
        (12.7 * MIB, "12.7 MiB"),
        (GIB - MIB, "1023 MiB"),
        (GIB - MIB // 2 - 1, "1023 MiB"),
        (GIB - MIB // 2 + 1, "1 GiB"),
        (GIB - 1, "1 GiB"),
        (GIB, "1 GiB"),
        (17.283 * GIB, "17.28 GiB"),
        (1e6 * GIB, "1,000,000 GiB"),
    ],
)
def test_small_sizes_are_mib(n_bytes: float, text: str) -> None:
    assert size_text(n_bytes) == text
