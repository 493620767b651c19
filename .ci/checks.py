"""Check the sources of the project, one named check after the other.

    python .ci/checks.py [NAME ...]

Without a name every check of CHECKS runs. `make check`, the hooks of pre-commit and the workflow
`checks` call this script, so that the three of them have one list.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKS = {
    "lint": [["ruff", "check", "."], ["ruff", "check", "--select", "F821", "hmoe_repro"]],
    "format": [["ruff", "format", "--check", "--quiet", "."]],
    "export": [[sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/test_sync.py"]],
    "spelling": [["codespell"]],
    "types": [["basedpyright", "--level", "error", "hmoe_repro"]],
}


def run_check(name: str) -> bool:
    "Run the commands of a check, print how long they took, and return whether all succeeded."
    programs = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}
    start = time.monotonic()
    for command in CHECKS[name]:
        finished = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if finished.returncode:
            print(f"{name}: failed: {' '.join(command)}")
            return False
    print(f"{name}: passed in {time.monotonic() - start:.0f} s")
    return True


def main(names: list[str]) -> int:
    "Run the named checks, or all; return the exit status."
    unknown = sorted(set(names) - set(CHECKS))
    if unknown:
        print(f"unknown checks: {', '.join(unknown)}. Valid: {', '.join(CHECKS)}")
        return 2
    failed = [name for name in names or CHECKS if not run_check(name)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
