"""Text to token ids and back: tokenizer, streams, chat templates. Runs outside the engine loop."""
