"""What a plan is made of: actions, each with one sentence why, and what is said beside them.

An action is a value: ``actions`` does it, ``conditions`` and ``python -m firn_operator plan`` show it.
"""

from dataclasses import dataclass, field
from datetime import timedelta

from firn_operator.certificates import SecretWrite
from firn_operator.kube import Kind, Obj


@dataclass(frozen=True, slots=True)
class Apply:
    """Bring an object into being, or back to what it is to be."""

    body: Obj = field(hash=False)
    why: str
    is_new: bool = False  # none is known: one of this name that is there is somebody else's


@dataclass(frozen=True, slots=True)
class MakeLease:
    """The place of a group's record, which must not be there yet."""

    body: Obj = field(hash=False)
    why: str


@dataclass(frozen=True, slots=True)
class WriteSecret:
    write: SecretWrite
    why: str


@dataclass(frozen=True, slots=True)
class Delete:
    kind: Kind
    name: str
    why: str
    uid: str | None = None
    orphan: bool = False


@dataclass(frozen=True, slots=True)
class Finalize:
    """Set the finalizers of a resource."""

    kind: Kind
    name: str
    finalizers: tuple[str, ...]
    version: str
    why: str


@dataclass(frozen=True, slots=True)
class Shrink:
    """Run fewer pods of a group, once its record names none of those that go."""

    group: int
    leaving: tuple[str, ...]
    body: Obj = field(hash=False)
    why: str


@dataclass(frozen=True, slots=True)
class StopPod:
    """Stop a pod, which its StatefulSet makes anew as it is wished now."""

    group: int
    pod: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class SwitchOver:
    """Ask a group's master to hand over to the first of ``among`` that can."""

    group: int
    among: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class GrowClaim:
    name: str
    size: str
    why: str


@dataclass(frozen=True, slots=True)
class DiscardVolume:
    """Give up the volume of a pod that cannot run without it; its replica is rebuilt from the master."""

    group: int
    pod: str
    uid: str
    claim_uid: str
    why: str


Action = (
    Apply | MakeLease | WriteSecret | Delete | Finalize | Shrink | StopPod | SwitchOver | GrowClaim | DiscardVolume
)  # fmt: skip


@dataclass(slots=True)
class Plan:
    actions: list[Action] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    troubles: list[tuple[str, str]] = field(default_factory=list)  # reason and sentence
    targets: dict[int, str] = field(default_factory=dict)  # the master that is wished, by group
    replicas: int = 0  # of each group, as is safe now
    phase: str = "Running"
    look_again: timedelta | None = None

    def again_in(self, wait: timedelta) -> None:
        self.look_again = wait if self.look_again is None else min(wait, self.look_again)
