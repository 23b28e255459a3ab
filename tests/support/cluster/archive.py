"""Images of one static program, written without any tool: the archive that ``docker save`` makes and ``ctr`` loads."""

import hashlib
import io
import json
import tarfile
from pathlib import Path


def write_image(file: Path, name: str, program: Path) -> None:
    """An image called `name` whose only file is the program, which it starts."""
    layer = _tar({program.name: (program.read_bytes(), 0o755)})
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": [f"/{program.name}"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    parts = {"config.json": config, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    file.write_bytes(_tar({path: (data, 0o644) for path, data in parts.items()}))


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, (data, mode) in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), mode
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()
