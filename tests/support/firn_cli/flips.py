"""Bits flipped in every file of a stopped broker's folder, and what the audit says of each."""

import random
from pathlib import Path

from firn_node.offline.audit import audit_folder


def flip_everywhere(folder: Path) -> tuple[set[str], list[str]]:
    """The kinds of file that were looked at, and each flip that the audit did not pin on its file.

    The first and the last bit of each file, and six in between (seed 7), one at a time; the index aside.
    """
    chance = random.Random(7)
    looked_at: set[str] = set()
    missed: list[str] = []
    for path in sorted(
        p for p in folder.rglob("*") if p.is_file() and "index" not in p.parts and p.name != "LOCK"
    ):
        whole = path.read_bytes()
        for at in {0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(6))}:
            damaged = bytearray(whole)
            damaged[at] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            found = audit_folder(str(folder))
            if str(path) not in {damage.file for damage in found.damages}:
                missed.append(f"{path.name} at byte {at}: {found.damages}")
        path.write_bytes(whole)
        looked_at.add(path.suffix or path.name)
    if damages := audit_folder(str(folder)).damages:
        missed.append(f"the sound folder is called damaged: {damages}")
    return looked_at, missed
