"""Store keys and values as 8-bit integers (kv_cache_dtype="int8")."""
