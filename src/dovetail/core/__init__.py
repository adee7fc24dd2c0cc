"""The engine: one loop, one door in, one door out."""
