"""The parts of `benchmarks.gpu_check`: what one NVIDIA GPU can tell about the kernels."""
