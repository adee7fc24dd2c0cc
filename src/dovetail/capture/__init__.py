"""Per-token side data that lives with the KV pages."""
