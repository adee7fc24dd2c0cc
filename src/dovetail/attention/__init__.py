"""Attention over the paged KV of a step's rows."""
