"""What the folders of stopped replicas hold: each by the offline audit, and all logs beside one another.

Run as a process of its own, because it opens RocksDB: ``python -m firn_node.drills.audit DIR...`` prints one sentence a
line for everything that is wrong.
"""

import sys
from itertools import pairwise

from firn_node.offline.audit import Audit, LogBatch, audit_folder


def differences(one: Audit, other: Audit) -> list[str]:
    """Batches that stand at one position in two logs and differ, or in one log only, where both have that part."""
    ours, theirs = _by_position(one), _by_position(other)
    start, end = max(one.log_start, other.log_start), min(one.log_end, other.log_end)
    found = []
    for position in sorted(ours.keys() | theirs.keys()):
        if not start <= position < end:
            continue
        a, b = ours.get(position), theirs.get(position)
        if a is None or b is None or _bytes(a) != _bytes(b):
            found.append(f"{one.folder} and {other.folder} differ at position {position}")
    return found


def _by_position(audit: Audit) -> dict[int, LogBatch]:
    return {batch.position: batch for batches in audit.log.values() for batch in batches}


def _bytes(batch: LogBatch) -> bytes:
    with open(batch.path, "rb") as file:
        file.seek(batch.at)
        return file.read(batch.size)


def audit_all(folders: list[str]) -> list[str]:
    """One sentence for each fault."""
    audits = [audit_folder(folder) for folder in folders]
    found = [f"{audit.folder}: {damage.sentence()}" for audit in audits for damage in audit.damages]
    return found + [line for pair in pairwise(audits) for line in differences(*pair)]


if __name__ == "__main__":
    for sentence in audit_all(sys.argv[1:]):
        print(sentence)
