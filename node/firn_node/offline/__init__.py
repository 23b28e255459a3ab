"""What can be done with the files of a stopped broker: read any of them, audit all of them, migrate the index.

Nothing here changes a file but ``migrate``. The readers do not repair: what recovery would cut or rebuild is
reported as it is found.
"""
