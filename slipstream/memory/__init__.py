"""Device memory: KV pages."""
