"""Epochs of a log, read off the batch headers: an epoch begins where a header's epoch is higher than before."""

import numpy as np

from firn.batch import Buffer
from firn.errors import Corrupt
from firn_node.log.walk import Headers, headers

_EPOCH_WORD = 11  # a header's bytes 44 to 48


def epoch_starts(data: Buffer, position: int, *, after: int) -> list[tuple[int, int]]:
    """(epoch, position of its first batch) of the epochs that begin in whole batches, ``data``, at ``position``.

    ``after``: the epoch of what lies before. *Errors*: Corrupt where an epoch is lower than the one before it.
    """
    return epoch_starts_of(headers(data), data, position, after=after)


def epoch_starts_of(found: Headers, data: Buffer, position: int, *, after: int) -> list[tuple[int, int]]:
    """``epoch_starts``, when the headers are known."""
    epochs = np.frombuffer(data, "<u4", found.end // 4)[(found.starts >> 2) + _EPOCH_WORD]
    if (epochs == after).all():  # nearly always
        return []
    epochs = epochs.astype(np.int64)
    steps = np.diff(epochs, prepend=after)
    changes = np.flatnonzero(steps).tolist()
    for row in changes:
        if steps[row] < 0:
            at = position + int(found.starts[row])
            raise Corrupt(
                f"commit log at position {at}: epoch {epochs[row]} after epoch {epochs[row] - steps[row]}",
                position=at,
            )
    return [(int(epochs[row]), position + int(found.starts[row])) for row in changes]
