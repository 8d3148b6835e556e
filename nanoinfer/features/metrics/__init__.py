"""Counters and histograms of an engine, under vLLM's names."""
