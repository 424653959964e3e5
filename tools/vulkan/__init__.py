"""ggml's Vulkan backend, built alone and tested on lavapipe, a Vulkan driver for the CPU; no GPU needed."""
