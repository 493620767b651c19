"""The README's numbers come from the records, and its links lead somewhere."""
import re

import pytest

from hmoe_repro.cli import readme_blocks
from hmoe_repro.core import repo_root

README = repo_root() / "README.md"


def test_generated_blocks_are_those_of_the_published_records():
    page = README.read_text(encoding="utf-8")
    blocks = readme_blocks()
    assert {"digits-table", "discovery", "verdict", "toy", "times", "table4", "table5", "colored-found", "rotated-found", "colored-said", "rotated-said", "speed", "table1-said", "table7", "pacs-said", "limits-said"} == set(blocks)
    for name, text in blocks.items():
        inside = page.split(f"<!-- {name}:start -->")[1].split(f"<!-- {name}:end -->")[0]
        assert inside.strip() == text.strip(), f"block {name} is stale. Fix: make figures"


def test_the_table_in_the_readme_can_be_computed_from_the_records():
    """One cell by hand: mean and standard error of ERM on test domain photo."""
    import numpy as np
    from hmoe_repro.report import load_study, select
    values = [100 * r["selected"]["default"]["test_accuracy"] for r in select(load_study("quick-digits"), algorithm="ERM", test_domain="photo")]
    assert len(values) == 3
    row = next(line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| ERM"))
    assert f"{np.mean(values):.1f} ± {np.std(values) / 3**0.5:.1f}" in row


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "figures/quick/README.md", "figures/mnist/README.md", "figures/pacs/README.md", "figures/bench/README.md"])
def test_links_lead_to_files(page):
    path = repo_root() / page
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in links if not (path.parent / link).exists()]
    assert (links or page == "CONTRIBUTING.md") and not missing, missing


def test_the_readme_calls_a_uniform_gate_uniform():
    import math
    from hmoe_repro.report import load_study, select
    from hmoe_repro.tables import domains_and_experts
    said = README.read_text(encoding="utf-8").split("<!-- rotated-said:start -->")[1].split("<!-- rotated-said:end -->")[0]
    for algorithm in ("HMOE-DL", "HMOE-DN"):
        runs = select(load_study("mnist-rotated"), algorithm=algorithm, status="complete")
        uniform = all(r["discovery"]["gate_entropy"] >= 0.9 * math.log(domains_and_experts(r)[1]) for r in runs)
        assert f"{algorithm}, {len(runs)} run" in said and (f"{algorithm}, {len(runs)} runs: the gate is still uniform" in said) == uniform
