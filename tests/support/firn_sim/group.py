"""A simulated group of three to five nodes: one seed, one run.

The fault model. Of the network: every message may be lost, late by seconds, out of order, doubled; links are cut
in one direction or both, singly or all of a node. Of a node: its process is killed (the page cache stays), its
machine loses power (any prefix of what was not synced stays), its disk is lost (it comes back empty, under the
same name), it is paused for longer than a lease and goes on where it was; its clock runs up to 20 % fast or
slow; its disk is slow by a factor of up to 100. Of the coordinator: down, unreachable for one node, requests
lost or applied seconds later, answers lost, reads stale, success reported as conflict. All at any moment, in any
combination, from the seed alone. With ``FirnLog`` the node's log is the broker's own above ``SimDisk``, which
adds torn and half-written sectors.

Not in it: a disk that forgets what it has synced under its log_id, the last in-sync disk lost, two processes of
one folder.

``Profile`` says how much of what; every run draws its own from the seed. At the end all faults stop, and the
group must be whole again: one master, all nodes in sync, logs equal, writes and reads served.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from firn_sim.checkers import Checkers, Counts
from firn_sim.coordinator import CoordinatorFaults, SimCoordinator
from firn_sim.network import NetworkFaults, SimNetwork
from firn_sim.node import Options, SimNode
from firn_sim.replicalog import ReplicaLog
from firn_sim.world import World

from firn_node.replication import events as ev
from firn_node.replication.record import GroupRecord, LogId
from firn_node.replication.rules import RULES, Rules
from firn_node.replication.state import Role, Timing


@dataclass(slots=True)
class Profile:
    """How a run goes. ``weights``: how often each kind of fault happens, relative to the others."""

    nodes: int = 3  # two, too, for mutations
    seconds: float = 25.0  # with faults
    fault_every: float = 1.2
    fault_after_change: float = 0.3  # probability that a change of in_sync or master is followed by one
    write_every: float = 0.15
    read_every: float = 0.1
    idle: float = 0.3  # share of the time in which nobody writes
    drift: float = 0.1
    sync: tuple[float, float] = (0.0005, 0.01)
    network: NetworkFaults = field(default_factory=NetworkFaults)
    coordinator: CoordinatorFaults = field(default_factory=CoordinatorFaults)
    weights: dict[str, float] = field(default_factory=dict)
    options: Options = field(default_factory=Options)


FAULTS = (
    "kill", "power", "power_all", "survivor", "disk", "damage", "pause", "slow", "release",
    "cut", "isolate", "split", "heal", "coordinator_down", "coordinator_cut", "deposed", "stale_restart", "switchover",
    "forgotten", "topics",
)  # fmt: skip


def draw_profile(rng: random.Random) -> Profile:
    """A run's own mixture of faults: many seeds lack some kinds altogether, so that others show."""
    weights = {name: rng.choice((0.0, 1.0, 1.0, 3.0)) for name in FAULTS}
    weights["heal"] = 2.0
    weights["power_all"] *= 0.3
    is_bad_network = rng.random() < 0.5
    network = NetworkFaults(
        loss=rng.choice((0.0, 0.02, 0.1)) if is_bad_network else 0.0,
        late=rng.choice((0.0, 0.01, 0.05)) if is_bad_network else 0.0,
        doubled=rng.choice((0.0, 0.02)) if is_bad_network else 0.0,
        is_ordered=rng.random() < 0.6,
    )
    is_bad_coordinator = rng.random() < 0.5
    coordinator = CoordinatorFaults()
    if is_bad_coordinator:
        coordinator.lost_request = rng.choice((0.0, 0.1, 0.3))
        coordinator.lost_answer = rng.choice((0.0, 0.1, 0.3))
        coordinator.late_request = rng.choice((0.0, 0.1, 0.3))
        coordinator.stale_read = rng.choice((0.0, 0.1, 0.3))
        coordinator.hidden_success = rng.choice((0.0, 0.1))
    return Profile(
        nodes=rng.choice((3, 3, 3, 4, 5)),
        fault_every=rng.choice((0.6, 1.2, 2.5)),
        fault_after_change=rng.choice((0.0, 0.3, 0.6)),
        drift=rng.choice((0.0, 0.1, 0.2)),
        sync=rng.choice(((0.0005, 0.01), (0.01, 0.1))),
        network=network,
        coordinator=coordinator,
        weights=weights,
        options=Options(
            timing=rng.choice((Timing(), Timing(lease_ttl=1.0, replica_max_lag=0.5))),
            has_interval=rng.random() < 0.4,
            largest_min_in_sync=rng.choice((1, 1, 2)),
        ),
    )


