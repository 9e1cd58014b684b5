"""A Llama-shaped target that decodes with the package's kernels, and a clock for them."""
