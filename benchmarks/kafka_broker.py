"""Apache Kafka as a peer: its jars through Maven, one KRaft node with a heap of 1 GiB, its topics.

The jars are kept in ``$FIRN_BENCH_CACHE`` (else ``~/.cache/firn-bench``), outside of the repository.
"""

import base64
import importlib.util
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.processes import cpu_seconds, forget_peak, memory_mb

from firn_node.ports import free_ports

VERSION = "4.3.0"
HEAP = "1g"
JVM = (
    f"-Xms{HEAP}", f"-Xmx{HEAP}", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35", "-Dorg.slf4j.simpleLogger.showDateTime=true",
)  # fmt: skip
READY_S = 120.0
# Kafka's defaults, but for: one node's replication factors; a cleaner that looks every 100 ms instead of 15 s and has
# the map of its default size; files of deleted topics gone in a second.
PROPERTIES = """\
process.roles={roles}
node.id={node}
controller.quorum.voters=1@127.0.0.1:{controller}
listeners={listeners}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
log.dirs={folder}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
log.cleaner.backoff.ms=100
log.cleaner.dedupe.buffer.size=134217728
log.segment.delete.delay.ms=1000
"""
# Where no figure means anything: less compiling, and a broker that was killed is missed after a second, not nine.
QUICK_JVM = ("-XX:TieredStopAtLevel=1",)
QUICK_PROPERTIES = "broker.session.timeout.ms=1000\nbroker.heartbeat.interval.ms=250\n"
POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>dev.firn</groupId><artifactId>bench-peers</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{v}</version></dependency>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId><version>{v}</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
"""


class NoKafka(Exception):
    """Kafka cannot run here; the text says why."""


def jars() -> Path:
    """The folder with Kafka's jars, fetched by Maven the first time. Errors: NoKafka."""
    if importlib.util.find_spec("confluent_kafka") is None:
        raise NoKafka("there is no confluent-kafka to drive it")
    if shutil.which("java") is None:
        raise NoKafka("there is no `java` on the PATH")
    cache = Path(os.environ.get("FIRN_BENCH_CACHE") or Path.home() / ".cache" / "firn-bench")
    folder = cache / f"kafka-{VERSION}"
    libs = folder / "libs"
    if (libs / f"kafka-tools-{VERSION}.jar").exists():
        return libs
    if shutil.which("mvn") is None:
        raise NoKafka(f"Kafka's jars are not in {libs} and there is no `mvn` on the PATH to fetch them")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pom.xml").write_text(POM.format(v=VERSION))
    partial = folder / "fetching"
    shutil.rmtree(partial, ignore_errors=True)
    command = ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={partial}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoKafka(f"Maven did not fetch Kafka {VERSION}: {(done.stdout + done.stderr).strip()[-500:]}")
    partial.rename(libs)
    return libs


def _admin_module() -> Any:
    """``confluent_kafka.admin``, imported when first needed: firn alone runs without it."""
    return importlib.import_module("confluent_kafka.admin")


