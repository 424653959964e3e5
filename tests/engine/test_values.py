"""Cache sizes, ranges of cores and margins: what libspac says holds for Python, and for the lab too."""

from __future__ import annotations

import os

import pytest

from pyspac._native import ffi, lib
from pyspac.engine.limits import AUTO_MARGIN_BYTES, MIN_MARGIN_BYTES
from pyspac.engine.values import read_cpu_range, read_size
from pyspac.errors import ConfigError, PyspacError, UsageError
from pyspac.forward.options import CacheSize
from pyspac.lab.setup import capacity_bytes
from pyspac.units import MIB

OPEN = os.sched_getaffinity(0)
TOTAL = 1000 * MIB + 3  # bytes of all experts; odd, so that rounding shows

two_cores = pytest.mark.skipif(not {0, 1} <= OPEN, reason="needs cores 0 and 1")

SIZES = {
    "17%": 178257921,  # 0.17 * 1048576003 = 178257920.51
    "0.5%": 5242880,
    "12.5%": 131072000,
    "100%": TOTAL,
    "0%": 0,
    "0": 0,
    "1": MIB,
    "0.5": MIB // 2,
    "007": 7 * MIB,
    "7M": 7 * MIB,
    "7mib": 7 * MIB,
    "1.5GB": 1536 * MIB,
    "12345678901B": 12345678901,
}
NO_SIZES = (
    "", "%", "17x", "lots", "-1", "+1", "1e3", "0x10", "inf", "nan", "1.", ".5", " 5", "5 ", "1_000", "٣",
    "17%%", "100.1%", "170%", "2000000000", "8T", "8 G", "G", "8k", "1000001000G",
)  # fmt: skip


@pytest.mark.parametrize(("text", "n_bytes"), SIZES.items())
def test_sizes(text: str, n_bytes: int) -> None:
    assert read_size("--cache", text, TOTAL) == n_bytes
    assert engines(text) == n_bytes
    assert CacheSize(text=text).n_bytes(TOTAL) == n_bytes
    assert CacheSize(text=text).is_zero == (n_bytes == 0)
    assert capacity_bytes(text, TOTAL) == min(n_bytes, TOTAL)  # the lab's


def test_auto_is_what_is_free() -> None:
    assert read_size("--cache", "auto", TOTAL) is None
    assert engines("auto") == 2**64 - 1
    assert not CacheSize(text="auto").is_zero


def test_more_than_all_experts_is_told_as_it_was_asked_for() -> None:
    assert read_size("--cache", "4096", TOTAL) == 4096 * MIB
    assert capacity_bytes("4096", TOTAL) == TOTAL  # the lab has no device to overfill


@pytest.mark.parametrize("text", NO_SIZES)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=r"--cache .* is no size: give MiB \(8000\), GiB \(8G\)"):
        CacheSize(text=text)
    with pytest.raises(UsageError):
        capacity_bytes(text, TOTAL)
    assert engines(text) is None


def engines(text: str) -> int | None:
    """What the engine reads; None: no size."""
    n_bytes = ffi.new("uint64_t *")
    status = lib.spac_read_size(b"a size", text.encode(), TOTAL, n_bytes)
    return int(n_bytes[0]) if status == 0 else None


def test_a_range_is_both_ends_and_all_between() -> None:
    core = min(OPEN)
    assert read_cpu_range(f"{core}-{core}") == {core}


@two_cores
def test_two_cores_are_a_range() -> None:
    assert read_cpu_range("0-1") == {0, 1}


@pytest.mark.parametrize("text", ["", "0", "-1", "0-", "1-0", "a-b", "0-1,3", " 0-1", f"0-{max(OPEN) + 1}"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(
        UsageError, match=f'cpu range cannot be "{text}": give the first and the last core'
    ) as e:
        read_cpu_range(text)
    assert f"{len(OPEN)} cores that are open to this process" in str(e.value)
    assert e.value.exit_code == 2


def test_margins_are_the_engines() -> None:
    assert (AUTO_MARGIN_BYTES, MIN_MARGIN_BYTES) == (768 * MIB, 256 * MIB)


def test_the_two_forms_of_a_message() -> None:
    assert str(ConfigError("--k", "x", "a number")) == "--k cannot be 'x': give a number"
    error = UsageError("--repack needs --stock")
    assert (str(error), error.exit_code) == ("--repack needs --stock", 2)
    assert isinstance(error, ConfigError)
    assert isinstance(error, PyspacError)
