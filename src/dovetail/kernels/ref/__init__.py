"""Reference kernels in plain torch: the oracle of every other backend, and the CPU path."""
