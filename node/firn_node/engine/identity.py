"""Who a data folder is: ``DIR/identity``, made once with the folder and never changed.

msgpack map ``{version, log_id, secret}`` after a u32 CRC-32C of it. ``log_id`` names this copy of the data (a
lost disk is a new one); ``secret`` keys the fingerprints, is never sent anywhere, and is why no client can
construct two keys that collide.
"""

from dataclasses import dataclass

import msgpack
import numpy as np
from numpy.typing import NDArray

from firn.crc import crc32c
from firn.errors import Corrupt, Invalid
from firn_node.clock import Randomness
from firn_node.disk import Disk, read_file, replace_file

VERSION = 1


@dataclass(frozen=True, slots=True)
class Identity:
    log_id: str
    secret: bytes

    def secret_words(self) -> NDArray[np.uint64]:
        """The 16-byte secret as the two words that the kernels take."""
        return np.frombuffer(self.secret, "<u8").copy()


def load_identity(disk: Disk, folder: str, randomness: Randomness) -> Identity:
    """The folder's identity, made when there is none yet.

    Errors: Corrupt for a damaged file (without the secret every key index would have to be rebuilt), Invalid
    for one that a newer firn wrote.
    """
    path = f"{folder}/identity"
    if not disk.exists(path):
        made = Identity(randomness.bytes(8).hex(), randomness.bytes(16))
        body = msgpack.packb({"version": VERSION, "log_id": made.log_id, "secret": made.secret})
        replace_file(disk, path, crc32c(body).to_bytes(4, "little") + body)
        return made
    data = read_file(disk, path)
    crc, body = int.from_bytes(data[:4], "little"), data[4:]
    if crc != crc32c(body):
        raise Corrupt(
            f"{path}: expected CRC {crc32c(body):#010x}, found {crc:#010x}; restore it from a backup",
            file=path,
        )
    found = msgpack.unpackb(body)
    if found["version"] != VERSION:
        raise Invalid(
            f"{path}: version {found['version']} was written by a newer firn; this one reads {VERSION}"
        )
    return Identity(found["log_id"], found["secret"])
