"""CRC-32C (Castagnoli), the one checksum of every firn format. Hardware speed by google-crc32c."""

import numpy as np
from google_crc32c import extend as _extend


def crc32c(
    data: "bytes | bytearray | memoryview | np.ndarray[tuple[int, ...], np.dtype[np.uint8]]", before: int = 0
) -> int:
    """CRC-32C of a contiguous buffer; ``before``: that of the bytes in front of it."""
    if type(data) is not bytes:
        data = np.frombuffer(data, np.uint8)
    return int(_extend(before, data))
