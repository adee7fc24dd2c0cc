"""Device operations: one documented function an op, with a plain torch reference."""
