"""Prints the name of a GPU that Vulkan's loader lists, where the backend's headers are here; else nothing.

Drivers for the CPU, such as lavapipe, are none. The loader itself is asked: vulkaninfo is rarely installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from pathlib import Path

HEADERS = (Path("/usr/include/vulkan/vulkan.hpp"), Path("/usr/include/spirv/unified1/spirv.hpp"))
INSTANCE_INFO_BYTES = 64  # VkInstanceCreateInfo; its first field, sType, is 1
PROPERTIES_BYTES = 4096  # VkPhysicalDeviceProperties has 824
GPU_TYPES = (1, 2)  # VkPhysicalDeviceType: integrated, discrete
TYPE_AT, NAME_AT = 16, 20  # in the properties


def gpu_names() -> list[str]:
    """Names of all GPUs; raises OSError where there is no loader."""
    vulkan = ctypes.CDLL("libvulkan.so.1")
    info = ctypes.create_string_buffer(struct.pack("<i", 1).ljust(INSTANCE_INFO_BYTES, b"\0"))
    instance = ctypes.c_void_p()
    if vulkan.vkCreateInstance(info, None, ctypes.byref(instance)) != 0:
        return []
    count = ctypes.c_uint32()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    devices = (ctypes.c_void_p * count.value)()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices)
    names = []
    for device in devices:
        properties = ctypes.create_string_buffer(PROPERTIES_BYTES)
        vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(device), properties)
        if struct.unpack_from("<i", properties, TYPE_AT)[0] in GPU_TYPES:
            names.append(properties.raw[NAME_AT:].split(b"\0")[0].decode(errors="replace"))
    vulkan.vkDestroyInstance(instance, None)
    return names


if __name__ == "__main__" and all(path.is_file() for path in HEADERS):
    with contextlib.suppress(OSError):
        print(*gpu_names()[:1])
