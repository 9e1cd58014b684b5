"""A Llama-shaped target that decodes with the package's kernels, and clocks to time it."""
