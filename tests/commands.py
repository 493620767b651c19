"""The command `hmoe`, called in this process as if it were started afresh."""

import io
import os
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from hmoe_repro.cli import app as cli
from hmoe_repro.core import files
from hmoe_repro.core.config import CONFIG

UNHEARD = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
INSTALLED = Path(sys.executable).parent / "hmoe"


def environment_of(folder, more):
    "Where a command keeps runs, results and figures when it works in `folder`."
    names = ("runs", "results", "figures")
    return {f"HMOE_{name.upper()}": str(folder / name) for name in names} | more


def hmoe(*arguments, folder, **more):
    """Run `hmoe ARGUMENTS` in `folder` with more variables; `returncode`, `stdout` and `stderr` are
    those of a process, a traceback included. Environment, folder and warnings are put back."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.resetwarnings()
        for category in UNHEARD:  # by a process that Python starts
            warnings.simplefilter("ignore", category)
        patch.setattr(files, "FOLDERS", dict(files.FOLDERS))  # those of a command end with it
        for name, value in vars(CONFIG).items():
            patch.setattr(CONFIG, name, value)
        for name, value in environment_of(folder, more).items():
            patch.setenv(name, value)
        # Help would call the program `python -m pytest.hmoe`.
        patch.setattr(sys.modules["__main__"], "__package__", None, raising=False)
        patch.setattr(sys, "argv", ["hmoe", *map(str, arguments)])
        patch.chdir(folder)
        with redirect_stdout(out), redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except BaseException:
                import traceback

                traceback.print_exc()
                status = 1
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def hmoe_process(*arguments, folder, **more):
    "The same in a process of its own, by the installed command."
    return subprocess.run(
        [str(INSTALLED), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment_of(folder, more),
        cwd=folder,
    )
