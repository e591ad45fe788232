"""The contract between engines and backends. It stands on facts alone."""
