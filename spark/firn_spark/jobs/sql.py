"""SQL that people give on the command line."""

from collections.abc import Iterator
from contextlib import contextmanager

from firn.errors import Invalid


@contextmanager
def given_as(option: str) -> Iterator[None]:
    """Make a frame of what stands in ``option``. Errors: Invalid, with Spark's own first line, for SQL that is none."""
    from pyspark.errors import AnalysisException, ParseException

    try:
        yield
    except (ParseException, AnalysisException) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), str(error))
        raise Invalid(f"{option}: {first}") from error
