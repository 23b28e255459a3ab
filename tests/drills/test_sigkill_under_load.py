"""Ten rounds of the drill that kills a broker under load; ``make drill`` runs two hundred."""

import json
import subprocess
import sys
from pathlib import Path

DRILL = Path(__file__).parents[2] / "benchmarks" / "drill_sigkill.py"
ROUNDS = 10


def test_nothing_acknowledged_is_lost_or_doubled_over_kills_under_load(tmp_path: Path) -> None:
    command = [sys.executable, str(DRILL), "--rounds", str(ROUNDS), "--data", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    print(done.stdout, done.stderr)  # the first line is the seed
    assert done.returncode == 0
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["rounds"], report["lost"], report["duplicated"]) == (ROUNDS, 0, 0)
    assert report["kills"] >= ROUNDS
    assert report["acknowledged"] > 100 * ROUNDS, "the broker was not under load"
