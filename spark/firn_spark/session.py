"""Sessions in which ``format("firn")`` works, and early words on what would keep it from working.

Spark itself says little: without Java a Python program dies in a shell script, with another interpreter workers die with
"worker exited unexpectedly", and a missing package shows as the end of a long Java stack.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from firn.errors import Invalid

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from firn_spark.keeper import Keeper

log = logging.getLogger(__name__)

JAVA_MIN = 17
LOCAL_MASTER = "local[*,4]"  # a task has four attempts, as on a cluster; of local[*] one, whatever is set
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_PROBE = "import sys; print('%d.%d' % sys.version_info[:2]); import pyarrow, pyspark, firn_spark"
_SECONDS_MAX = 60
_keepers: "WeakKeyDictionary[SparkContext, Keeper]" = WeakKeyDictionary()


def check_here() -> None:
    """Whether Spark can run on this machine. Errors: Invalid, one sentence that says what is missing."""
    for package in ("pyspark", "pyarrow"):
        try:
            __import__(package)
        except ImportError:
            raise Invalid(
                f"Spark needs {package}, which is not installed: pip install 'firn[spark]'"
            ) from None
    _check_java()
    chosen = os.environ.get("PYSPARK_PYTHON")
    if chosen and not os.path.samefile(shutil.which(chosen) or os.devnull, sys.executable):
        _check_interpreter(chosen)


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    where = f"$JAVA_HOME is {home}" if home else "there is no java on the PATH, and no $JAVA_HOME"
    if java is None or not os.access(java, os.X_OK):
        raise Invalid(
            f"Spark needs Java {JAVA_MIN} or newer: {where}; install a JRE, as openjdk-17-jre-headless"
        )
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_SECONDS_MAX, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Invalid(f"Spark needs Java {JAVA_MIN} or newer: {java} cannot be run: {error}") from None
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    if found is None or int(found[1]) < JAVA_MIN:
        words = (answer.stderr or answer.stdout).partition("\n")[0]
        raise Invalid(f"Spark needs Java {JAVA_MIN} or newer: {java} is {words}")


def _check_interpreter(python: str) -> None:
    """Errors: Invalid for one that workers could not be run by."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        answer = subprocess.run(
            [python, "-c", _PROBE], check=False, capture_output=True, text=True, timeout=_SECONDS_MAX
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Invalid(f"$PYSPARK_PYTHON is {python}, which cannot be run: {error}") from None
    version = answer.stdout.strip()
    if version != here:
        raise Invalid(
            f"$PYSPARK_PYTHON is {python}, which is Python {version or 'of no version'}; this is {here}: workers and "
            f"driver need the same, as by PYSPARK_PYTHON={sys.executable}"
        )
    if answer.returncode:
        why = answer.stderr.strip().rpartition("\n")[2]
        raise Invalid(
            f"$PYSPARK_PYTHON is {python}, which lacks a package: {why}; pip install 'firn[spark]' there"
        )


def session(name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None) -> "SparkSession":
    """A session in which ``format("firn")`` works; the one that runs, if one does.

    ``master``: else what ``spark-submit`` or the configuration says, else ``LOCAL_MASTER``. Workers are run by this
    interpreter unless ``PYSPARK_PYTHON`` names one.
    Errors: Invalid, as ``check_here``.
    """
    check_here()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    settings = SparkConf(loadDefaults=False).setAppName(name)
    if master is not None:
        settings.setMaster(master)
    for key, value in (conf or {}).items():
        settings.set(key, value)
    if not settings.contains("spark.master") and SparkContext._active_spark_context is None:
        SparkContext._ensure_initialized(conf=settings)  # the JVM knows what is said elsewhere
        settings.setMaster(chosen_master(SparkConf().get("spark.master")))
    found = SparkSession.builder.config(conf=settings).getOrCreate()
    register(found)
    return found


def chosen_master(found: str | None) -> str:
    """The master to use where Spark has found this one: ``local[*]`` is what it settles for when nothing says any."""
    return LOCAL_MASTER if found in (None, "local[*]") else found


def register(spark: "SparkSession") -> None:
    """Make ``format("firn")`` known to a session, with all that it can do.

    *Effects*: filter push-down is on for this session; a thread of this process holds the leases of snapshots
    (``firn_spark.keeper``) until the session ends. Once is enough; again changes nothing.
    """
    from firn_spark.keeper import Keeper
    from firn_spark.source import FirnSource

    context = spark.sparkContext
    if context not in _keepers:

        def active_jobs() -> frozenset[int] | None:
            return None if context._jsc is None else frozenset(context.statusTracker().getActiveJobsIds())

        try:
            found = _keepers[context] = Keeper(active_jobs)
            context.environment.update(found.environment)
        except OSError as error:
            log.warning("nobody but tasks holds the leases of snapshots: %s", error)
    # In place of the one that Spark finds by itself (it says so in its log), whose planner has nothing of this process's
    # environment and so would not know the keeper.
    spark.dataSource.register(FirnSource)
    spark.conf.set(PUSHDOWN, "true")


def keeper(spark: "SparkSession") -> "Keeper | None":
    """Who holds the leases of snapshots for a session, once it is registered."""
    return _keepers.get(spark.sparkContext)


def check_workers(spark: "SparkSession") -> None:
    """Whether the executors can read firn. Errors: Invalid, one sentence that says what they lack."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    context = spark.sparkContext
    try:
        context.parallelize(range(context.defaultParallelism), context.defaultParallelism).map(
            _probe
        ).collect()
    except (Py4JJavaError, PySparkException) as error:
        text = str(error)
        missing = re.search(r"No module named '?([\w.]+)", text)
        if missing:
            raise Invalid(
                f"a worker lacks the package {missing[1]}: pip install 'firn[spark]' for the interpreter that "
                f"PYSPARK_PYTHON names there ({context.pythonExec})"
            ) from None
        if "PYTHON_VERSION_MISMATCH" in text:
            raise Invalid(
                f"workers run another version of Python than this {sys.version_info.major}.{sys.version_info.minor}: "
                "set PYSPARK_PYTHON to one that is the same"
            ) from None
        raise


def _probe(number: int) -> str:
    import pyarrow

    import firn_spark.fetch

    return f"{pyarrow.__version__} {firn_spark.fetch.__name__} {number}"
