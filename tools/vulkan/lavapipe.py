"""Whether lavapipe and what compiles the backend are here, and the environment in which ggml takes it."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Final

PACKAGES: Final = "libvulkan-dev glslc spirv-headers mesa-vulkan-drivers"  # of Debian and Ubuntu
DRIVER_FOLDERS: Final = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d")


def driver() -> Path | None:
    """The description of lavapipe that Vulkan's loader reads; None where it is not installed."""
    names = (f"lvp_icd.{platform.machine()}.json", "lvp_icd.json")
    paths = (Path(folder, name) for folder in DRIVER_FOLDERS for name in names)
    return next((path for path in paths if path.is_file()), None)


def why_not() -> str | None:
    """What is missing, and how to get it."""
    needed = {
        "glslc": shutil.which("glslc"),
        "Vulkan's headers": Path("/usr/include/vulkan/vulkan.hpp").is_file(),
        "SPIR-V's headers": Path("/usr/include/spirv/unified1/spirv.hpp").is_file(),
        "lavapipe": driver(),
    }
    missing = [name for name, found in needed.items() if not found]
    return f"no {', no '.join(missing)} (Debian: apt install {PACKAGES})" if missing else None


def environment(library: Path) -> dict[str, str]:
    """Variables that load the backend and let it see only lavapipe, as two devices.

    Half floats are not used: lavapipe has them, emulated, and compiles twice as long.
    """
    return {
        "GGML_BACKEND_PATH": str(library),
        "VK_DRIVER_FILES": str(driver()),
        "VK_ICD_FILENAMES": str(driver()),  # the same for loaders before 1.3.207
        "GGML_VK_VISIBLE_DEVICES": "0,0",
        "GGML_VK_DISABLE_F16": "1",
        "GGML_VK_DISABLE_COOPMAT": "1",
    }
