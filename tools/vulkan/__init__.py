"""ggml's Vulkan backend, built by itself, tested on lavapipe, a Vulkan driver for the CPU; no GPU needed."""