class KafkaBroker:
    """One node on a fixed data folder. ``is_quick``: started for the harness's sake, not to be measured.

    ``joins``: the first node of a cluster that this one is the second node of; else it is a cluster of its own.
    """

    def __init__(self, folder: Path, *, is_quick: bool = False, joins: "KafkaBroker | None" = None) -> None:
        self.folder = folder
        self._jvm = QUICK_JVM if is_quick else ()
        self._libs = jars()
        self._process: subprocess.Popen[bytes] | None = None
        self._admin: Any = None  # one for the broker's life: its answers die with it
        port, controller = free_ports("127.0.0.1", 2)
        self.address = f"127.0.0.1:{port}"
        self._controller = joins._controller if joins else controller
        self._cluster = (
            joins._cluster if joins else base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        )
        listeners = [f"PLAINTEXT://{self.address}"] + (
            [] if joins else [f"CONTROLLER://127.0.0.1:{self._controller}"]
        )
        folder.mkdir(parents=True, exist_ok=True)
        self._properties = folder / "server.properties"
        self._log = folder / "broker.log"
        self._properties.write_text(
            PROPERTIES.format(
                roles="broker" if joins else "broker,controller", node=2 if joins else 1, port=port,
                controller=self._controller, listeners=",".join(listeners), folder=(folder / "data").resolve(),
            )
            + (QUICK_PROPERTIES if is_quick else "")
        )  # fmt: skip
        self.tool(
            "kafka.tools.StorageTool", "format", f"--cluster-id={self._cluster}", "-c", str(self._properties)
        )

    def tool(self, name: str, *arguments: str) -> str:
        """What one of Kafka's Java tools prints. Errors: RuntimeError."""
        command = ["java", *self._jvm, "-cp", f"{self._libs}/*", name, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{name} ended with {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
        return done.stdout

    def start(self) -> float:
        """Seconds from the start of the process until it answers a client."""
        from confluent_kafka import KafkaException

        with self._log.open("ab") as log:
            began = time.perf_counter()
            self._process = subprocess.Popen(
                ["java", *JVM, *self._jvm, "-cp", f"{self._libs}/*", "kafka.Kafka", str(self._properties)],
                stdout=log, stderr=log,
            )  # fmt: skip
        self._admin = _admin_module().AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        while True:
            try:
                self._admin.list_topics(timeout=1)
                return time.perf_counter() - began
            except KafkaException as error:
                if self._process.poll() is not None or time.perf_counter() - began > READY_S:
                    self.kill()
                    raise NoKafka(f"Kafka did not start, see {self._log}") from error
                time.sleep(0.02)

    def create_topic(
        self, name: str, settings: Mapping[str, str] | None = None, *, partitions: int = 1, replicas: int = 1
    ) -> None:
        admin = _admin_module()
        topic = admin.NewTopic(name, partitions, replicas, config=dict(settings or {}))
        self._admin.create_topics([topic])[name].result()

    def delete_topic(self, name: str) -> None:
        self._admin.delete_topics([name])[name].result()

    def set_topic(self, name: str, settings: Mapping[str, str]) -> None:
        """Change settings of a topic."""
        admin = _admin_module()
        resource = admin.ConfigResource(admin.ConfigResource.Type.TOPIC, name)
        for key, value in settings.items():
            resource.add_incremental_config(
                admin.ConfigEntry(key, value, incremental_operation=admin.AlterConfigOpType.SET)
            )
        self._admin.incremental_alter_configs([resource])[resource].result()

    def log_mark(self) -> int:
        """Where the broker's log ends now."""
        return self._log.stat().st_size

    def wait_for_cleaning(self, topic: str, end: int, *, since: int) -> float:
        """Seconds that the cleaner says it took for the partition up to ``end``; waits until it has.

        Several runs over one partition (a map too small for its keys) are added up.
        """
        pattern = re.compile(
            rf"cleaned log {re.escape(topic)}-0 \(dirty section = \[(\d+), (\d+)\]\)"
            r".*?processed in ([\d.,]+) seconds", re.DOTALL,
        )  # fmt: skip
        until = time.monotonic() + 300
        while time.monotonic() < until:
            with self._log.open("rb") as file:
                file.seek(since)
                text = file.read().decode(errors="replace")
            runs = [(int(m[2]), float(m[3].replace(",", ""))) for m in pattern.finditer(text)]
            if runs and max(upto for upto, _ in runs) >= end:
                return sum(seconds for _, seconds in runs)
            time.sleep(0.05)
        raise RuntimeError(f"Kafka did not clean {topic} up to {end} in five minutes, see {self._log}")

    @property
    def pid(self) -> int:
        assert self._process is not None, "Kafka is not running"
        return self._process.pid

    def stop(self) -> float:
        """SIGTERM; seconds until the process is gone."""
        began = time.perf_counter()
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait(timeout=READY_S)
        return time.perf_counter() - began

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def cpu(self) -> float:
        return cpu_seconds(self.pid)

    def memory(self) -> tuple[float, float]:
        """Resident MB now and at the peak."""
        return memory_mb(self.pid)

    def forget_peak(self) -> None:
        forget_peak(self.pid)
