"""OpenAI's dialect: chats and completions, with the extras that SGLang's clients send."""
