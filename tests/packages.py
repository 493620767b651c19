"""Reading what the project requires and what it pins."""

import re
from pathlib import Path

from packaging.requirements import Requirement

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normal(name):
    "A package's name as package indexes compare it."
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(extra):
    """The requirements of 'dependencies', or of an extra,
    other extras of the project itself left out."""
    lines = (
        PROJECT["dependencies"]
        if extra == "dependencies"
        else PROJECT["optional-dependencies"][extra]
    )
    return [r for r in map(Requirement, lines) if normal(r.name) != normal(PROJECT["name"])]


def pins():
    "Every line of constraints.txt as a requirement."
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
