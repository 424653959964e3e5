"""ggml's Vulkan backend, built by itself and tested on lavapipe, a Vulkan driver for the CPU; needs no GPU."""
