"""Volumes: each claim gets a folder of the node that its pod was scheduled to, and loses it with the claim.

The StorageClass `local` waits for the first consumer, so the scheduler has chosen a node when the claim comes here; the
PersistentVolume is bound to that node for good, as a disk of that machine would be. Sizes are what is said of a volume: its
folder has the room of the disk, and a claim that asks for more is told at once that it has it.
"""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from cluster.api import Api, ApiError, Json
from cluster.node import Node

PROVISIONER = "firn.dev/test-volumes"
STORAGE_CLASS = "local"
_EVERY_SECONDS = 0.2
_CHOSEN = "volume.kubernetes.io/selected-node"


class Volumes:
    """A thread that makes and deletes them, until `stop`."""

    def __init__(self, api: Api, nodes: Sequence[Node]) -> None:
        self._api, self._folders = api, {node.name: node.volumes for node in nodes}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="volumes", daemon=True)

    def start(self) -> None:
        metadata = {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        }
        made = {
            "metadata": metadata,
            "provisioner": PROVISIONER,
            "volumeBindingMode": "WaitForFirstConsumer",
            "reclaimPolicy": "Delete",
            "allowVolumeExpansion": True,
        }
        self._api.post("/apis/storage.k8s.io/v1/storageclasses", made)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            try:
                self._make()
                self._grow()
                self._delete()
            except (ApiError, OSError):
                pass  # the API is away, or somebody was faster: the next turn looks again

    def _make(self) -> None:
        for claim in self._api.get("/api/v1/persistentvolumeclaims")["items"]:
            node = claim["metadata"].get("annotations", {}).get(_CHOSEN)
            is_ours = claim["spec"].get("storageClassName") == STORAGE_CLASS
            if is_ours and node in self._folders and not claim["spec"].get("volumeName"):
                self._make_volume(claim, node)

    def _make_volume(self, claim: Json, node: str) -> None:
        about = claim["metadata"]
        name = f"pvc-{about['uid']}"
        folder = self._folders[node] / name
        folder.mkdir(exist_ok=True)
        here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
        reference = {"kind": "PersistentVolumeClaim", "namespace": about["namespace"], "name": about["name"]}
        spec = {
            "capacity": {"storage": claim["spec"]["resources"]["requests"]["storage"]},
            "accessModes": claim["spec"]["accessModes"],
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": STORAGE_CLASS,
            "claimRef": {**reference, "apiVersion": "v1", "uid": about["uid"]},
            "local": {"path": str(folder)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        }
        marks = {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER}}
        try:
            self._api.post("/api/v1/persistentvolumes", {"metadata": marks, "spec": spec})
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise

    def _grow(self) -> None:
        for claim in self._api.get("/api/v1/persistentvolumeclaims")["items"]:
            asked = claim["spec"]["resources"]["requests"]
            about, has = claim["metadata"], claim["status"].get("capacity")
            if claim["spec"].get("storageClassName") != STORAGE_CLASS or has is None or has == asked:
                continue
            path = f"/api/v1/namespaces/{about['namespace']}/persistentvolumeclaims/{about['name']}/status"
            self._api.patch(path, {"status": {"capacity": asked}})
            volume = f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}"
            self._api.patch(volume, {"spec": {"capacity": asked}})

    def _delete(self) -> None:
        for volume in self._api.get("/api/v1/persistentvolumes")["items"]:
            folder = Path(volume["spec"].get("local", {}).get("path", "/"))
            if volume["status"].get("phase") == "Released" and folder.parent in self._folders.values():
                shutil.rmtree(folder, ignore_errors=True)
                self._api.delete(f"/api/v1/persistentvolumes/{volume['metadata']['name']}")
