"""Add digests to results of earlier versions, once: values stay as they are, bit by bit.

    python .ci/seal.py              the published arrays, in results/*/
    python .ci/seal.py FOLDER ...   records and arrays in folders of runs

The arrays of a run get a seal that names the run. What has one already is checked and not written
again. The lines of results/*.jsonl stay: SHA256SUMS has a digest of each of these files.
"""

import sys
from pathlib import Path

from safetensors.torch import load

from hmoe_repro.core.files import write_atomic
from hmoe_repro.core.seals import is_sealed, seal_fault, sealed, sealed_for
from hmoe_repro.training.store import (
    RunStore,
    check_record,
    run_lock,
    sealed_record,
    unsealed_record,
)

ROOT = Path(__file__).resolve().parent.parent


def seal_arrays(path, run):
    "Seal a file of arrays for a run; was that necessary?"
    content = path.read_bytes()
    if seal_fault(content, run) is None:
        return False
    assert is_sealed(content) is not False, f"{path} is damaged"
    assert sealed_for(content) is None, f"{path} is that of run {sealed_for(content)}"
    arrays = load(content)
    new = sealed(arrays, run=run)
    again = load(new)
    assert again.keys() == arrays.keys(), path
    for name, values in arrays.items():
        assert (again[name].dtype, again[name].shape) == (values.dtype, values.shape), path
        assert again[name].numpy().tobytes() == values.numpy().tobytes(), path
    write_atomic(path, new)
    return True


def seal_published(results):
    "Seal the arrays of all published studies; how many were not."
    files = sorted(results.glob("*/*.safetensors"))
    return sum(seal_arrays(path, path.stem) for path in files), len(files)


def seal_store(store):
    "Seal the records and arrays of a folder of runs that no process works on; how many were not."
    changed = 0
    paths = sorted(store.folder.glob("*/record.json"))
    for path in paths:
        with run_lock(path.parent) as mine:
            assert mine, f"another process works on {path.parent}"
            record, intact = unsealed_record(path.read_bytes())
            assert intact is not False, f"{path} is damaged"
            check_record(record, str(path), path.parent.name)
            if intact is None:
                write_atomic(path, sealed_record(record))
                changed += 1
            if (arrays := path.with_name("arrays.safetensors")).exists():
                changed += seal_arrays(arrays, path.parent.name)
    return changed, len(paths)


def main():
    folders = [Path(name) for name in sys.argv[1:]]
    for folder in folders:
        changed, runs = seal_store(RunStore(folder))
        print(f"{changed} files sealed, of {runs} runs in {folder}")
    if not folders:
        changed, files = seal_published(ROOT / "results")
        print(f"{changed} of {files} files of published arrays sealed")


if __name__ == "__main__":
    main()
