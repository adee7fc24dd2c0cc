"""What crosses the engine's border: requests in, token events out, as msgspec structs."""
