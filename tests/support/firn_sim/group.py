"""A simulated group of three to five nodes: one seed, one run.

The fault model. Of the network: every message may be lost, late by seconds, out of order, doubled; links are cut
in one direction or both, singly or all of a node. Of a node: its process is killed (the page cache stays), its
machine loses power (any prefix of what was not synced stays), its disk is lost (it comes back empty, under the
same name), it is paused for longer than a lease and goes on where it was; its clock runs up to 20 % fast or
slow; its disk is slow by a factor of up to 100. Of the coordinator: down, unreachable for one node, requests
lost or applied seconds later, answers lost, reads stale, success reported as conflict. All at any moment, in any
combination, from the seed alone. Of people: switchovers, brokers that are told to stop (``stopping``), replicas that
are taken out of the group with their disks, another ``minInSync``. With ``FirnLog`` the node's log is the broker's own
above ``SimDisk``, which adds torn and half-written sectors.

Not in it: a disk that forgets what it has synced under its log_id, the last in-sync disk lost, two processes of
one folder. Nor what the engine makes of the log: "dispatched" is a position that follows the committed one after a
while; there is no partition index, no compaction, no producer state and no topic. What a log lets go of is kept by key
(``Folder.compacted``), and a blank replica is given that of all replicas (``Checkers.committed_map``): the rebuild itself is
``firn_sim.rebuild``.

``Profile`` says how much of what; every run draws its own from the seed. At the end all faults stop, and the
group must be whole again: one master, all nodes in sync, logs and the maps of keys to values equal, writes and reads
served.
"""

import random
from collections.abc import Callable

from firn_sim.checkers import READERS, Checkers, Counts, Promise, Violated, telling
from firn_sim.coordinator import SimCoordinator
from firn_sim.faults import FAULTS_FROM, Faults, Profile, draw_profile
from firn_sim.network import SimNetwork
from firn_sim.node import SimNode
from firn_sim.replicalog import ReplicaLog
from firn_sim.world import World

from firn_node.replication import events as ev
from firn_node.replication.record import LogId
from firn_node.replication.rules import RULES, Rules
from firn_node.replication.state import Role


class NotLive(AssertionError):
    """The faults have stopped, and the group has not come back."""


