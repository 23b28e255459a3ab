"""``firn index migrate``: the words around ``firn_node.index.migrate``, which does the work."""

import os

from firn_node.disk import RealDisk
from firn_node.index import migrate


def migrate_index(folder: str, kind: str) -> str:
    """Make a stopped broker's index one of another kind; one sentence of what was done.

    Effects: durable on return; may be repeated. Errors: those of ``firn_node.index.migrate``.
    """
    folder = os.path.abspath(os.path.expanduser(folder))
    done = migrate(folder, kind, RealDisk(folder))
    if done.before == done.after:
        return f"the index of {folder} is of kind {kind} already"
    return (
        f"the index of {folder} is of kind {done.after} now ({done.entries} entries copied from {done.before}); "
        f"start its broker with --index {done.after}"
    )
