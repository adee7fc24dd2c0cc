"""From logits to tokens, with each sequence's own parameters."""
