"""The broker: commit log, indexes, compaction, engine and server of one data directory."""
