"""Settings of one broker process: what each means, its unit, its default and why that default."""

from dataclasses import dataclass, field

from firn.errors import Invalid
from firn.tls import Credentials

KUBERNETES = "kubernetes"  # the coordinator that is no file: group records in Leases


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Budgets in bytes; with the process itself (130 MiB when its kernels are loaded) and a compaction below 360 MiB."""

    # Two thirds: RocksDB's block cache and write buffers. One third: rows of batches that `get` touched.
    index_bytes: int = 48 << 20
    active_keys_bytes: int = 48 << 20  # key indexes of active segments; past it the largest are sealed
    in_flight_bytes: int = 32 << 20  # produce requests received and not yet acknowledged
    reads_bytes: int = 16 << 20  # bulk reads being put together


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """Paths; empty: none. PEM files and the token file are read again when they change."""

    tls_cert: str = ""  # the broker's own certificate, with its chain
    tls_key: str = ""
    tls_ca: str = ""  # the cluster's own CA: nodes, administrators, clients
    tls_client_ca: str = ""  # further CAs, for clients alone
    tokens: str = ""  # bearer tokens, hashed
    token_review: str = ""  # audience of service accounts' tokens, which the Kubernetes API is asked about
    local_ca: str = ""  # folder of a CA of firn's own, that renews these files (`firn up --tls`)
    audit_log: str = ""  # with authentication; empty: `audit.log` in the data folder

    @property
    def has_tls(self) -> bool:
        return bool(self.tls_cert)

    @property
    def has_authentication(self) -> bool:
        return bool(self.tls_ca or self.tls_client_ca or self.tokens or self.token_review)

    def as_client(self) -> Credentials:
        """What this broker shows to other nodes, and whom of them it believes."""
        if not self.tls_ca:
            return Credentials()
        return Credentials(self.tls_ca, self.tls_cert, self.tls_key)

    def check(self) -> None:
        """Errors: Invalid for settings that cannot go together."""
        if bool(self.tls_cert) != bool(self.tls_key):
            raise Invalid("tlsCert and tlsKey belong together: give both, or neither")
        if (self.tls_ca or self.tls_client_ca) and not self.tls_cert:
            raise Invalid(
                "tlsCa and tlsClientCa check certificates, which needs TLS: give tlsCert and tlsKey too"
            )


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """A broker's place among the replicas of its broker group."""

    coordinator: str  # path of the SQLite file that keeps the group records of the cluster, or KUBERNETES
    group: int = 0
    groups: int = 1  # of the cluster: partition p of a topic lives in group p % groups
    replicas: int = 0  # of the group, as it is to be; 0: only as many as it has
    ordinal: int = 0  # among the replicas of the group: the lower one stands first
    lease_ttl_ms: int = 3_000  # a master that is silent for so long is replaced
    replica_max_lag_ms: int = 0  # a standby without catch-up for so long leaves in_sync; 0: as leaseTtl
    cluster: str = ""  # in Kubernetes: its BrokerCluster, whose name begins those of Leases and BrokerGroups
    namespace: str = ""  # in Kubernetes: where all of these are

    @property
    def is_in_kubernetes(self) -> bool:
        return self.coordinator == KUBERNETES

    def object_of(self, group: object) -> str:
        """The name of a group's Lease, and of its BrokerGroup."""
        return f"{self.cluster}-{group}"


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    data: str  # the data folder
    host: str = "127.0.0.1"  # loopback: never open by accident
    port: int = 7700
    advertise: str = ""  # HOST:PORT where clients and replicas find it; empty: where it listens
    health_host: str = ""  # a second port, without TLS, for probes and metrics alone; empty: none
    health_port: int = 0
    node: str = "firn-0"  # this broker's name in status
    insecure: bool = False  # listens beyond loopback without TLS and authentication; shown in status
    index: str = "rocksdb"  # rocksdb | files | mirrored
    log_segment_bytes: int = 256 << 20  # one file of the commit log; retention frees whole ones
    flush_interval_ms: int = 500  # how long `flush: interval` may stay unsynced
    checkpoint_bytes: int = 256 << 20  # the index is flushed after so much log, or
    checkpoint_ms: int = 30_000  # so long: bounds the replay after a crash
    min_dead_ratio: float = 0.25  # a clean segment with this share of masked rows is rewritten
    reclaim_age_ms: int = 7 * 86_400_000  # a masked row is off the disk after this and one compaction
    disk_reserve: float = 0.05  # share of the disk below which produces stop; compaction may use it
    io_bytes_per_second: int = 0  # compaction's reads and writes; 0: no bound
    compaction_check_ms: int = 1_000  # how often due partitions are looked for
    open_files_max: int = 512  # of the data folder, besides RocksDB's
    connections_max: int = 10_000
    snapshot_ttl_ms: int = 600_000  # a snapshot's lease
    plan_ttl_ms: int = 600_000  # a forced compaction by Spark whose driver is silent for so long is dropped
    producer_expiry_ms: int = 7 * 86_400_000  # a producer's sequences are forgotten after so long unused
    memory: MemorySettings = field(default_factory=MemorySettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    group: GroupSettings | None = None  # None: a broker of its own

    @property
    def address(self) -> str:
        """Where others find it."""
        return self.advertise or f"{self.host}:{self.port}"
