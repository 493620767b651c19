"""Build the package, check it, and try it in a bare environment.

    python .ci/package.py FOLDER       # sdist and wheel into FOLDER, then the trial
    python .ci/package.py --tag v1.2.0 # fail unless the tag names the version of the package

The bare environment holds the wheel and its declared run-time dependencies and nothing else. In it
`hmoe --version` runs, and `compare` trains two algorithms on a few random tensors.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRIAL = """
import torch
from hmoe_repro import compare

generator = torch.Generator().manual_seed(0)
domains = {}
for name in ("photo", "sketch", "print"):
    images = torch.rand(40, 3, 16, 16, generator=generator)
    labels = torch.arange(40) % 2
    domains[name] = (images, labels)
compared = compare(["ERM", "HMOE-DN"], domains, seeds=1, steps=2, jobs=1)
print(compared)
"""


def version() -> str:
    "Return the version that the package states."
    text = (ROOT / "hmoe_repro" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', text, flags=re.M)[1]


def run(*command, **options):
    "Run a command; raise if it fails."
    print("+", *command, flush=True)
    return subprocess.run(list(map(str, command)), check=True, **options)


def build(folder: Path) -> Path:
    "Build the sdist and the wheel into `folder`, check their metadata, and return the wheel."
    with tempfile.TemporaryDirectory() as tools:
        run(sys.executable, "-m", "venv", tools)
        python = interpreter(Path(tools))
        run(python, "-m", "pip", "install", "-qq", "build", "twine")
        run(python, "-m", "build", "--outdir", folder, ROOT)
        (wheel,) = folder.glob(f"*-{version()}-*.whl")
        run(python, "-m", "twine", "check", "--strict", *folder.glob(f"*-{version()}*"))
    return wheel


def interpreter(environment: Path) -> Path:
    "Return the Python of a virtual environment."
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def try_bare(wheel: Path):
    "Install the wheel and what it declares into a new environment, and use it."
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "bare")
        run(sys.executable, "-m", "venv", environment)
        python = interpreter(environment)
        constraints = ROOT / "constraints.txt"
        run(python, "-m", "pip", "install", "-qq", "--constraint", constraints, wheel)
        run(python, "-m", "hmoe_repro", "--version", cwd=folder)
        run(python, "-c", TRIAL, cwd=folder)


def main():
    "Build and try the package, or compare a tag with its version."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--tag", help="fail unless this tag names the version")
    options = parser.parse_args()
    if options.tag and options.tag != f"v{version()}":
        sys.exit(f"the tag {options.tag} is not v{version()}, the version of the package.")
    if options.folder:
        try_bare(build(options.folder.resolve()))


if __name__ == "__main__":
    main()
