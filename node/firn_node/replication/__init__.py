"""Replication of a group's log: the rules as one pure state machine per node, without sockets, clocks or files.

``record`` is the group's record in the coordinator.
"""
