"""What makes ``spark.read.format("firn")`` work without a call: Spark looks for ``DefaultSource`` in packages of such names.

It imports them all before the first Python data source of any kind is used, so a missing library must not be an error
here: it would be one for every other source too.
"""

from contextlib import suppress

with suppress(ImportError):
    from firn_spark.source import FirnSource as DefaultSource

__all__ = ["DefaultSource"]
