"""Rebuild of a standby by messages: a replica that starts anew gets what its log no longer tells from the master.

``folder``: what the data folder remembers of it. ``broker`` decides when; ``docs/replication.md`` says why it is safe.
"""
