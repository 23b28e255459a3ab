"""The network of a cluster on one machine: a bridge, and a network namespace for each node.

::

    host    firn0 (10.200.0.1) ── firn0n1 ═ eth0 (10.200.0.11) of node1, its pods 10.208.1.0/24
                               └─ firn0n2 ═ eth0 (10.200.0.12) of node2, its pods 10.208.2.0/24

The zeros are the slot's number, so that clusters live side by side. Nothing is forwarded by the host itself: nodes reach
one another over the bridge, the host reaches nodes and pods, and no pod reaches anything beyond the machine.
"""

from collections.abc import Sequence
from pathlib import Path

from cluster import host
from cluster.control import Addresses


class Network:
    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.bridge = f"firn{slot}"
        self.host_address = f"10.200.{slot}.1"
        self.pods = f"10.{208 + slot}.0.0/16"
        self.dns_address = f"10.202.{slot}.10"
        self.addresses = Addresses(api=self.host_address, services=f"10.202.{slot}.0/24", pods=self.pods)

    def make(self) -> None:
        host.run("ip", "link", "add", self.bridge, "type", "bridge")
        host.run("ip", "address", "add", f"{self.host_address}/24", "dev", self.bridge)
        host.run("ip", "link", "set", self.bridge, "up")

    def node_address(self, node: int) -> str:
        return f"10.200.{self.slot}.{10 + node}"

    def node_pods(self, node: int) -> str:
        return f"10.{208 + self.slot}.{node}.0/24"

    def attach(self, node: int, init: int, others: Sequence[int]) -> None:
        """Gives the network namespace of process `init` the address of a node, and ways to the others' pods."""
        link = self._link(node)
        host.run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", init)
        host.run("ip", "link", "set", link, "master", self.bridge, "up")
        host.run("ip", "route", "add", self.node_pods(node), "via", self.node_address(node))
        commands = [
            "link set lo up",
            f"address add {self.node_address(node)}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self.host_address}",
            *(f"route add {self.node_pods(other)} via {self.node_address(other)}" for other in others),
        ]
        within = [host.program("nsenter"), f"--net=/proc/{init}/ns/net"]
        host.run(*within, host.program("ip"), "-batch", "-", input="\n".join(commands))
        host.run(*within, host.program("sysctl"), "-qw", "net.ipv4.ip_forward=1")

    def remove(self) -> None:
        """The bridge, the links of nodes that are left, and with them every route."""
        for link in sorted(Path("/sys/class/net").iterdir()):
            if link.name == self.bridge or link.name.startswith(f"{self.bridge}n"):
                host.run("ip", "link", "delete", link.name, check=False)

    def cut(self, node: int) -> None:
        """The node hears nobody and nobody hears it; its pods still reach one another."""
        host.run("ip", "link", "set", self._link(node), "down")

    def heal(self, node: int) -> None:
        host.run("ip", "link", "set", self._link(node), "up")

    def _link(self, node: int) -> str:
        return f"{self.bridge}n{node}"
