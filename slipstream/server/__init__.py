"""The OpenAI-compatible server: one process for HTTP and text, one for the engine, messages between them."""
