"""Which tokens are forwarded in which step. Pure host code: no torch, no device."""
