"""The doors of the replication core: the data folder, the log, the wire, the coordinator, each carrying out actions.

They decide nothing about who is master, what is committed or where a log is cut; ``firn_node.replication.driver``
joins them to the core.
"""
