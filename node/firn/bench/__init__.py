"""Measured workloads of one client against one broker: shared by ``firn bench`` and the benchmarks folder."""
