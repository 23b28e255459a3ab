"""``firn verify``: the offline audit, for people and as JSON."""

import os
import sys

from firn.cli.printing import print_document
from firn.errors import Invalid, Unavailable
from firn_node.disk import RealDisk
from firn_node.offline.audit import Audit, audit_folder


def verify_command(folder: str, *, output: str | None) -> None:
    """Audit a stopped broker's folder and print what was found; ends with exit code 1 when a file is damaged.

    Errors: Invalid when it is no data folder, Unavailable when a broker runs on it.
    """
    folder = os.path.abspath(os.path.expanduser(folder))
    if not os.path.isdir(folder):
        raise Invalid(f"{folder}: there is no such folder; check --data")
    disk = RealDisk(folder)
    lock = os.path.join(folder, "LOCK")
    if not os.path.exists(lock):
        audit = audit_folder(folder, disk)
    else:
        try:
            with disk.lock(lock):
                audit = audit_folder(folder, disk)
        except BlockingIOError as error:
            raise Unavailable(f"a broker runs on {folder}: its files change; stop it, then verify") from error
    _print(audit, output)
    if audit.damages:
        names = sorted({os.path.relpath(damage.file, folder) for damage in audit.damages})
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        print(
            f"firn: {len(names)} damaged file(s) in {folder}: {shown}; keep a copy of the folder, then restore these "
            "files from a backup or rebuild the broker from a peer",
            file=sys.stderr,
        )
        sys.exit(1)


def _print(audit: Audit, output: str | None) -> None:
    if print_document(audit.document(), output):
        return
    for damage in audit.damages:
        print(f"damaged: {damage.sentence()}")
    for note in audit.notes:
        print(f"note: {note}")
    print(
        f"{audit.files} files and {audit.batches} batches checked, {audit.keys_compared} keys of "
        f"{audit.partitions_compared} partitions compared with the raw bytes: "
        + (f"{len(audit.damages)} faults" if audit.damages else "no damage")
    )
