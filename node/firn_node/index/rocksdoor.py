"""The one place that knows rocksdict: how the database is opened, flushed and what its errors mean.

Measured with rocksdict 0.3.29, children killed by SIGKILL after ``flush`` (`docs/decisions/0002`): with several
column families and ``atomic_flush``, ``Rdict.flush`` makes *its own family alone* durable. A checkpoint would
outlive the entries it vouches for. Hence one column family: its memtable becomes one SST file, in one edit of
RocksDB's manifest, and what is on disk is always a prefix of the writes.
"""

import errno
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import rocksdict
from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, Rdict, WriteOptions

from firn.errors import Corrupt, Unavailable

OPEN_FILES_MAX = 128

P = ParamSpec("P")
R = TypeVar("R")


class Guarded:
    """Base of whoever calls the database; ``folder`` is named in errors."""

    folder: str


S = TypeVar("S", bound=Guarded)


def guarded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """The method with rocksdict's errors as ours. *Errors*: Corrupt, Unavailable (closed), OSError."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **named: P.kwargs) -> R:
        try:
            return method(self, *args, **named)
        except Exception as error:
            if type(error) is Exception or isinstance(error, rocksdict.DbClosedError):
                raise translated(error, self.folder) from error
            raise

    return call


def translated(error: Exception, folder: str) -> Exception:
    """rocksdict raises bare ``Exception`` with RocksDB's status as its text."""
    text = str(error)
    if isinstance(error, rocksdict.DbClosedError) or "closed" in text.lower():
        return Unavailable(f"the index in {folder} is closed")
    if "Corruption" in text:
        return Corrupt(
            f"the index in {folder} is damaged: {text}; remove it, it is rebuilt from the log", file=folder
        )
    if "No space left" in text:
        return OSError(errno.ENOSPC, text, folder)
    return OSError(errno.EIO, text, folder)


def open_database(folder: str, memory_bytes: int) -> Rdict:
    """The database, made when missing. *Units*: half of the memory is block cache, half two write buffers."""
    table = BlockBasedOptions()
    table.set_block_cache(Cache(memory_bytes // 2))
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_atomic_flush(True)
    options.set_write_buffer_size(max(memory_bytes // 4, 64 << 10))
    options.set_max_write_buffer_number(2)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_max_open_files(OPEN_FILES_MAX)
    options.set_max_file_opening_threads(1)
    options.set_skip_stats_update_on_db_open(True)
    options.set_max_background_jobs(2)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(1 << 20)
    options.set_paranoid_checks(True)
    try:
        return Rdict(folder, options)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise translated(error, folder) from error


def without_wal() -> Any:
    options: Any = WriteOptions()
    options.disable_wal = True  # a property, whatever the package's stub says
    return options
