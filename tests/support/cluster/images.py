"""The project's images, built without Docker: a base by debootstrap, the rest by buildah from the Dockerfiles.

An image is known by the hash of what it is built from, and kept as an archive in the cache folder: an unchanged tree
costs nothing, an edit costs the last layer, and the base and its packages are made once per machine.
"""

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster import host
from cluster.tools import cache_folder, locked

ROOT = Path(__file__).parents[3]
_BASE = "localhost/firn-test-base:bookworm"
_BASE_PACKAGES = "python3,python3-venv,ca-certificates"
_KEPT_SECONDS = 86_400
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True, slots=True)
class Image:
    """One that a Dockerfile of this repository describes; `inputs` are the paths that go into it."""

    name: str
    dockerfile: str
    inputs: tuple[str, ...]

    def digest(self) -> str:
        return _digest((self.dockerfile, *self.inputs))

    def reference(self) -> str:
        """What a pod names; another one for every other content, so that a roll has something to roll to."""
        return f"localhost/{self.name}:{self.digest()}"


@cache
def _digest(inputs: tuple[str, ...]) -> str:
    """The same for the same files, whatever their times; of the tree as it was when this run first asked."""
    digest = hashlib.sha256()
    for path in sorted(_files(inputs)):
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _files(inputs: tuple[str, ...]) -> Iterator[Path]:
    for name in inputs:
        path = ROOT / name
        found = path.rglob("*") if path.is_dir() else [path]
        yield from (file for file in found if file.is_file() and "__pycache__" not in file.parts)


_LOCKED = ("pyproject.toml", "uv.lock", "README.md", "LICENSE", ".dockerignore")
NODE = Image("firn-node", "node/Dockerfile", (*_LOCKED, "node/firn", "node/firn_node"))
OPERATOR = Image("firn-operator", "operator/Dockerfile", (*_LOCKED, "node/firn", "operator/firn_operator"))
SPARK = Image("firn-spark", "spark/Dockerfile", (*_LOCKED, "node/firn", "spark"))

IMAGES = {"node": NODE, "operator": OPERATOR, "spark": SPARK}


def archive(image: Image) -> Path:
    """A docker-archive of the image as the tree is now, built if there is none.

    *Effects*: archives that nobody has asked for in a day are removed.
    *Errors*: `CannotRun` when this machine cannot build; `host.CommandFailed` when the Dockerfile does not.
    """
    host.require_root()
    host.install(host.IMAGE_PROGRAMS)
    folder = cache_folder() / "images"
    file = folder / f"{image.name}-{image.digest()}.tar"
    with locked("images-build"):
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            reference = image.reference()
            _build(image.dockerfile, reference, [f"--build-arg=BASE_IMAGE={_base()}"], ROOT)
            _save(reference, file)
        file.touch()
        for other in folder.glob("*.tar"):
            if file.stat().st_mtime - other.stat().st_mtime > _KEPT_SECONDS:
                other.unlink()
    return file


def _base() -> str:
    """A Debian with Python, in the place of the image that a registry would give."""
    if not _buildah("images", "--quiet", _BASE, check=False):
        with tempfile.TemporaryDirectory(prefix="firn-base-") as folder:
            root = Path(folder) / "root"
            quick = (
                "DPKG_FORCE=unsafe-io"  # no fsync for each file of a folder that is thrown away on a crash
            )
            include = f"--include={_BASE_PACKAGES}"
            host.run("env", quick, "debootstrap", "--variant=minbase", include, "bookworm", root)
            for unneeded in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
                shutil.rmtree(root / unneeded, ignore_errors=True)
            (Path(folder) / "Dockerfile").write_text("FROM scratch\nCOPY root/ /\n")
            _build(str(Path(folder) / "Dockerfile"), _BASE, [], Path(folder))
    return _BASE


def _build(dockerfile: str, reference: str, arguments: list[str], context: Path) -> None:
    """The build is lent the certificates of this machine, so that it works behind a proxy that this one trusts, and
    folders for what was downloaded and compiled before.

    Not ``RUN --mount=type=cache``: buildah 1.28 empties the container when such a mount ends.
    """
    lent = [f"--volume={_CERTIFICATES}:{_CERTIFICATES}:ro"] if _CERTIFICATES.exists() else []
    for name, path in (("downloads", "/downloads"), ("kernels", "/kernels")):
        (cache_folder() / name).mkdir(exist_ok=True)
        lent.append(f"--volume={cache_folder() / name}:{path}")
    _buildah(
        "bud",
        "--layers",
        "--isolation=chroot",
        "--network=host",
        "--pull-never",
        *lent,
        *arguments,
        f"--file={dockerfile}",
        f"--tag={reference}",
        context,
        folder=context,
    )


def _save(reference: str, file: Path) -> None:
    arriving = file.with_suffix(".arriving")
    _buildah("push", reference, f"docker-archive:{arriving}:{reference}")
    arriving.rename(file)


def _buildah(*words: object, check: bool = True, folder: Path | None = None) -> str:
    command = [host.program("buildah"), "--root", cache_folder() / "buildah", *words]
    ended = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, cwd=folder
    )
    if check and ended.returncode:
        raise host.CommandFailed(command, ended.returncode, ended.stdout + ended.stderr)
    return ended.stdout
