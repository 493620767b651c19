"""Builds the book: gathers its sources, runs Sphinx, adds the slides. Executes no notebook.

`python docs/book/build.py [FOLDER]`; the folder is build/book, the site is FOLDER/html.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def sphinx(source: Path, target: Path) -> int:
    """Run Sphinx on the gathered sources; its exit status. Warnings go to standard error."""
    workers = str(min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1))
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-j", workers, "-c", str(HERE)]
    return subprocess.run([*command, str(source), str(target)]).returncode


def main(folder: Path) -> int:
    """Build everything in `folder`."""
    import prepare

    start = time.monotonic()
    book, executed = prepare.main(folder / "source")
    status = sphinx(folder / "source", folder / "html")
    if status == 0:
        prepare.write_slides(book, executed, folder / "html")
        print(f"{folder / 'html' / 'index.html'}: open it in a browser")
    print(f"built in {time.monotonic() - start:.0f} s")
    return status


if __name__ == "__main__":
    default = HERE.parents[1] / "build" / "book"
    sys.exit(main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else default))
