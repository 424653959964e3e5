"""ggml's CUDA backend on the CPU, and whether nvcc compiles it; no GPU needed. README.md says more."""
