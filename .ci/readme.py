"""Rewrite the generated blocks of README.md and of docs/: `python .ci/readme.py`.

`hmoe figures` does the same after rendering pages; `hmoe_repro.report.readme` makes the blocks.
"""

from hmoe_repro.report.readme import update_readme

if __name__ == "__main__":
    print(update_readme())
