"""The engine: puts log, indexes and compaction together into one broker, without a network."""