class Group:
    def __init__(
        self, seed: int, profile: Profile | None = None, rules: Rules = RULES, *,
        draw: Callable[[random.Random], Profile] = draw_profile,
        make_log: Callable[..., ReplicaLog] = ReplicaLog,
    ) -> None:  # fmt: skip
        self.seed = seed
        self.rng = random.Random(seed)
        self.profile = profile = profile or draw(self.rng)
        self.world = World()
        self.network = SimNetwork(self.world, self._fork(), profile.network)
        self.coordinator = SimCoordinator(self.world, self._fork(), profile.coordinator)
        self.checkers = Checkers(self.world, self.coordinator, has_interval=profile.options.has_interval)
        self.story: list[str] = []
        self._readers = random.Random(seed + 1)  # its own: readers change nothing that others draw
        self._tickets = 0
        self._has_clients = True
        self._is_busy = True
        self.faults = Faults(
            profile, self.rng, self.world, network=self.network, coordinator=self.coordinator,
            checkers=self.checkers, tell=self.tell,
        )  # fmt: skip
        self.coordinator.changed = self.faults.record_changed
        peers: dict[LogId, SimNode] = {}
        for ordinal in range(profile.nodes):
            node = SimNode(
                f"n{ordinal}", ordinal, world=self.world, network=self.network, coordinator=self.coordinator,
                rng=self._fork(), options=profile.options, rules=rules, make_log=make_log,
            )  # fmt: skip
            peers.update(node.peers)
            node.peers = peers
            node.rate = 1.0 + self.rng.uniform(-profile.drift, profile.drift)
            node.disk.sync = profile.sync
            node.watcher = self.checkers
            self.checkers.nodes.append(node)

    @property
    def nodes(self) -> list[SimNode]:
        return self.checkers.nodes

    @property
    def counts(self) -> Counts:
        return self.checkers.counts

    def _fork(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    def run(self) -> Counts:
        """The whole run. *Errors*: Violated, NotLive; InvariantBroken from a core."""
        self.run_faults()
        self.faults.end()
        self._settle()
        self.check_live()
        return self.counts

    def run_faults(self) -> Counts:
        """The part of a run that has faults, alone."""
        self.begin()
        self.world.run(self.profile.seconds)
        return self.counts

    def begin(self) -> None:
        """Start nodes, clients and faults; the world is the caller's to run."""
        profile = self.profile
        for node in self.nodes:
            self.world.at(self.rng.uniform(0, 0.3), node.start)
        self._every(
            profile.write_every, lambda: self._write() if self._has_clients and self._is_busy else None
        )
        self._every(0.7, self._toggle_load)
        self._every(profile.read_every, self._read)
        self._every(0.5, self._note_rebuilt)
        self.world.at(FAULTS_FROM, self.faults.keep_striking)

    def _every(self, period: float, call: Callable[[], None]) -> None:
        def again() -> None:
            call()
            self.world.at(self.rng.uniform(0.5, 1.5) * period, again)

        self.world.at(period, again)

    # Clients.

    def _toggle_load(self) -> None:
        """Clients write now and then, so that some epochs hold next to nothing."""
        self._is_busy = self.rng.random() >= self.profile.idle

    def stop_clients(self) -> None:
        self._has_clients = False

    def _write(self) -> None:
        """At every node that believes to be master."""
        options = self.profile.options
        for node in self.nodes:
            state = node.state
            if state is None or state.mastery is None:
                continue
            self._tickets += 1
            ticket = self._tickets
            log = node.folder.log
            entries = [
                log.entry(0, self.rng.getrandbits(40) + 1) for _ in range(self.rng.choice((1, 1, 1, 3)))
            ]
            is_interval = options.has_interval and self.rng.random() < 0.5
            least = self.rng.choice((1, options.largest_min_in_sync))
            end = log.written + sum(entry.size for entry in entries)
            self.checkers.written[ticket] = Promise(end, is_interval, least)
            if not node.write(entries, ticket, least, is_interval=is_interval):
                self.checkers.written.pop(ticket, None)

    def _read(self) -> None:
        for node in self.nodes:
            for position, seen in node.answered_reads():
                self.checkers.read(node, position, seen)
            node.read(max(self.checkers.seen, self.checkers.seen_written))
        self._read_anywhere()

    def _read_anywhere(self) -> None:
        """Each reader at some replica, where it was not before; some of them have just been told of a write."""
        checkers, rng = self.checkers, self._readers
        for reader in range(READERS):
            if rng.random() < 0.3:
                checkers.shown[reader] = max(checkers.shown[reader], checkers.seen)
            node = rng.choice(self.nodes)
            position = node.read_here(checkers.shown[reader])
            if position is not None:
                checkers.read_at_standby(node, reader, position)

    def _note_rebuilt(self) -> None:
        for node in self.nodes:
            if self.rng.random() < 0.5:
                node.note_rebuilt()

    def tell(self, what: str) -> None:
        """A line of the story that a failing seed prints."""
        self.story.append(f"{self.world.now:8.3f} {what}")

    # The end.

    def _settle(self) -> None:
        """Until nothing of the faults is on its way any more and the group is whole, or its time is over."""
        profile, now = self.profile, self.world.now
        limit = now + 6.0 + 8 * profile.options.timing.lease_ttl
        self.world.run(now + max(profile.network.latest, profile.coordinator.latest))
        end = None
        while self.world.now < limit and not self._is_whole(end):
            end = max(node.folder.log.written for node in self.nodes)
            self.world.run(min(self.world.now + 0.5, limit))

    def _is_whole(self, end: int | None) -> bool:
        """One master, all in sync, and everyone knows for committed what was anywhere a moment ago."""
        record = self.coordinator.record
        states = [node.state for node in self.nodes if node.state is not None]
        return (
            record is not None
            and end is not None
            and record.in_sync == {node.folder.log_id for node in self.nodes}
            and sum(state.role is Role.MASTER for state in states) == 1
            and len(states) == len(self.nodes)
            and all(state.committed >= end for state in states)
            and not self.faults.is_anybody_stopping
        )

    def _accept_loss(self) -> bool:
        """Where the rules wait for a person: nobody in sync is left who may stand. The longest log is chosen."""
        record = self.coordinator.record
        alive = {node.folder.log_id: node for node in self.nodes}
        if record is None or any(
            log_id in alive and not alive[log_id].folder.meta.is_unclean for log_id in record.in_sync
        ):
            return False
        if record.in_sync <= alive.keys():
            return False
        standbys = [n for n in self.nodes if n.state is not None and n.state.role is not Role.BLANK]
        if standbys:
            best = max(
                standbys, key=lambda node: (node.folder.log_id in record.in_sync, node.folder.log.written)
            )
            self.tell(f"data loss is accepted for {best.name}")
            best.feed(ev.DataLossAccepted("the simulation"))
        return True

    def check_live(self) -> None:
        """One master, all in sync, logs and maps equal, clients served, nothing acknowledged missing."""
        if self._accept_loss():
            if not any(n.state is not None and n.state.role is not Role.BLANK for n in self.nodes):
                return
            self._settle()
        record = self.coordinator.record
        alive = {node.folder.log_id for node in self.nodes}
        if record is None:
            raise NotLive("there is no record")
        masters = [n for n in self.nodes if n.state is not None and n.state.role is Role.MASTER]
        if len(masters) != 1:
            raise NotLive(f"{len(masters)} masters")
        if record.in_sync != alive:
            raise NotLive(f"in sync are {sorted(record.in_sync)}, alive {sorted(alive)}")
        self.stop_clients()
        self.world.run(self.world.now + 1.0)
        acknowledged, reads = self.counts.acknowledged, self.counts.reads
        self._write()
        self.world.run(self.world.now + 1.0)
        if self.counts.acknowledged <= acknowledged or self.counts.reads <= reads:
            raise NotLive("no write is acknowledged, or no read answered")
        self._check_equal(masters[0])

    def _check_equal(self, master: SimNode) -> None:
        log = master.folder.log
        for node in self.nodes:
            other = node.folder.log
            assert node.state is not None, "checked to be alive"
            behind = node.state.committed < self.checkers.committed.end
            if behind or other.chain_at(self.checkers.committed.end) != log.chain_at(
                self.checkers.committed.end
            ):
                raise NotLive(f"{node.name} is not equal to {master.name} once quiet")
        self._check_maps()

    def _check_maps(self) -> None:
        """SameView: by key, all replicas hold what is committed; read from what their logs and folders hold."""
        end = self.checkers.committed.end
        expected = self.checkers.committed_map(end)
        for node in self.nodes:
            found = node.map(end)
            differing = sorted(key for key in expected | found if expected.get(key) != found.get(key))
            if differing:
                story = ", ".join(f"{k!r}: {found.get(k)!r}, not {expected.get(k)!r}" for k in differing[:3])
                raise Violated("SameView", f"{node.name} holds {story}", self.world.now)


def simulate(
    seed: int, *, draw: Callable[[random.Random], Profile] = draw_profile,
    make_log: Callable[..., ReplicaLog] = ReplicaLog,
) -> Counts:  # fmt: skip
    """One run. *Errors*: Violated or NotLive, with the story of its faults as notes."""
    group = Group(seed, draw=draw, make_log=make_log)
    with telling(group.story, seed):
        return group.run()
