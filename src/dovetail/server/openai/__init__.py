"""OpenAI's dialect: chat completions and completions, with the extras that SGLang's clients send."""
