"""The runs of the model: which clause is left out, within which bounds, and what must come out.

A run of the rules in force must hold, a run without a clause must end in a violation, a run that looks for a state
must find it (its invariant says that there is none). A run that holds sees all states within its bounds; one that
searches sees as many as there is time for; one that walks takes random ways at large bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

Expected = Literal["holds", "searches", "walks", "violated", "reached"]

SAFE = ("Agreement", "OneMaster", "LogMatching", "MasterComplete", "ReadFresh", "CommittedPrefix")
CORE = (*SAFE, "InSyncComplete", "EnoughInSync", "FencedStay", "FencedFollow")
FLUSH = (*CORE, "IntervalComplete")
REBUILT = ("SameView", "NoOffsetTwice")
WHOLE = (*REBUILT, "NothingMissing", "MasterView")


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a run of ``Group.tla`` looks: how often what may happen, and which parts of the rules are in play."""

    module: ClassVar[str] = "Group"
    nodes: int = 3
    epochs: int = 2
    records: int = 1
    crashes: int = 0
    losses: int = 0
    forces: int = 0
    moves: int = 0
    min_in_sync: int = 1
    interval: bool = False
    in_flight: bool = False
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = (
            (self.nodes, "node", "nodes"), (self.epochs, "epoch", "epochs"), (self.records, "record", "records"),
            (self.crashes, "crash", "crashes"), (self.losses, "lost disk", "lost disks"),
            (self.forces, "forced election", "forced elections"), (self.moves, "moved volume", "moved volumes"),
        )  # fmt: skip
        said = _counted(counts)
        said += [f"minInSync {self.min_in_sync}"] if self.min_in_sync > 1 else []
        said += ["flush interval"] if self.interval else []
        said += ["requests in flight"] if self.in_flight else []
        return ", ".join(said) + (f"; with {', '.join(self.parts)}" if self.parts else "")

    @property
    def constants(self) -> dict[str, str]:
        """What the module's constants are, as TLC reads them."""
        return {
            "Node": _set(("a", "b", "c")[: self.nodes]), "Twin": "Twin", "None": "None",
            "MaxEpoch": str(self.epochs), "MaxRec": str(self.records), "MaxCrash": str(self.crashes),
            "MaxLoss": str(self.losses), "MaxForce": str(self.forces), "MaxMove": str(self.moves),
            "MinInSync": str(self.min_in_sync), "Interval": str(self.interval).upper(),
            "InFlight": str(self.in_flight).upper(), "With": _set([f'"{part}"' for part in self.parts]),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class RebuildBounds:
    """How far a run of ``Rebuild.tla`` looks. ``sources``: replicas that can be master; ``breaks``: pins that are gone."""

    module: ClassVar[str] = "Rebuild"
    sources: int = 1
    rows: int = 2
    anew: int = 1
    breaks: int = 0
    changes: int = 0

    def __str__(self) -> str:
        counts = (
            (self.sources, "source", "sources"), (self.rows, "row of 2 keys", "rows of 2 keys"),
            (self.anew, "rebuild", "rebuilds"), (self.breaks, "lost pin", "lost pins"),
            (self.changes, "change of master", "changes of master"),
        )  # fmt: skip
        return ", ".join(_counted(counts))

    @property
    def constants(self) -> dict[str, str]:
        """What the module's constants are, as TLC reads them."""
        return {
            "Source": _set(("a", "b")[: self.sources]), "Key": _set(("k", "x")), "MaxRows": str(self.rows),
            "MaxAnew": str(self.anew), "MaxBreak": str(self.breaks), "MaxChange": str(self.changes),
        }  # fmt: skip


AnyBounds = Bounds | RebuildBounds


def _counted(counts: Sequence[tuple[int, str, str]]) -> list[str]:
    """How many of what, without what there is none of; but "0 records" is said."""
    return [
        f"{count} {one if count == 1 else many}" for count, one, many in counts if count or one == "record"
    ]


def _set(names: Sequence[str]) -> str:
    return "{" + ", ".join(names) + "}"


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    says: str
    expected: Expected
    invariants: tuple[str, ...]
    bounds: AnyBounds = field(default_factory=Bounds)
    drop: str = ""
    rule: str = ""

    @property
    def module(self) -> str:
        return self.bounds.module


def _holds(name: str, says: str, bounds: AnyBounds, invariants: tuple[str, ...] = CORE) -> Run:
    return Run(name, says, "holds", invariants, bounds)


def _searches(name: str, says: str, bounds: AnyBounds, invariants: tuple[str, ...] = CORE) -> Run:
    return Run(name, says, "searches", invariants, bounds)


def _walks(name: str, says: str, bounds: AnyBounds, invariants: tuple[str, ...] = CORE) -> Run:
    return Run(name, says, "walks", invariants, bounds)


def _drop(rule: str, name: str, says: str, bounds: AnyBounds, invariants: tuple[str, ...] = SAFE) -> Run:
    return Run(f"no-{name}", says, "violated", invariants, bounds, name, rule)


def _reach(name: str, goal: str, says: str, bounds: AnyBounds) -> Run:
    return Run(f"reach-{name}", says, "reached", (goal,), bounds)


B, R = Bounds, RebuildBounds
READ = ("read", "resign")

DROPPED = (
    _drop("7", "durable", "ends count before they are durable", B(crashes=1)),
    _drop("4", "incarnation", "a restarted master goes on in its epoch", B(records=2, crashes=1)),
    _drop("1, 7", "union", "a grow that timed out is taken as not applied", B()),
    _drop("7", "growunion", "a grow counts only once applied", B()),
    _drop("8", "growcom", "a standby joins below the committed position", B()),
    _drop("8", "growstart", "a standby joins below the epoch's start", B(epochs=3)),
    _drop("8", "shrinkwait", "a shrink counts when asked for", B()),
    _drop("7", "ackepoch", "reports of an older epoch count", B(epochs=3)),
    _drop("9", "insync", "a node outside in_sync stands", B()),
    _drop("9", "logid", "in_sync holds names, a disk is lost", B(losses=1)),
    _drop("15", "trunc_any", "a follower keeps what it has", B(epochs=3)),
    _drop("15", "trunc_history", "cut at the start of the master's epoch only", B(epochs=3)),
    _drop("15", "trunc_com", "cut at the committed position that the follower knows", B(epochs=3, parts=("com",))),
    _drop("15", "synccut", "a sync that began before the cut reports", B(epochs=3, parts=("sync",)), CORE),
    _drop("5", "refuse", "a lower epoch is followed", B(epochs=3)),
    _drop("5", "durableepoch", "the highest epoch seen is forgotten in a crash",
          B(nodes=2, crashes=1, forces=1), CORE),
    _drop("16", "comhandshake", "the committed position is taken before the cut", B(parts=("com",))),
    _drop("section 1", "onelease", "the lease is an object of its own", B(parts=READ)),
    _drop("9", "silence", "a standby stands before the lease is silent", B(parts=READ)),
    _drop("10", "leaseread", "a master reads without a lease", B(parts=READ)),
    _drop("11", "barrier", "a new master reads before its epoch start is committed", B(parts=READ)),
    _drop("13", "resignstop", "a master that hands over goes on until it hears", B(parts=READ)),
    _drop("19", "clean", "flush interval: a node that lost its tail stands", B(crashes=1, interval=True), FLUSH),
    _drop("19", "growacked", "flush interval: a standby joins below what was acknowledged", B(interval=True), FLUSH),
    _drop(
        "19", "answerasked", "flush interval: an answer to an earlier candidacy counts",
        B(nodes=2, crashes=2, interval=True, parts=("answers", "still")), FLUSH,
    ),
    _drop(
        "18", "readwait", "flush interval: a read does not wait for what was acknowledged before",
        B(interval=True, parts=("read",)), FLUSH,
    ),
    _drop("8", "minopen", "writes are counted against in_sync as known, while a shrink is open",
          B(min_in_sync=2, parts=("read", "min")), CORE),
    _drop("8", "minack", "minInSync is asked for before the append only",
          B(min_in_sync=2, parts=("read", "min")), CORE),
    _drop("8", "minpos", "a write is acknowledged by the newest minInSync, not by that which it was taken under",
          B(records=2, min_in_sync=2, parts=("read", "min")), CORE),
    _drop("22", "loaded", "a new master takes writes before it has read its log",
          B(nodes=2, records=2, parts=("read", "min")), CORE),
    _drop("10", "acklease", "a master acknowledges without a lease, data loss was accepted elsewhere",
          B(nodes=2, forces=1, parts=("read", "min")), CORE),
    _drop("9", "fence", "who is fenced goes on", B(forces=1), CORE),
    _drop("9", "forcedurable", "others follow one made master by force before its log is durable",
          B(nodes=2, epochs=3, crashes=1, forces=1, parts=("com", "still")), CORE),
    _drop("15", "judge", "a standby cuts what it knows to be committed, and was given up",
          B(nodes=2, forces=1, parts=("com",)), CORE),
    _drop("4, 9", "olddoubt", "a volume has moved: its second process takes the old master for dead",
          B(nodes=2, crashes=1, moves=1, parts=("read",)), CORE),
    _drop("5", "overtaken", "flush interval: an older process of a folder is welcomed after a newer one",
          B(nodes=2, moves=1, interval=True), FLUSH),
    _drop("rebuild", "behind", "a standby whose place in the log is gone goes on behind the gap", R(), REBUILT),
    _drop("rebuild, 1", "blank", "a standby that starts anew keeps its compacted log", R(), REBUILT),
    _drop("rebuild, 2", "streamfirst", "the stream starts after the pull", R(), REBUILT),
    _drop("rebuild, 2", "ownlog", "a blank standby's log lets go of what it holds", R(), REBUILT),
    _drop("rebuild, 3", "ends", "next offsets are taken from the records", R(), REBUILT),
    _drop("rebuild, 4", "joins", "a pin is given whose dirty offsets begin before the standby's log",
          R(sources=2, changes=1), REBUILT),
    _drop("rebuild, 4", "pin", "the pull reads what the manifest names at each request", R(), REBUILT),
    _drop("rebuild, 4", "startover", "a broken pull goes on under a new generation", R(breaks=1), REBUILT),
    _drop("rebuild, 4", "whole", "a partition counts as whole before all of it is here", R(breaks=1), REBUILT),
    _drop("rebuild, 5", "upto", "a standby goes on before it has dispatched what the pin spoke of", R(), REBUILT),
)  # fmt: skip

HOLDING = (
    _holds("tiny", "a first look", B(records=0, crashes=1)),
    _holds("safety-2", "a record", B()),
    _holds("pair-3", "two nodes, three epochs", B(nodes=2, epochs=3, crashes=1)),
    _holds("disk-2", "a lost disk", B(records=0, losses=1)),
    _holds("store-2", "an epoch is taken before it is durable", B(nodes=2, crashes=1, parts=("store",))),
    _holds("sync-2", "syncs that take time", B(nodes=2, crashes=1, parts=("sync",))),
    _holds("read-2", "leases, reads, switchover", B(records=0, parts=READ)),
    _holds("read-pair", "... with a crash", B(nodes=2, crashes=1, parts=READ)),
    _holds("standby-2", "standbys learn the committed position", B(parts=("com",))),
    _holds("standby-3", "... and keep it through crashes", B(nodes=2, epochs=3, crashes=2, parts=("com",))),
    _holds("inflight-2", "requests stay in flight", B(nodes=2, in_flight=True, parts=READ)),
    _holds("min-2", "minInSync 2, raised and lowered", B(nodes=2, records=2, min_in_sync=2, parts=("read", "min"))),
    _holds("interval-2", "flush interval", B(nodes=2, crashes=1, interval=True), FLUSH),
    _holds("forced-2", "accepted data loss", B(nodes=2, forces=1, parts=("com", "still"))),
    _holds("forced-crash", "... with a crash", B(nodes=2, records=0, crashes=1, forces=1, parts=("com", "still"))),
    _holds("forced-join", "... and in_sync that grows again", B(nodes=2, forces=1, parts=("com",))),
    _holds("forced-read", "... with leases", B(nodes=2, forces=1, parts=("read", "min", "still"))),
    _holds("twin-read", "a volume moves: leases", B(nodes=2, crashes=1, moves=1, parts=("read", "still"))),
    _walks("walk-sync", "everything at once",
           B(epochs=5, records=4, crashes=4, losses=1, parts=("read", "resign", "com", "min", "store", "sync"))),
    _walks("walk-forced", "everything at once, accepted data loss, a moved volume",
           B(epochs=5, records=4, crashes=3, forces=2, moves=1, parts=("read", "resign", "com", "min"))),
    _walks("walk-interval", "everything at once, flush interval",
           B(epochs=5, records=4, crashes=4, losses=1, moves=1, interval=True,
             parts=("read", "resign", "com", "answers")), FLUSH),
    _holds("rebuild-3", "rebuild by messages", R(rows=3, breaks=1), WHOLE),
    _holds("rebuild-change", "... from two masters", R(sources=2, changes=1), WHOLE),
)  # fmt: skip

# Minutes each, or as long as they are given.
LARGE = (
    _searches("large-2", "two epochs, crashes", B(crashes=2)),
    _searches("large-3", "three epochs", B(epochs=3, records=0, crashes=1)),
    _searches("large-disk", "a lost disk and a crash", B(records=0, crashes=1, losses=1)),
    _searches("large-read", "leases, reads, switchover", B(crashes=1, parts=READ)),
    _searches("large-standby", "standbys learn the committed position", B(crashes=1, parts=("com",))),
    _searches("large-inflight", "requests stay in flight", B(in_flight=True, parts=READ)),
    _searches("large-min", "minInSync 2, raised and lowered", B(min_in_sync=2, parts=("read", "min"))),
    _searches("large-interval", "flush interval", B(crashes=1, interval=True), FLUSH),
    _searches("large-answers", "... and answers that are under way for long",
              B(nodes=2, crashes=2, interval=True, parts=("read", "answers", "still")), FLUSH),
    _searches("large-forced", "accepted data loss, a crash",
              B(nodes=2, epochs=3, crashes=1, forces=1, parts=("com", "still"))),
    _searches("large-twin", "a volume moves", B(moves=1, parts=("read",))),
    _searches("large-moved", "... under flush interval", B(nodes=2, moves=1, interval=True), FLUSH),
)  # fmt: skip

REACHED = (
    _reach("cut", "NeverCutsADurableTail", "a durable tail is cut", B()),
    _reach("rejoin", "NeverRejoins", "all are in sync after a failover", B()),
    _reach("two-masters", "NeverTwoMastersAtOnce", "two nodes act at once, the newer one commits", B()),
    _reach("rebuild", "NeverRebuilds", "a standby is rebuilt after accepted data loss, and in sync again",
           B(nodes=2, forces=1, parts=("com",))),
    _reach("twin", "NeverTwinActs", "two processes of one folder act, each in its epoch",
           B(nodes=2, moves=1, parts=("read",))),
    _reach("lowered", "NeverAcksAfterLowering", "a write is acknowledged by one replica after minInSync was lowered",
           B(nodes=2, records=2, min_in_sync=2, parts=("read", "min"))),
    _reach("pinned", "NeverDropsUnderAPin", "a tombstone is dropped while it is pulled", R()),
    _reach("rebuilt", "NeverServesWhatIsGone", "a rebuilt standby serves what its master's files hold no more", R()),
    _reach("waits", "NeverWaitsForACompaction", "a pull begins anew at a master that has compacted less",
           R(sources=2, breaks=1, changes=1)),
)  # fmt: skip

RUNS = {run.name: run for run in (*HOLDING, *LARGE, *DROPPED, *REACHED)}
QUICK = ("tiny", *(run.name for run in (*DROPPED, *REACHED)))
