"""What goes wrong in a simulated group, when, and for whom: one method for each kind of fault.

The fault model stands at the head of ``group``. Faults come at random, and gather where the rules are tried: half of
them hit the master, many follow a change of the record at once.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from firn_sim.checkers import Checkers
from firn_sim.coordinator import CoordinatorFaults, SimCoordinator
from firn_sim.network import NetworkFaults, SimNetwork
from firn_sim.node import Options, SimNode
from firn_sim.stopping import OrderlyStop
from firn_sim.world import World

from firn_node.replication import events as ev
from firn_node.replication.record import GroupRecord, LogId
from firn_node.replication.state import Role, Timing


@dataclass(slots=True)
class Profile:
    """How a run goes. ``weights``: how often each kind of fault happens, relative to the others."""

    nodes: int = 3  # two, too, for mutations
    seconds: float = 25.0  # with faults
    fault_every: float = 1.2
    fault_after_change: float = 0.3  # probability that a change of in_sync or master is followed by one
    at_master: float = 0.5  # share of the faults that hit the master
    down_for: tuple[float, ...] = (
        0.1,
        1.0,
        5.0,
    )  # one of them, times 0.2 to 2, before a dead process starts again
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
    "forgotten", "topics", "leave", "remove",
)  # fmt: skip
PLANNED = ("handover",)  # no fault, and in no mixture that is drawn


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


def draw_failovers(rng: random.Random) -> Profile:
    """A run that loses one master after the other, beside less of everything else."""
    profile = draw_profile(rng)
    profile.seconds = 100.0
    profile.nodes = rng.choice((3, 3, 3, 4))
    profile.at_master = 0.95
    profile.fault_every, profile.fault_after_change = 0.6, rng.choice((0.3, 0.5))
    profile.down_for = (0.5, 1.0, 2.0)
    profile.write_every = 0.2
    profile.options = replace(profile.options, timing=Timing(lease_ttl=1.0, replica_max_lag=0.5))
    for name in profile.weights:
        profile.weights[name] *= 0.1
    for name in ("power", "deposed", "split"):
        profile.weights[name] += rng.choice((0.0, 1.0, 2.0))
    profile.weights["kill"] += 3.0
    profile.weights["heal"] = 3.0
    return profile


FAULTS_FROM = 3.0  # seconds: by then the group is whole


class Faults:
    def __init__(
        self, profile: Profile, rng: random.Random, world: World, *, network: SimNetwork,
        coordinator: SimCoordinator, checkers: Checkers, tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.is_over = False
        self.tell = tell
        self._profile, self._rng, self._world = profile, rng, world
        self._network, self._coordinator, self._checkers = network, coordinator, checkers
        self._armed: tuple[SimNode, int] | None = None  # a deposed master and its epoch
        self._removed: dict[LogId, SimNode] = {}  # replicas that a master was asked to remove
        self._stops: dict[str, OrderlyStop] = {}  # the last one of each node

    @property
    def _nodes(self) -> list[SimNode]:
        return self._checkers.nodes

    @property
    def is_anybody_stopping(self) -> bool:
        """In order, which takes as long as a handover: it may end after the faults have."""
        return any(stop.is_under_way for stop in self._stops.values())

    def end(self) -> None:
        """Everything works from now on, and everyone is up."""
        self.tell("all faults end")
        self.is_over = True
        self._armed = None
        self._network.cuts.clear()
        self._network.faults = NetworkFaults(is_ordered=True)
        self._coordinator.faults = CoordinatorFaults()
        self._coordinator.is_down = False
        self._coordinator.unreachable.clear()
        self._coordinator.stale_for.clear()
        for node in self._nodes:
            node.disk.factor = 1.0
            node.resume()
        for log_id in sorted(self._removed):
            self._take_away(log_id)
        for node in self._nodes:
            node.start()

    def record_changed(self, old: GroupRecord | None, new: GroupRecord) -> None:
        """Faults gather where the rules are tried: after a change of ``in_sync`` or of the master."""
        self._checkers.record_changed(old, new)
        if old is None or (old.in_sync, old.master) == (new.in_sync, new.master):
            return
        self._strike_armed(new)
        if self._world.now > FAULTS_FROM and self._rng.random() < self._profile.fault_after_change:
            self._world.at(self._rng.expovariate(10.0), self.strike)

    def keep_striking(self) -> None:
        self.strike()
        self._world.at(self._rng.expovariate(1 / self._profile.fault_every), self.keep_striking)

    def strike(self) -> None:
        names = [name for name in (*FAULTS, *PLANNED) if self._profile.weights.get(name, 0.0) > 0]
        if self.is_over or not names:
            return
        name = self._rng.choices(names, [self._profile.weights[name] for name in names])[0]
        getattr(self, f"_fault_{name}")(self._victim())

    def _victim(self) -> SimNode:
        """The master, as often as the profile says, or anyone."""
        record = self._coordinator.record
        if record is not None and record.master is not None and self._rng.random() < self._profile.at_master:
            for node in self._nodes:
                if node.folder.log_id == record.master.log_id:
                    return node
        return self._rng.choice(self._nodes)

    def _restart(self, node: SimNode) -> None:
        def again() -> None:
            node.start()
            self.tell(f"{node.name} starts")

        self._world.at(self._rng.choice(self._profile.down_for) * self._rng.uniform(0.2, 2.0), again)

    def _fault_kill(self, node: SimNode) -> None:
        if node.is_up:
            self.tell(f"{node.name} is killed")
            node.kill()
            self._restart(node)

    def _fault_power(self, node: SimNode) -> None:
        if node.is_up:
            self.tell(f"{node.name} loses power")
            node.lose_power()
            self._checkers.excuse()
            self._restart(node)

    def _fault_power_all(self, node: SimNode) -> None:
        self.tell("all lose power")
        for each in self._nodes:
            each.lose_power()
            self._restart(each)
        self._checkers.excuse()

    def _fault_survivor(self, node: SimNode) -> None:
        """All in-sync nodes but one die for longer than a lease: the one must have everything."""
        record = self._coordinator.record
        if record is None:
            return
        survivor = self._rng.choice(sorted(record.in_sync))
        has_power = self._rng.random() < 0.5
        self.tell(f"all in sync but {survivor} die")
        for each in self._nodes:
            if each.folder.log_id in record.in_sync and each.folder.log_id != survivor:
                each.kill()
                if not has_power:
                    each.lose_power()
                self._world.at(
                    self._rng.uniform(1.5, 3.0) * self._profile.options.timing.lease_ttl, each.start
                )
        self._checkers.excuse()

    def _fault_deposed(self, node: SimNode) -> None:
        """It loses the coordinator, and some of the others, for longer than its lease."""
        if self.is_over:
            return
        ttl = self._profile.options.timing.lease_ttl
        self.tell(f"{node.name} loses the coordinator and some others")
        self._coordinator.unreachable.add(node.name)
        self._world.at(
            self._rng.uniform(2, 8) * ttl, lambda: self._coordinator.unreachable.discard(node.name)
        )
        for other in self._nodes:
            if other is not node and self._rng.random() < 0.5:
                links = {(node.name, other.name), (other.name, node.name)}
                self._network.cuts |= links
                self._world.at(
                    self._rng.uniform(1, 4) * ttl, partial(self._network.cuts.difference_update, links)
                )

    def _fault_split(self, node: SimNode) -> None:
        """Two sides that do not reach each other; one of them reaches the coordinator."""
        side = {each.name for each in self._nodes if each is node or self._rng.random() < 0.4}
        others = {each.name for each in self._nodes} - side
        links = {(a, b) for a in side for b in others} | {(b, a) for a in side for b in others}
        self.tell(f"{sorted(side)} lose the coordinator and {sorted(others)}")
        self._network.cuts |= links
        self._coordinator.unreachable |= side
        after = self._rng.uniform(1, 4) * self._profile.options.timing.lease_ttl
        self._world.at(after, partial(self._network.cuts.difference_update, links))
        self._world.at(after, partial(self._coordinator.unreachable.difference_update, side))

    def _fault_stale_restart(self, node: SimNode) -> None:
        """It loses power, and when it is back it is shown an old version of the record for a while."""
        if not node.is_up or self._coordinator.record is None:
            return
        ttl = self._profile.options.timing.lease_ttl
        self.tell(f"{node.name} loses power and will be shown old records")
        node.lose_power()
        self._checkers.excuse()
        self._coordinator.stale_for[node.name] = self._coordinator.old_version()
        self._world.at(self._rng.uniform(0.02, 0.5), node.start)
        self._world.at(
            self._rng.uniform(1, 3) * ttl, lambda: self._coordinator.stale_for.pop(node.name, None)
        )

    def _fault_forgotten(self, node: SimNode) -> None:
        """The others fall behind, the master is cut off, one of them is elected, takes another in, loses power
        before much of that is durable, and finds the old master still there, by an old record."""
        record = self._coordinator.record
        masters = [each for each in self._nodes if each.state is not None and each.state.role is Role.MASTER]
        if self._armed is not None or record is None or len(masters) != 1 or len(record.in_sync) < 2:
            return
        master, ttl = masters[0], self._profile.options.timing.lease_ttl
        kept = self._rng.choice([each for each in self._nodes if each is not master])
        self.tell(f"{master.name} and {kept.name} go on alone, then {master.name} is cut off")
        for other in self._nodes:
            if other not in (master, kept):
                other.pause()
                self._world.at(self._rng.uniform(1.5, 3.0) * ttl, other.resume)
        self._world.at(self._rng.uniform(0.8, 1.5) * ttl, partial(self._cut_off, master))

    def _cut_off(self, master: SimNode) -> None:
        if self.is_over:
            return
        ttl = self._profile.options.timing.lease_ttl
        self._armed = master, self._coordinator.record.epoch if self._coordinator.record is not None else 0
        self._coordinator.unreachable.add(master.name)
        for other in self._nodes:
            self._network.cuts |= {(master.name, other.name), (other.name, master.name)}
        self._world.at(8 * ttl, self._disarm)

    def _disarm(self) -> None:
        if self._armed is not None:
            self._coordinator.unreachable.discard(self._armed[0].name)
            self._armed = None

    def _strike_armed(self, new: GroupRecord) -> None:
        """The new master's disk gets slow; as soon as it has taken somebody in: the blow."""
        if self._armed is None or new.epoch <= self._armed[1] or new.master is None:
            return
        old = self._armed[0]
        for each in self._nodes:
            if each.folder.log_id != new.master.log_id:
                continue
            if len(new.in_sync) < 2:
                self._world.at(self._rng.uniform(0.02, 0.4), partial(self._slow_down, each))
            else:
                self._armed = None
                self._world.at(self._rng.expovariate(20.0), partial(self._blow, each, old))

    def _slow_down(self, node: SimNode) -> None:
        node.disk.factor = 1.0 if self.is_over else 20.0

    def _blow(self, node: SimNode, old: SimNode) -> None:
        """It loses power, and comes back where it sees the old master and the old record alone."""
        if self.is_over:
            return
        ttl = self._profile.options.timing.lease_ttl
        node.disk.factor = 1.0
        self._fault_stale_restart(node)
        others = [each for each in self._nodes if each not in (node, old)]
        links = {(node.name, each.name) for each in others} | {(each.name, node.name) for each in others}
        self._network.cuts |= links
        self._network.cuts -= {(node.name, old.name), (old.name, node.name)}
        self._world.at(2 * ttl, partial(self._network.cuts.difference_update, links))
        self._world.at(8 * ttl, lambda: self._coordinator.unreachable.discard(old.name))

    def _fault_disk(self, node: SimNode) -> None:
        """Never the last in-sync disk: there is nothing left then to keep."""
        record = self._coordinator.record
        log_id = node.folder.log_id
        if record is None:
            return
        others = {other.folder.log_id for other in self._nodes if other is not node}
        if log_id not in record.in_sync or record.in_sync & others:
            self.tell(f"{node.name} loses its disk")
            node.lose_disk()
            self._checkers.excuse()
            self._checkers.counts.rebuilds += 1
            self._restart(node)

    def _fault_damage(self, node: SimNode) -> None:
        record = self._coordinator.record
        others = {other.folder.log_id for other in self._nodes if other is not node}
        if record is not None and record.in_sync & others and self._rng.random() < 0.3:
            self.tell(f"{node.name} finds its log damaged")
            self._checkers.counts.rebuilds += 1
            node.feed(ev.LogDamaged("a bad batch below the durable end"))
            self._checkers.excuse()

    def _fault_pause(self, node: SimNode) -> None:
        if node.is_up and not node.is_paused:
            self.tell(f"{node.name} is paused")
            node.pause()
            life = node.life

            def resume() -> None:
                if node.life == life:
                    self.tell(f"{node.name} goes on")
                    node.resume()

            self._world.at(self._rng.choice((0.3, 2.0, 6.0)) * self._rng.uniform(0.5, 1.5), resume)

    def _fault_cut(self, node: SimNode) -> None:
        other = self._rng.choice([each for each in self._nodes if each is not node])
        self.tell(f"link {node.name} -> {other.name} is cut")
        self._network.cuts.add((node.name, other.name))
        if self._rng.random() < 0.5:
            self._network.cuts.add((other.name, node.name))

    def _fault_isolate(self, node: SimNode) -> None:
        way = self._rng.choice(("in", "out", "both"))
        self.tell(f"{node.name} is isolated ({way})")
        for other in self._nodes:
            if other is not node and way in ("out", "both"):
                self._network.cuts.add((node.name, other.name))
            if other is not node and way in ("in", "both"):
                self._network.cuts.add((other.name, node.name))
        if self._rng.random() < 0.3:
            self._coordinator.unreachable.add(node.name)

    def _fault_heal(self, node: SimNode) -> None:
        self.tell("the network heals")
        self._network.cuts.clear()
        self._coordinator.unreachable.clear()
        for each in self._nodes:
            each.disk.factor = 1.0

    def _fault_slow(self, node: SimNode) -> None:
        node.disk.factor = self._rng.choice((10.0, 100.0))
        self.tell(f"{node.name} has a slow disk, factor {node.disk.factor}")

    def _fault_coordinator_down(self, node: SimNode) -> None:
        self.tell("the coordinator is down")
        self._coordinator.is_down = True

        def up() -> None:
            self.tell("the coordinator is up")
            self._coordinator.is_down = False

        self._world.at(self._rng.choice((0.5, 3.0, 6.0)) * self._rng.uniform(0.5, 1.5), up)

    def _fault_coordinator_cut(self, node: SimNode) -> None:
        self.tell(f"{node.name} does not reach the coordinator")
        self._coordinator.unreachable.add(node.name)

        def reach() -> None:
            self.tell(f"{node.name} reaches the coordinator")
            self._coordinator.unreachable.discard(node.name)

        self._world.at(self._rng.choice((0.5, 3.0, 6.0)) * self._rng.uniform(0.5, 1.5), reach)

    def _fault_switchover(self, node: SimNode) -> None:
        for each in self._masters():
            self._hand_over(each)
            if self._rng.random() < 0.5:
                self._world.at(self._rng.uniform(0.0, 0.1), partial(self._fault_deposed, each))

    def _fault_handover(self, node: SimNode) -> None:
        """A switchover alone."""
        for each in self._masters():
            self._hand_over(each)

    def _masters(self) -> list[SimNode]:
        return [each for each in self._nodes if each.state is not None and each.state.role is Role.MASTER]

    def _hand_over(self, master: SimNode) -> None:
        to = self._rng.choice([other for other in self._nodes if other is not master])
        self.tell(f"{master.name} is asked to hand over to {to.name}")
        master.feed(ev.SwitchoverAsked(to.folder.log_id))

    def _fault_leave(self, node: SimNode) -> None:
        """A broker is told to stop; it comes back."""
        if node.is_up and not node.is_paused:
            self.tell(f"{node.name} is told to stop")
            self._stops[node.name] = OrderlyStop(node, self._world, self._rng, self._left)
            self._stops[node.name].begin()

    def _left(self, node: SimNode) -> None:
        self._checkers.counts.orderly_stops += 1
        if self.is_over:
            node.start()
        else:
            self.tell(f"{node.name} has stopped in order")
            self._restart(node)

    def _fault_remove(self, node: SimNode) -> None:
        """A replica is taken out of the group, and soon after its disk out of the node."""
        gone = node.folder.log_id
        for each in self._nodes:
            if each is not node and each.state is not None and each.state.role is Role.MASTER:
                self.tell(f"{each.name} is asked to remove {gone}")
                each.feed(ev.RemovalAsked(gone))
                self._checkers.counts.removals += 1
                self._removed[gone] = node
        self._world.at(self._rng.uniform(0.02, 1.0), partial(self._take_away, gone))

    def _take_away(self, log_id: LogId) -> None:
        """Not the last one in sync: who was asked to remove it is no master any more."""
        node = self._removed.get(log_id)
        if node is not None and node.folder.log_id == log_id:
            self._fault_disk(node)

    def _fault_topics(self, node: SimNode) -> None:
        """Topics come and go, and the largest minInSync with them."""
        options = self._profile.options
        changed = ev.TopicsChanged(self._rng.choice((1, 2)), options.has_interval)
        self.tell(f"the largest minInSync is {changed.largest_min_in_sync}")
        for each in self._nodes:
            each.feed(changed)

    def _fault_release(self, node: SimNode) -> None:
        log = node.folder.log
        node.release(log.written - self._rng.choice((0, 5, 30)) * log.entry_size)
