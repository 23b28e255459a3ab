"""NetworkPolicies enforced by the nodes, as far as tests need it: kube-proxy does nothing about them.

For each pod that a policy of its namespace selects for ingress, its node lets through what that policy's rules name, and
drops the rest. Every packet to a pod passes the node's forwarding (`Node._cni`), but for those of the node itself, which
Kubernetes lets through in any case. What is enforced are policies and pods as they were at the call: a pod that
comes later is open until the next one.

*Errors*: `NotImplementedError` for what is not understood here (egress, ranges of addresses, expressions), so that no
test believes in a rule that nobody enforces.
"""

from collections.abc import Iterator

from cluster.api import Api, Json
from cluster.node import Node

_TABLE = "firn_policies"


def enforce(api: Api, nodes: list[Node]) -> None:
    pods = [pod for pod in api.get("/api/v1/pods")["items"] if pod["status"].get("podIP")]
    policies = api.get("/apis/networking.k8s.io/v1/networkpolicies")["items"]
    for node in nodes:
        here = [pod for pod in pods if pod["spec"].get("nodeName") == node.name]
        lines = [line for pod in here for line in _lines(pod, policies, pods)]
        node.run("nft", "-f", "-", input=_table(lines))


def lift(nodes: list[Node]) -> None:
    for node in nodes:
        node.run("nft", "-f", "-", input=f"table ip {_TABLE}\ndelete table ip {_TABLE}\n")


def _table(lines: list[str]) -> str:
    """One transaction: there is no moment without the table. Ahead of it the addresses of Services are translated."""
    inner = "\n".join(lines)
    return f"""table ip {_TABLE}
delete table ip {_TABLE}
table ip {_TABLE} {{
chain forward {{
type filter hook forward priority 10; policy accept;
ct state established,related accept
{inner}
}}
}}
"""


def _lines(pod: Json, policies: list[Json], pods: list[Json]) -> Iterator[str]:
    namespace, address = pod["metadata"]["namespace"], pod["status"]["podIP"]
    mine = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == namespace and _selects(policy["spec"]["podSelector"], pod)
    ]
    for spec in mine:
        if spec["policyTypes"] != ["Ingress"]:
            raise NotImplementedError(f"policyTypes {spec['policyTypes']}")
        for rule in spec.get("ingress", []):
            for source in _sources(rule, namespace, pods):
                for port in rule.get("ports") or [{}]:
                    yield f"ip daddr {address} {source} {_port(port, pod)} accept"
    if mine:
        yield f"ip daddr {address} drop"


def _sources(rule: Json, namespace: str, pods: list[Json]) -> Iterator[str]:
    """What a packet's sender has to be; nothing: anybody."""
    if not rule.get("from"):
        yield ""
    for peer in rule.get("from") or []:
        if peer.keys() != {"podSelector"}:
            raise NotImplementedError(f"a peer by {sorted(peer)}")
        for pod in pods:
            if pod["metadata"]["namespace"] == namespace and _selects(peer["podSelector"], pod):
                yield f"ip saddr {pod['status']['podIP']}"


def _port(port: Json, pod: Json) -> str:
    wanted, protocol = port.get("port"), port.get("protocol", "TCP").lower()
    if wanted is None:
        return ""
    if isinstance(wanted, str):
        named = [each for container in pod["spec"]["containers"] for each in container.get("ports", [])]
        wanted = next(each["containerPort"] for each in named if each.get("name") == wanted)
    return f"{protocol} dport {wanted}"


def _selects(selector: Json, pod: Json) -> bool:
    if selector.keys() - {"matchLabels"}:
        raise NotImplementedError(f"a selector by {sorted(selector)}")
    labels = pod["metadata"].get("labels", {})
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