FAULTS_FROM = 3.0  # seconds: by then the group is whole


class NotLive(AssertionError):
    """The faults have stopped, and the group has not come back."""


class Group:
    def __init__(
        self, seed: int, profile: Profile | None = None, rules: Rules = RULES,
        make_log: Callable[..., ReplicaLog] = ReplicaLog,
    ) -> None:  # fmt: skip
        self.seed = seed
        self.rng = random.Random(seed)
        self.profile = profile = profile or draw_profile(self.rng)
        self.world = World()
        self.network = SimNetwork(self.world, self._fork(), profile.network)
        self.coordinator = SimCoordinator(self.world, self._fork(), profile.coordinator)
        self.checkers = Checkers(self.world, self.coordinator, has_interval=profile.options.has_interval)
        self.story: list[str] = []
        self.coordinator.changed = self._record_changed
        self._armed: tuple[SimNode, int] | None = None  # a deposed master and its epoch
        self._tickets = 0
        self._is_faulty = True
        self._has_clients = True
        self._is_busy = True
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
        self._heal_all()
        self._settle()
        self._check_live()
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
        self.world.at(FAULTS_FROM, self._next_fault)

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
            self.checkers.written[ticket] = (end, is_interval)
            if not node.write(entries, ticket, least, is_interval=is_interval):
                self.checkers.written.pop(ticket, None)

    def _read(self) -> None:
        for node in self.nodes:
            for position, seen in node.answered_reads():
                self.checkers.read(node, position, seen)
            node.read(self.checkers.seen)

    def _note_rebuilt(self) -> None:
        for node in self.nodes:
            if self.rng.random() < 0.5:
                node.note_rebuilt()

    # Faults.

    def tell(self, what: str) -> None:
        """A line of the story that a failing seed prints."""
        self.story.append(f"{self.world.now:8.3f} {what}")

    def _record_changed(self, old: GroupRecord | None, new: GroupRecord) -> None:
        """Faults gather where the rules are tried: after a change of ``in_sync`` or of the master."""
        self.checkers.record_changed(old, new)
        if old is None or (old.in_sync, old.master) == (new.in_sync, new.master):
            return
        self._strike_armed(new)
        if self.world.now > FAULTS_FROM and self.rng.random() < self.profile.fault_after_change:
            self.world.at(self.rng.expovariate(10.0), self._fault)

    def _next_fault(self) -> None:
        self._fault()
        self.world.at(self.rng.expovariate(1 / self.profile.fault_every), self._next_fault)

    def _fault(self) -> None:
        names = [name for name in FAULTS if self.profile.weights.get(name, 0.0) > 0]
        if not self._is_faulty or not names:
            return
        name = self.rng.choices(names, [self.profile.weights[name] for name in names])[0]
        getattr(self, f"_fault_{name}")(self._victim())

    def _victim(self) -> SimNode:
        """Half of the time the master."""
        record = self.coordinator.record
        if record is not None and record.master is not None and self.rng.random() < 0.5:
            for node in self.nodes:
                if node.folder.log_id == record.master.log_id:
                    return node
        return self.rng.choice(self.nodes)

    def _restart(self, node: SimNode) -> None:
        def again() -> None:
            node.start()
            self.tell(f"{node.name} starts")

        self.world.at(self.rng.choice((0.1, 1.0, 5.0)) * self.rng.uniform(0.2, 2.0), again)

    def _fault_kill(self, node: SimNode) -> None:
        if node.is_up:
            self.tell(f"{node.name} is killed")
            node.kill()
            self._restart(node)

    def _fault_power(self, node: SimNode) -> None:
        if node.is_up:
            self.tell(f"{node.name} loses power")
            node.lose_power()
            self.checkers.excuse()
            self._restart(node)

    def _fault_power_all(self, node: SimNode) -> None:
        self.tell("all lose power")
        for each in self.nodes:
            each.lose_power()
            self._restart(each)
        self.checkers.excuse()

    def _fault_survivor(self, node: SimNode) -> None:
        """All in-sync nodes but one die for longer than a lease: the one must have everything."""
        record = self.coordinator.record
        if record is None:
            return
        survivor = self.rng.choice(sorted(record.in_sync))
        has_power = self.rng.random() < 0.5
        self.tell(f"all in sync but {survivor} die")
        for each in self.nodes:
            if each.folder.log_id in record.in_sync and each.folder.log_id != survivor:
                each.kill()
                if not has_power:
                    each.lose_power()
                self.world.at(self.rng.uniform(1.5, 3.0) * self.profile.options.timing.lease_ttl, each.start)
        self.checkers.excuse()

    def _fault_deposed(self, node: SimNode) -> None:
        """It loses the coordinator, and some of the others, for longer than its lease."""
        ttl = self.profile.options.timing.lease_ttl
        self.tell(f"{node.name} loses the coordinator and some others")
        self.coordinator.unreachable.add(node.name)
        self.world.at(self.rng.uniform(2, 8) * ttl, lambda: self.coordinator.unreachable.discard(node.name))
        for other in self.nodes:
            if other is not node and self.rng.random() < 0.5:
                links = {(node.name, other.name), (other.name, node.name)}
                self.network.cuts |= links
                self.world.at(
                    self.rng.uniform(1, 4) * ttl, partial(self.network.cuts.difference_update, links)
                )

    def _fault_split(self, node: SimNode) -> None:
        """Two sides that do not reach each other; one of them reaches the coordinator."""
        side = {each.name for each in self.nodes if each is node or self.rng.random() < 0.4}
        others = {each.name for each in self.nodes} - side
        links = {(a, b) for a in side for b in others} | {(b, a) for a in side for b in others}
        self.tell(f"{sorted(side)} lose the coordinator and {sorted(others)}")
        self.network.cuts |= links
        self.coordinator.unreachable |= side
        after = self.rng.uniform(1, 4) * self.profile.options.timing.lease_ttl
        self.world.at(after, partial(self.network.cuts.difference_update, links))
        self.world.at(after, partial(self.coordinator.unreachable.difference_update, side))

    def _fault_stale_restart(self, node: SimNode) -> None:
        """It loses power, and when it is back it is shown an old version of the record for a while."""
        if not node.is_up or self.coordinator.record is None:
            return
        ttl = self.profile.options.timing.lease_ttl
        self.tell(f"{node.name} loses power and will be shown old records")
        node.lose_power()
        self.checkers.excuse()
        self.coordinator.stale_for[node.name] = self.coordinator.old_version()
        self.world.at(self.rng.uniform(0.02, 0.5), node.start)
        self.world.at(self.rng.uniform(1, 3) * ttl, lambda: self.coordinator.stale_for.pop(node.name, None))

    def _fault_forgotten(self, node: SimNode) -> None:
        """The others fall behind, the master is cut off, one of them is elected, takes another in, loses power
        before much of that is durable, and finds the old master still there, by an old record."""
        record = self.coordinator.record
        masters = [each for each in self.nodes if each.state is not None and each.state.role is Role.MASTER]
        if self._armed is not None or record is None or len(masters) != 1 or len(record.in_sync) < 2:
            return
        master, ttl = masters[0], self.profile.options.timing.lease_ttl
        kept = self.rng.choice([each for each in self.nodes if each is not master])
        self.tell(f"{master.name} and {kept.name} go on alone, then {master.name} is cut off")
        for other in self.nodes:
            if other not in (master, kept):
                other.pause()
                self.world.at(self.rng.uniform(1.5, 3.0) * ttl, other.resume)
        self.world.at(self.rng.uniform(0.8, 1.5) * ttl, partial(self._cut_off, master))

    def _cut_off(self, master: SimNode) -> None:
        ttl = self.profile.options.timing.lease_ttl
        self._armed = master, self.coordinator.record.epoch if self.coordinator.record is not None else 0
        self.coordinator.unreachable.add(master.name)
        for other in self.nodes:
            self.network.cuts |= {(master.name, other.name), (other.name, master.name)}
        self.world.at(8 * ttl, self._disarm)

    def _disarm(self) -> None:
        if self._armed is not None:
            self.coordinator.unreachable.discard(self._armed[0].name)
            self._armed = None

    def _strike_armed(self, new: GroupRecord) -> None:
        """The new master's disk gets slow; as soon as it has taken somebody in: the blow."""
        if self._armed is None or new.epoch <= self._armed[1] or new.master is None:
            return
        old = self._armed[0]
        for each in self.nodes:
            if each.folder.log_id != new.master.log_id:
                continue
            if len(new.in_sync) < 2:
                self.world.at(self.rng.uniform(0.02, 0.4), partial(setattr, each.disk, "factor", 20.0))
            else:
                self._armed = None
                self.world.at(self.rng.expovariate(20.0), partial(self._blow, each, old))

    def _blow(self, node: SimNode, old: SimNode) -> None:
        """It loses power, and comes back where it sees the old master and the old record alone."""
        ttl = self.profile.options.timing.lease_ttl
        node.disk.factor = 1.0
        self._fault_stale_restart(node)
        others = [each for each in self.nodes if each not in (node, old)]
        links = {(node.name, each.name) for each in others} | {(each.name, node.name) for each in others}
        self.network.cuts |= links
        self.network.cuts -= {(node.name, old.name), (old.name, node.name)}
        self.world.at(2 * ttl, partial(self.network.cuts.difference_update, links))
        self.world.at(8 * ttl, lambda: self.coordinator.unreachable.discard(old.name))

    def _fault_disk(self, node: SimNode) -> None:
        """Never the last in-sync disk: there is nothing left then to keep."""
        record = self.coordinator.record
        log_id = node.folder.log_id
        if record is None:
            return
        others = {other.folder.log_id for other in self.nodes if other is not node}
        if log_id not in record.in_sync or record.in_sync & others:
            self.tell(f"{node.name} loses its disk")
            node.lose_disk()
            self.checkers.excuse()
            self.checkers.counts.rebuilds += 1
            self._restart(node)

    def _fault_damage(self, node: SimNode) -> None:
        record = self.coordinator.record
        others = {other.folder.log_id for other in self.nodes if other is not node}
        if record is not None and record.in_sync & others and self.rng.random() < 0.3:
            self.tell(f"{node.name} finds its log damaged")
            self.checkers.counts.rebuilds += 1
            node.feed(ev.LogDamaged("a bad batch below the durable end"))
            self.checkers.excuse()

    def _fault_pause(self, node: SimNode) -> None:
        if node.is_up and not node.is_paused:
            self.tell(f"{node.name} is paused")
            node.pause()
            life = node.life

            def resume() -> None:
                if node.life == life:
                    self.tell(f"{node.name} goes on")
                    node.resume()

            self.world.at(self.rng.choice((0.3, 2.0, 6.0)) * self.rng.uniform(0.5, 1.5), resume)

    def _fault_cut(self, node: SimNode) -> None:
        other = self.rng.choice([each for each in self.nodes if each is not node])
        self.tell(f"link {node.name} -> {other.name} is cut")
        self.network.cuts.add((node.name, other.name))
        if self.rng.random() < 0.5:
            self.network.cuts.add((other.name, node.name))

    def _fault_isolate(self, node: SimNode) -> None:
        way = self.rng.choice(("in", "out", "both"))
        self.tell(f"{node.name} is isolated ({way})")
        for other in self.nodes:
            if other is not node and way in ("out", "both"):
                self.network.cuts.add((node.name, other.name))
            if other is not node and way in ("in", "both"):
                self.network.cuts.add((other.name, node.name))
        if self.rng.random() < 0.3:
            self.coordinator.unreachable.add(node.name)

    def _fault_heal(self, node: SimNode) -> None:
        self.tell("the network heals")
        self.network.cuts.clear()
        self.coordinator.unreachable.clear()
        for each in self.nodes:
            each.disk.factor = 1.0

    def _fault_slow(self, node: SimNode) -> None:
        node.disk.factor = self.rng.choice((10.0, 100.0))
        self.tell(f"{node.name} has a slow disk, factor {node.disk.factor}")

    def _fault_coordinator_down(self, node: SimNode) -> None:
        self.tell("the coordinator is down")
        self.coordinator.is_down = True

        def up() -> None:
            self.tell("the coordinator is up")
            self.coordinator.is_down = False

        self.world.at(self.rng.choice((0.5, 3.0, 6.0)) * self.rng.uniform(0.5, 1.5), up)

    def _fault_coordinator_cut(self, node: SimNode) -> None:
        self.tell(f"{node.name} does not reach the coordinator")
        self.coordinator.unreachable.add(node.name)

        def reach() -> None:
            self.tell(f"{node.name} reaches the coordinator")
            self.coordinator.unreachable.discard(node.name)

        self.world.at(self.rng.choice((0.5, 3.0, 6.0)) * self.rng.uniform(0.5, 1.5), reach)

    def _fault_switchover(self, node: SimNode) -> None:
        for each in self.nodes:
            if each.state is not None and each.state.role is Role.MASTER:
                to = self.rng.choice([other for other in self.nodes if other is not each])
                self.tell(f"{each.name} is asked to hand over to {to.name}")
                each.feed(ev.SwitchoverAsked(to.folder.log_id))
                if self.rng.random() < 0.5:
                    self.world.at(self.rng.uniform(0.0, 0.1), partial(self._fault_deposed, each))

    def _fault_topics(self, node: SimNode) -> None:
        """Topics come and go, and the largest minInSync with them."""
        options = self.profile.options
        changed = ev.TopicsChanged(self.rng.choice((1, 2)), options.has_interval)
        self.tell(f"the largest minInSync is {changed.largest_min_in_sync}")
        for each in self.nodes:
            each.feed(changed)

    def _fault_release(self, node: SimNode) -> None:
        log = node.folder.log
        node.release(log.written - self.rng.choice((0, 5, 30)) * log.entry_size)

    # The end.

    def _heal_all(self) -> None:
        self.tell("all faults end")
        self._is_faulty = False
        self.network.cuts.clear()
        self.network.faults = NetworkFaults(is_ordered=True)
        self.coordinator.faults = CoordinatorFaults()
        self.coordinator.is_down = False
        self.coordinator.unreachable.clear()
        self.coordinator.stale_for.clear()
        for node in self.nodes:
            node.disk.factor = 1.0
            node.resume()
            if not node.is_up:
                node.start()

    def _settle(self) -> None:
        self.world.run(self.world.now + 6.0 + 8 * self.profile.options.timing.lease_ttl)

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

    def _check_live(self) -> None:
        """One master, all in sync, logs equal, clients served, nothing acknowledged missing."""
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


def simulate(
    seed: int, *, rules: Rules = RULES, profile: Profile | None = None,
    make_log: Callable[..., ReplicaLog] = ReplicaLog,
) -> Counts:  # fmt: skip
    """One run. *Errors*: Violated or NotLive, with the story of its faults as notes."""
    group = Group(seed, profile, rules, make_log)
    try:
        return group.run()
    except Exception as error:
        for line in group.story[-30:]:
            error.add_note(line)
        error.add_note(f"seed {seed}")
        raise
