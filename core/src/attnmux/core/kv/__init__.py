"""KV pools and the request table."""
