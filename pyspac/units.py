"""Units of sizes that are shown or read."""

from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30
