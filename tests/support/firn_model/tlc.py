"""TLC, run over one module of ``tests/model`` at a time, and what it found."""

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from firn_model.runs import Run

MODEL = Path(__file__).parents[2] / "model"
WALK_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Machine:
    """What TLC may use: seconds for a run that must end, and for one that searches; walks of ``WALK_DEPTH`` steps."""

    jar: Path
    workers: int
    heap: str
    limit: int
    search_seconds: int
    walks: int


@dataclass(frozen=True, slots=True)
class Found:
    """How a run ended: ``violated`` names an invariant; ``is_whole``: it went on to its end, all states within the
    bounds seen, or all walks done."""

    violated: str
    is_whole: bool
    steps: int
    distinct: int
    generated: int
    seconds: float
    output: str

    def is_as_expected(self, run: Run) -> bool:
        if run.expected == "searches":
            return self.generated > 0 and not self.violated
        if run.expected in ("holds", "walks"):
            return self.is_whole and not self.violated
        return self.violated in run.invariants


def configuration(run: Run) -> str:
    """The bounds and names of a run, as TLC reads them."""
    values = {**run.bounds.constants, "Drop": f'{{"{run.drop}"}}' if run.drop else "{}"}
    return "\n".join(
        [
            "INIT Init", "NEXT Next", "CHECK_DEADLOCK FALSE", "SYMMETRY Symmetry", "CONSTANTS",
            *(f"  {name} = {value}" for name, value in values.items()),
            *(f"INVARIANT {name}" for name in run.invariants),
        ]
    )  # fmt: skip


def execute(run: Run, machine: Machine) -> Found:
    """One run from its first state to its end, or to the limit."""
    is_walk = run.expected == "walks"
    with tempfile.TemporaryDirectory(prefix="firn-model-") as folder:
        here = Path(folder)
        for module in MODEL.glob("*.tla"):
            (here / module.name).write_text(module.read_text())
        (here / "run.cfg").write_text(configuration(run))
        tuned = ["-XX:+UseSerialGC" if machine.workers == 1 else "-XX:+UseParallelGC"]
        if run.expected in ("violated", "reached"):
            tuned.append("-XX:TieredStopAtLevel=1")  # over before a better compiler pays
        command = [
            "java", f"-Xmx{machine.heap}", *tuned, "-cp", str(machine.jar.resolve()), "tlc2.TLC",
            "-workers", str(machine.workers), "-nowarning", "-metadir", "states", "-config", "run.cfg",
            *(["-simulate", f"num={machine.walks}", "-depth", str(WALK_DEPTH)] if is_walk else []), f"{run.module}.tla",
        ]  # fmt: skip
        started = time.monotonic()
        process = subprocess.Popen(
            command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(
                timeout=machine.search_seconds if run.expected == "searches" else machine.limit
            )
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        seconds = time.monotonic() - started
    return read_output(output, seconds)


def read_output(output: str, seconds: float) -> Found:
    """What TLC's words mean."""
    violated = re.search(r"Invariant (\w+) is violated", output)
    counts = re.findall(r"([\d,]+) states generated.*?([\d,]+) distinct states found", output)
    walked = re.findall(r"Progress: ([\d,]+) states checked", output) if "Finished in" in output else []
    generated, distinct = counts[-1] if counts else (walked[-1] if walked else "0", "0")
    return Found(
        violated=violated.group(1) if violated else "",
        is_whole="Model checking completed. No error" in output or bool(walked and "Error:" not in output),
        steps=len(re.findall(r"^State \d+:", output, re.MULTILINE)),
        distinct=int(distinct.replace(",", "")),
        generated=int(generated.replace(",", "")),
        seconds=seconds,
        output=output,
    )
