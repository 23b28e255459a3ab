"""The control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, and how each is told to run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cluster import kubeconfig
from cluster.api import Api
from cluster.pki import Authority, Signed, write_token_keys
from cluster.processes import Processes, free_ports, is_listening, wait_until
from cluster.tools import tool

SERVICE_DOMAIN = "cluster.local"
# One line for each request, when it has been answered; with the body of what was written, so that a test can say
# who wrote what. Reading, watching and the renewals of Leases would make most of the file: no bodies for them.
_AUDIT_POLICY: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "omitManagedFields": True,
    "rules": [
        {"level": "None", "nonResourceURLs": ["/readyz*", "/livez*", "/healthz*"]},
        {
            "level": "Metadata",
            "resources": [{"group": "", "resources": ["secrets", "serviceaccounts/token"]}],
        },
        {"level": "Metadata", "resources": [{"group": "coordination.k8s.io"}]},
        {"level": "Request", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
        {"level": "Metadata"},
    ],
}


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the API is reached, and the ranges that a cluster hands out."""

    api: str = "127.0.0.1"
    services: str = "10.202.0.0/24"
    pods: str = ""  # none: a control plane without nodes

    @property
    def api_service(self) -> str:
        """The address of the Service `kubernetes`: the first of the range."""
        return self.services.split("/")[0].rsplit(".", 1)[0] + ".1"


class ControlPlane:
    """etcd and the API server, and on demand the rest; the files of `folder` are this one's alone."""

    def __init__(self, folder: Path, processes: Processes, addresses: Addresses) -> None:
        self.folder, self.processes, self.addresses = folder, processes, addresses
        self.authority = Authority(folder / "pki")
        self.audit_log = folder / "audit.log"
        self._tokens = write_token_keys(folder / "pki")
        self._port = 0
        self._etcd_ports: list[int] = []

    @property
    def url(self) -> str:
        return f"https://{self.addresses.api}:{self._port}"

    def kubeconfig(self, user: str, *, organization: str = "") -> Path:
        """A kubeconfig for a user known by a certificate."""
        signed = self.authority.sign(user, organization=organization)
        return kubeconfig.write(
            self.folder / f"{user.rsplit(':', 1)[-1]}.kubeconfig",
            server=self.url,
            authority=self.authority.certificate,
            user=kubeconfig.by_certificate(signed.certificate, signed.key),
        )

    def start(self) -> Path:
        """The administrator's kubeconfig; the API answers on return."""
        self._port, *self._etcd_ports = free_ports(3)
        self.start_etcd()
        self.start_api_server()
        return self.folder / "admin.kubeconfig"

    def start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in self._etcd_ports)
        etcd = self.processes.start(
            "etcd",
            [
                tool("etcd"),
                *_flags(
                    data_dir=self.folder / "etcd",
                    listen_client_urls=client,
                    advertise_client_urls=client,
                    listen_peer_urls=peer,
                    initial_advertise_peer_urls=peer,
                    initial_cluster=f"default={peer}",
                    log_level="warn",
                ),
                "--unsafe-no-fsync",  # a test cluster need not outlive the machine
            ],
        )
        wait_until(lambda: is_listening(self._etcd_ports[0]), "etcd listens", by=[etcd])

    def start_api_server(self) -> None:
        """Also after `stop_api_server`: the same address, the same data."""
        server = self.processes.start("kube-apiserver", [tool("kube-apiserver"), *self._api_server_flags()])
        admin = Api.of(self.kubeconfig("admin", organization="system:masters"))
        etcd = self.processes.named("etcd")
        wait_until(admin.is_ready, "the API server is ready", by=[server, etcd])

    def stop_api_server(self) -> None:
        self.processes.stop("kube-apiserver")

    def start_controllers(self, only: Sequence[str] = ("*",)) -> None:
        """kube-controller-manager; `only` names the controllers wanted (``namespace-controller``)."""
        self.processes.start(
            "kube-controller-manager",
            [
                tool("kube-controller-manager"),
                *_flags(
                    kubeconfig=self.kubeconfig("system:kube-controller-manager"),
                    controllers=",".join(only),
                    root_ca_file=self.authority.certificate,
                    service_account_private_key_file=self._tokens.key,
                    use_service_account_credentials="true",
                    cluster_signing_cert_file=self.authority.certificate,
                    cluster_signing_key_file=self.authority.key_file,
                    leader_elect="false",
                    secure_port=0,
                    node_monitor_grace_period="20s",  # a node that is cut off counts as gone after this
                    concurrent_gc_syncs=5,
                ),
                *(
                    _flags(
                        cluster_cidr=self.addresses.pods, allocate_node_cidrs="true", node_cidr_mask_size=24
                    )
                    if self.addresses.pods
                    else ()
                ),
            ],
        )

    def start_scheduler(self) -> None:
        file = self.kubeconfig("system:kube-scheduler")
        flags = _flags(kubeconfig=file, leader_elect="false", secure_port=0)
        self.processes.start("kube-scheduler", [tool("kube-scheduler"), *flags])

    def _api_server_flags(self) -> list[str]:
        hosts = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        hosts += [f"kubernetes.default.svc.{SERVICE_DOMAIN}", "127.0.0.1", self.addresses.api]
        serving = self.authority.sign("kube-apiserver", hosts=[*hosts, self.addresses.api_service])
        to_kubelets = self._to_kubelets()
        policy = self.folder / "audit-policy.yaml"
        policy.write_text(yaml.safe_dump(_AUDIT_POLICY))
        return _flags(
            etcd_servers=f"http://127.0.0.1:{self._etcd_ports[0]}",
            bind_address=self.addresses.api,
            advertise_address=self.addresses.api,
            secure_port=self._port,
            tls_cert_file=serving.certificate,
            tls_private_key_file=serving.key,
            cert_dir=self.folder / "pki",
            client_ca_file=self.authority.certificate,
            kubelet_client_certificate=to_kubelets.certificate,
            kubelet_client_key=to_kubelets.key,
            kubelet_certificate_authority=self.authority.certificate,
            kubelet_preferred_address_types="InternalIP",
            service_account_key_file=self._tokens.certificate,
            service_account_signing_key_file=self._tokens.key,
            service_account_issuer=f"https://kubernetes.default.svc.{SERVICE_DOMAIN}",
            authorization_mode="Node,RBAC",
            # The second is OpenShift's way: who makes an object that holds up its owner's deletion needs a right to.
            enable_admission_plugins="NodeRestriction,OwnerReferencesPermissionEnforcement",
            service_cluster_ip_range=self.addresses.services,
            endpoint_reconciler_type="lease" if self.addresses.pods else "none",
            audit_policy_file=policy,
            audit_log_path=self.audit_log,
            audit_log_maxsize=1024,
            allow_privileged="true",
        )

    def _to_kubelets(self) -> Signed:
        return self.authority.sign("apiserver-kubelet", organization="system:masters")


def _flags(**values: object) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
