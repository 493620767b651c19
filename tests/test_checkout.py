"""`make reproduce`, `git status`, `make test` at smoke size: the checkout stays as it was."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
TRIED = ("digits_table",)  # one of the pages that the README shows


def call(tree, *command, **more):
    "What a command printed; it works in `tree` with `tree`'s library, and must succeed."
    own = {k: v for k, v in os.environ.items() if not k.startswith(("HMOE_", "PYTEST_"))}
    own |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"} | more
    done = subprocess.run(command, cwd=tree, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def git(tree, *arguments):
    return call(tree, "git", "-c", "user.name=x", "-c", "user.email=x@localhost", *arguments)


@pytest.fixture(scope="module")
def checkout(root, tmp_path_factory):
    "What git would commit of this project now, in a folder of its own; and what was printed."
    if not (root / ".git").exists() or not shutil.which("git"):
        pytest.skip("this is no git checkout")
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    tree = tmp_path_factory.mktemp("checkout") / "tree"
    for name in listed:
        if not (root / name).is_file():
            continue
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, tree / name)
    for command in ("init -q", "add -A", "commit -q -m all"):
        git(tree, *command.split())
    command = ("-m", "hmoe_repro.cli.app", "reproduce", *TRIED, "--profile", "smoke", "--fresh")
    return tree, call(tree, sys.executable, *command)


def test_reproduce_renders_beside_the_runs_and_says_where(checkout):
    tree, said = checkout
    folder = tree / "runs" / "figures" / "smoke"
    assert "gallery: runs/figures/smoke/README.md" in said
    gallery = (folder / "README.md").read_text(encoding="utf-8")
    for page in TRIED:
        assert f"rendered runs/figures/smoke/{page}.ipynb" in said
        assert f'src="{page}.png"' in gallery
        assert (folder / f"{page}.png").stat().st_size > 10_000


def test_afterwards_git_has_nothing_to_say(checkout):
    tree, _ = checkout
    assert git(tree, "status", "--porcelain") == ""
    ignored = git(tree, "status", "--porcelain", "--ignored").splitlines()
    assert ignored == ["!! runs/"], "something was written outside runs/"


def test_the_last_lines_say_that_nothing_of_smoke_is_published(checkout):
    assert "nothing published to compare with" in checkout[1]
