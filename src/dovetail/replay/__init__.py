"""The trainer's side: what was recorded about each token, ready to be replayed."""
