"""What every job has as a command: its common options, its Spark session, how it ends.

``python -m firn_spark.NAME`` and, by spark-submit, ``$(python -m firn_spark script) NAME`` are the same command. Exit
codes: 0 done; 1 failed, or found what must not be, with one sentence on stderr; 2 wrong usage; 75, of jobs that say so,
failed by what passes; 130 and 143, ended by SIGINT and SIGTERM before it was done.
"""

import argparse
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

import yaml

from firn import errors
from firn.cli.running import DEFAULT_BROKER, DEFAULT_TIMEOUT, sentence_of
from firn.errors import FirnError, Invalid, UnknownTopic
from firn.topicspec import check_topic_name
from firn.units import duration_ms
from firn_spark.connection import Connection
from firn_spark.jobs import kubejob
from firn_spark.jobs.report import Report, print_table_of
from firn_spark.session import LOCAL_MASTER, check_here, check_workers, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
AGAIN = 75  # EX_TEMPFAIL
_RAISED_IN_TASK = re.compile(r"firn\.errors\.(\w+): (.*?)(?: SQLSTATE: \w+)?$", re.MULTILINE)
_ADDRESS = re.compile(r"[^,:\s]+(:[^,:\s]+)*:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a job: where the brokers are, what was asked for, and Spark."""

    spark: "SparkSession"
    connection: Connection
    asked: argparse.Namespace


def parser(name: str, summary: str) -> argparse.ArgumentParser:
    """A parser that knows what all jobs take; the job adds its own."""
    made = argparse.ArgumentParser(f"firn_spark.{name}", description=summary, allow_abbrev=False)
    made.set_defaults(job=name)
    group = made.add_argument_group("all jobs")
    group.add_argument(
        "--bootstrap", metavar="HOST:PORT[,...]", type=_addresses, default=None,
        help=f"where the brokers are, as the executors reach them; else $FIRN_BROKER, else {DEFAULT_BROKER}",
    )  # fmt: skip
    group.add_argument(
        "--tls-ca", metavar="FILE|system", help="speak TLS with brokers whose certificate this CA signed"
    )
    group.add_argument("--tls-cert", metavar="FILE", help="the job's own certificate")
    group.add_argument("--tls-key", metavar="FILE", help="its key")
    group.add_argument(
        "--token-file", metavar="FILE", help="holds a bearer token; files are read on each executor"
    )
    group.add_argument(
        "--timeout", metavar="DURATION", type=_duration, default=DEFAULT_TIMEOUT, help="bounds each request (30s)"
    )  # fmt: skip
    group.add_argument(
        "--master", metavar="URL", help=f"where Spark runs; else what spark-submit says, else {LOCAL_MASTER}"
    )
    group.add_argument(
        "--conf", metavar="KEY=VALUE", action="append", default=[], type=_setting, help="a setting of Spark, repeatable"
    )  # fmt: skip
    group.add_argument(
        "-o", "--output", choices=("json", "table"), default="table", help="json: one object on stdout"
    )
    kubejob.add_options(made)
    return made


def run(
    made: argparse.ArgumentParser,
    work: Callable[[Job], Report],
    arguments: Sequence[str] | None,
    *,
    topic: str = "topic",
    may_be_absent: bool = False,
    passing: tuple[type[FirnError], ...] = (),
) -> int:
    """Parse, work, report: the exit code. Wrong usage leaves by SystemExit(2).

    ``topic``: the argument that names the one to work on, of which the brokers are asked before 15 s go into a session;
    ``passing``: errors that end with ``AGAIN``.
    Effects: a Spark session that was there before stays; one that was made here is stopped.
    """
    given = sys.argv[1:] if arguments is None else arguments
    asked = made.parse_args(given)
    if asked.print_job:
        print(yaml.safe_dump(kubejob.job_of(asked, given), sort_keys=False), end="")
        return 0
    try:
        check_here()
        connection = _connection(asked)
        _check_topic(connection, getattr(asked, topic), may_be_absent=may_be_absent)
        report = _worked(asked, connection, work)
    except FirnError as error:
        return _failed(made.prog, sentence_of(error), AGAIN if isinstance(error, passing) else 1)
    except OSError as error:
        return _failed(made.prog, sentence_of(error))
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the rim of the process: one sentence for people, the story on request
        if os.environ.get("FIRN_DEBUG"):
            raise
        code = AGAIN if isinstance(raised_in_task(error), passing) else 1
        return _failed(made.prog, _sentence_of_spark(error), code)
    if asked.output == "json":
        print(json.dumps(report.document, ensure_ascii=False, separators=(",", ":")), flush=True)
    else:
        print_table_of(report)
    return _failed(made.prog, report.failure) if report.failure else report.code


def _connection(asked: argparse.Namespace) -> Connection:
    return Connection(
        bootstrap=asked.bootstrap or _addresses_of_environment(),
        tls_ca=asked.tls_ca, tls_cert=asked.tls_cert, tls_key=asked.tls_key, token_file=asked.token_file,
        timeout=duration_ms(asked.timeout) / 1000,
    )  # fmt: skip


def _check_topic(connection: Connection, topic: str, *, may_be_absent: bool) -> None:
    """Errors: UnknownTopic; Unavailable when nobody answers."""
    with connection.client() as client:
        try:
            client.describe(topic)
        except UnknownTopic:
            if not may_be_absent:
                raise


def _worked(asked: argparse.Namespace, connection: Connection, work: Callable[[Job], Report]) -> Report:
    from pyspark.sql import SparkSession

    before = SparkSession.getActiveSession()
    if before is not None:
        return _done(Job(before, connection, asked), work)
    told: list[int] = []

    def stop(number: int, frame: object) -> NoReturn:
        told.append(number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)  # so that Spark is stopped, and with it the executors
    logging.getLogger("py4j").setLevel(logging.ERROR)
    title = " ".join(("firn", asked.job, *([asked.topic] if "topic" in asked else [])))
    bar = {"spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()}
    spark = session(title, master=asked.master, conf={**bar, **_quiet(asked), **dict(asked.conf)})
    try:
        report = _done(Job(spark, connection, asked), work)
    except BaseException as error:
        # A signal may have cut an exchange with the JVM short: what is asked next, on the way out too, is given its answer.
        with suppress(Exception):
            spark.stop()  # else it ends with this process
        if told:
            raise SystemExit(128 + told[0]) from error
        raise
    spark.stop()
    return report


def _done(job: Job, work: Callable[[Job], Report]) -> Report:
    if not (job.spark.sparkContext.master or "").startswith("local"):
        check_workers(job.spark)
    return work(job)


def _quiet(asked: argparse.Namespace) -> dict[str, str]:
    """How much Spark says: what goes wrong on this machine is in the one sentence at the end, of others in their logs."""
    if os.environ.get("FIRN_DEBUG"):
        return {}
    is_elsewhere = asked.master is not None or "PYSPARK_SUBMIT_ARGS" in os.environ
    return {"spark.log.level": "ERROR" if is_elsewhere else "FATAL"}


def say(line: str) -> None:
    """A line of progress, for people: stdout is the report's."""
    print(line, file=sys.stderr, flush=True)


def topic_name(text: str) -> str:
    """An argument that names a topic."""
    return _argument(check_topic_name, text)


def count(text: str) -> int:
    """An argument that is a whole number above 0."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)


def raised_in_task(error: BaseException) -> FirnError | None:
    """firn's own error behind one of Spark's; None when something else went wrong."""
    found = _RAISED_IN_TASK.findall(str(error))
    if not found:
        return None
    name, message = found[-1]
    kind = getattr(errors, name, FirnError)
    return kind(message) if isinstance(kind, type) and issubclass(kind, FirnError) else FirnError(message)


def _sentence_of_spark(error: BaseException) -> str:
    ours = raised_in_task(error)
    if ours is not None:
        return sentence_of(ours)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{type(error).__name__}: {first}; run again with FIRN_DEBUG=1 for the whole story"


def _failed(prog: str, sentence: str, code: int = 1) -> int:
    sys.stdout.flush()
    print(f"{prog}: {sentence}", file=sys.stderr, flush=True)
    return code


def _addresses_of_environment() -> str:
    text = os.environ.get("FIRN_BROKER") or DEFAULT_BROKER
    try:
        return _addresses(text)
    except argparse.ArgumentTypeError as error:
        raise Invalid(f"$FIRN_BROKER: {error}") from None


def _addresses(text: str) -> str:
    for address in text.split(","):
        port = address.rpartition(":")[2]
        if not _ADDRESS.fullmatch(address.strip()) or not 0 < int(port) < 65536:
            raise argparse.ArgumentTypeError(
                f"{address.strip()!r} is not an address; write HOST:PORT[,HOST:PORT...]"
            )
    return text


def _duration(text: str) -> str:
    if _argument(duration_ms, text) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected more than 0s")
    return text


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise argparse.ArgumentTypeError(f"{text!r}: expected spark.SOMETHING=VALUE")
    return name, value


def _argument(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except Invalid as error:
        raise argparse.ArgumentTypeError(error.message) from None
