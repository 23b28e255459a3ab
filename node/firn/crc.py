"""CRC-32C (Castagnoli), the one checksum of every firn format. Hardware speed by google-crc32c."""

import numpy as np
from google_crc32c import value as _value


def crc32c(data: "bytes | bytearray | memoryview | np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> int:
    """CRC-32C of a contiguous buffer."""
    if type(data) is not bytes:
        data = np.frombuffer(data, np.uint8)
    return int(_value(data))
