"""The CPU's own: numpy where a step has one token, the reference everywhere else."""
