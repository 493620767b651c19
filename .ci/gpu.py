"""Train on a GPU that is available for minutes: steps that stop in time and resume later.

    python .ci/gpu.py prepare 2                          here: write the inputs to .gpu/in
    python .ci/gpu.py thin                               here: results/ and figures/ stay home
    python .ci/gpu.py 2 --minutes 9                      there: slot 2, for 9 minutes
    python .ci/gpu.py restore                            here: results/ and figures/ are back
    python .ci/gpu.py all --minutes 600                  or, on your own GPU, everything

Slots fit into one short visit each; `python .ci/gpu.py slots` lists their runs. Steps are longer:

    check       compare the GPU's losses with the CPU's
    colored     Table 4: ERM, HMOE-DL, -DN and -ND on ColoredMNIST
    rotated     Table 5: ERM, HMOE-DL and -DN on RotatedMNIST
    baselines   Table 1: the other 13 algorithms, on ColoredMNIST first
    speed       time and memory of eight algorithms, as in GMoE's Table 16
    together    updates a second over all runs, with 1 to 14 of them on the GPU

It needs Python 3.11 or newer, PyTorch and the library's own dependencies; no network, no notebook
tools and no home folder; `check` needs pytest. Packages that the other machine lacks travel as
wheels: `prepare 6 --wheels pydantic==2.14.3 ...` downloads them for Python 3.12. Inputs are files
of at most --part MiB. If not all of them can be copied at once, copy some, call `unpack` there, and
copy the others. It works in .gpu and leaves in --out (or OUT, or .gpu/out) gpu.json, gpu.log and
archives of at most --mib, --files files in all, for `hmoe unpack`. Runs that a step did not finish
stay in .gpu/runs and are resumed when it is called again. If the machine is not kept, their
checkpoints are in the archives, as far as they fit: unpack, `prepare` again, resume there with the
same version of the library.

Small networks leave a GPU idle between kernels. If NVIDIA's multi-process service is installed, it
is started for the call, and up to 14 runs share the GPU.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAST = 30  # seconds kept back for packing
STAY_HOME = ("results", "figures")  # most of what git tracks, and no run reads them
TOGETHER = 14  # runs that share a GPU


@dataclass(frozen=True)
class Part:
    """Runs of a study: all, or those of some algorithms and of one trial seed."""

    study: str
    algorithms: tuple[str, ...] = ()
    trial_seed: int | None = None

    def options(self) -> list[str]:
        """Return the options of `hmoe sweep` that choose these runs."""
        words = []
        for algorithm in self.algorithms:
            words += ["--algorithm", algorithm]
        if self.trial_seed is not None:
            words += ["--where", f"trial_seed={self.trial_seed}"]
        return words


BASELINES = (
    "IRM", "VREx", "GroupDRO", "Mixup", "MLDG", "CORAL", "MMD", "DANN", "CDANN", "MTL", "RSC",
    "SagNet",
)  # fmt: skip
STEPS = {
    "check": (),
    "colored": (Part("paper-colored"),),
    "rotated": (Part("paper-rotated"),),
    "baselines": (Part("paper-colored-baselines"), Part("paper-rotated-baselines")),
    "speed": (),
    "together": (),
}
BENCHES = {"speed": "algorithms", "together": "together"}  # step -> what `hmoe bench` measures

SLOTS = {
    "1": (Part("paper-colored"),),
    "2": (Part("paper-colored-baselines", ("ARM",)),),
    "3": (Part("paper-rotated", ("ERM", "HMOE-DN"), 0),),
    "4": (Part("paper-rotated", ("ERM", "HMOE-DN"), 1),),
    "5": (Part("paper-rotated", ("ERM", "HMOE-DN"), 2), Part("paper-rotated", ("HMOE-DL",))),
    "6": (Part("pacs-full", trial_seed=0),),
    "7": (Part("pacs-full", trial_seed=1),),
    "8": (Part("pacs-full", trial_seed=2),),
    "9": (Part("pacs-full-224"),),
    "10": tuple(Part("paper-colored-baselines", (name,)) for name in BASELINES),
    "11": (Part("pacs-full-newer", ("CutMix", "JiGen")),),
    "12": (Part("pacs-full-newer", ("DIVA",)),),
    "13": (Part("pacs-full-newer", ("HDUVA",)),),
    "14": (Part("pacs-full-newer", ("DIAL",)),),
}
SMOKE = {  # what stands for a study in tests
    "paper-colored": "smoke-colored",
    "paper-rotated": "smoke-rotated",
    "paper-colored-baselines": "smoke-table1",
    "paper-rotated-baselines": "smoke-table1",
    "pacs-full": "smoke-digits",
    "pacs-full-224": "smoke-digits",
    "pacs-full-newer": "smoke-digits",
}
CACHES = {
    "MPLCONFIGDIR": "matplotlib",
    "XDG_CACHE_HOME": "cache",
    "TORCH_HOME": "torch",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "HF_HOME": "hf",
    "HMOE_CACHE": "images",
}


def set_environment(work, home=False):
    "Keep all files below `work`; with `home`, use the usual folders of runs and data."
    for name, folder in CACHES.items():
        os.environ[name] = str(work / "cache" / folder)
        Path(os.environ[name]).mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ |= {"MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}
    for name, value in (("HOME", str(work)), ("USER", "nobody")):
        os.environ.setdefault(name, value)
    if not home:
        os.environ["HMOE_RUNS"] = str(work / "runs")
        if (work / "data" / "MNIST").exists():
            os.environ["HMOE_DATA"] = str(work / "data")
        if (work / "in" / "commit").exists():
            os.environ.setdefault("HMOE_COMMIT", (work / "in" / "commit").read_text().strip())
    sys.path.insert(0, str(ROOT))


def pack_parts(store, folder, name, runs, limit, **options):
    """Pack runs as `<folder>/<name>-1.tar.gz`, `-2` and so on, each of at most `limit` bytes where
    it holds more than one run: an archive that is too large is packed again as two halves.
    `options`: as for `pack_runs`. Returns the paths."""
    from hmoe_repro.studies.export_import import pack_runs

    parts, waiting = [], [list(runs)]
    while waiting:
        ids, path = waiting.pop(0), Path(folder) / f"{name}-{len(parts) + 1}.tar.gz"
        pack_runs(store, path, runs=ids, **options)
        if len(ids) > 1 and path.stat().st_size > limit:
            path.unlink()
            half = len(ids) // 2
            waiting = [ids[:half], ids[half:], *waiting]
        else:
            parts.append(path)
    return parts


# Here: the inputs


def parts_of(profile: str, step: str) -> list[Part]:
    "The runs of a step or slot, in the order in which they are trained."
    parts = list((STEPS | SLOTS)[step])
    if profile == "smoke":
        parts = [Part(SMOKE[part.study]) for part in parts]
    return list(dict.fromkeys(parts))


def configs_of(part: Part) -> list:
    "The configurations of the runs of a part."
    from hmoe_repro.studies.studies import study_configs

    return [
        config
        for config in study_configs(part.study)
        if (not part.algorithms or config.algorithm in part.algorithms)
        and part.trial_seed in (None, config.trial_seed)
    ]


def ids_of(profile: str, step: str) -> list[str]:
    "Ids of the runs of a step or slot, in the order in which they are trained."
    configs = [config for part in parts_of(profile, step) for config in configs_of(part)]
    return list(dict.fromkeys(config.run_id for config in configs))


def list_slots(options):
    "Print a line for each slot."
    for slot, parts in SLOTS.items():
        lines = []
        for part in parts:
            algorithms = ", ".join(part.algorithms) or "all algorithms"
            seed = "" if part.trial_seed is None else f", trial seed {part.trial_seed}"
            lines.append(f"{part.study}: {algorithms}{seed}")
        print(f"{slot:>2}  {'; '.join(lines)}")


def write_parts(folder: Path, name: str, files: list[tuple[Path, str]], limit: int):
    "Write files as `<name>-1.tar`, `-2` and so on, each of at most about `limit` bytes."
    number, size, archive = 0, 0, None
    for path, inside in files:
        if archive is None or size + path.stat().st_size > limit:
            if archive is not None:
                archive.close()
            number, size = number + 1, 0
            archive = tarfile.open(folder / f"{name}-{number}.tar", "w")  # noqa: SIM115
        archive.add(path, inside)
        size += path.stat().st_size
    if archive is not None:
        archive.close()


def write_data(folder: Path, datasets: set[str], limit: int):
    "Write the files of data sets: MNIST as one small archive, an image folder in parts."
    from hmoe_repro.core.files import data_dir
    from hmoe_repro.data.mnist import mnist_files, verify_mnist

    if {"ColoredMNIST", "RotatedMNIST"} & datasets:
        verify_mnist()
        with tarfile.open(folder / "mnist.tar.xz", "w:xz") as archive:
            for path in mnist_files().values():
                archive.add(path, f"MNIST/raw/{path.name}")
    if "PACS" in datasets:
        root = data_dir()
        images = sorted(path for path in (root / "PACS").rglob("*") if path.is_file())
        named = [(path, path.relative_to(root).as_posix()) for path in images]
        write_parts(folder, "pacs", named, limit)


def write_wheels(folder: Path, wanted: list[str]):
    "Download wheels for Python 3.12 on Linux, without what they need."
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    for tag in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"):
        command += ["--platform", tag]
    subprocess.run([*command, "--dest", str(folder), *wanted], check=True)


def prepare(options):
    "Write data, the commit, existing records (not to be trained again) and checkpoints."
    from hmoe_repro.core.environment import git_commit
    from hmoe_repro.training.store import RunStore

    folder = options.work / "in"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    steps = options.steps or [step for step in STEPS if STEPS[step]]
    parts = {part for step in steps for part in parts_of(options.profile, step)}
    datasets = {config.dataset for part in parts for config in configs_of(part)}
    write_data(folder, datasets, int(options.part * 2**20))
    if options.wheels:
        write_wheels(folder / "wheels", options.wheels)
    (folder / "commit").write_text(git_commit() or "")
    store = RunStore()
    known = dict.fromkeys(run_id for step in steps for run_id in ids_of(options.profile, step))
    known = [i for i in known if store.path(i).is_dir()]
    done = [i for i in known if store.record_path(i).exists()]
    begun = [i for i in known if (store.path(i) / "state.safetensors").exists() and i not in done]
    if done:
        pack_parts(store, folder, "records", done, int(options.mib * 2**20), arrays=False)
    if begun:
        pack_parts(store, folder, "states", begun, int(options.mib * 2**20))
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.relative_to(folder)}")
    print(f"{len(done)} finished and {len(begun)} unfinished runs included; copy {folder}")


def thin(options):
    "Move the folders that no run reads out of the checkout, and print the size of what is left."
    home = options.work / "home"
    home.mkdir(parents=True, exist_ok=True)
    for name in STAY_HOME:
        if (ROOT / name).exists():
            if (home / name).exists():
                sys.exit(f"gpu.py: {home / name} exists already. Fix: remove it, or `restore`.")
            (ROOT / name).rename(home / name)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    size = sum(path.stat().st_size for path in paths if path.is_file())
    print(f"{size / 2**20:.1f} MiB of tracked files are left; `restore` brings back the others")


def restore(options):
    "Move the folders of `thin` back."
    for name in STAY_HOME:
        if (options.work / "home" / name).exists():
            (options.work / "home" / name).rename(ROOT / name)


# There: unpack the inputs


def install_wheels(work):
    "Install the wheels that came along, once, in a folder of this script."
    wheels = sorted(map(str, (work / "in" / "wheels").glob("*.whl")))
    site = work / "site"
    if wheels and not site.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*command, "--target", str(site), *wheels], check=True)
    if site.exists():
        sys.path.insert(0, str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])


def new_inputs(work):
    "The archives of `prepare` not unpacked yet, each with the file that marks it as done."
    marks = work / "unpacked"
    marks.mkdir(parents=True, exist_ok=True)
    for path in sorted((work / "in").glob("*.tar*")):
        mark = marks / hashlib.sha256(path.read_bytes()).hexdigest()
        if not mark.exists():
            yield path, mark


def is_data(path):
    "Return whether an input holds files of a data set."
    return path.name.startswith(("mnist", "pacs"))


def unpack_data(work):
    "Unpack the files of data sets; this needs nothing but Python."
    for path, mark in new_inputs(work):
        if is_data(path):
            with tarfile.open(path) as archive:
                archive.extractall(work / "data", filter="data")
            mark.touch()
    if (work / "data").exists():
        os.environ["HMOE_DATA"] = str(work / "data")


def unpack_in(work):
    "Unpack the files of `prepare`, each once, so that a run resumed since is not overwritten."
    from hmoe_repro.studies.export_import import unpack_runs
    from hmoe_repro.training.store import RunStore

    unpack_data(work)
    lines, store = [], RunStore()
    before = {path.parent.name for path in store.folder.glob("*/record.json")}
    for path, mark in new_inputs(work):
        lines.append(f"{path.name}: {unpack_runs(store, path)}")
        mark.touch()
    came = {path.parent.name for path in store.folder.glob("*/record.json")} - before
    with open(work / "came", "a") as file:
        file.writelines(f"{i}\n" for i in sorted(came))
    return lines


@contextlib.contextmanager
def shared_gpu(device, work):
    """Within it, processes share a GPU through NVIDIA's multi-process service, if that is
    installed. Yields how many runs are then trained side by side, or None for the default."""
    control = shutil.which("nvidia-cuda-mps-control", path="/usr/local/nvidia/bin:" + os.defpath)
    if not device.startswith("cuda") or not control:
        yield None
        return
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        os.environ[name] = str(work / "mps")
    (work / "mps").mkdir(exist_ok=True)
    subprocess.run([control, "-d"], timeout=10)
    try:
        test = "import torch; torch.ones(1, device='cuda').sum().item()"
        works = subprocess.run([sys.executable, "-c", test], timeout=60).returncode == 0
        if not works:
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        yield TOGETHER if works else None
    finally:
        subprocess.run([control], input="quit\n", text=True, timeout=30)


# There: the steps. Each takes options and the remaining seconds, and returns plain JSON


def run_check(options, seconds):
    "The tests that are marked `cuda`: the GPU against the CPU, and against itself."
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "cuda", "-p", "no:cacheprovider"]
    status = call([*command, str(ROOT / "tests" / "test_cuda.py")], seconds)
    return {"ok": status == 0, "pytest": status}


def run_training(options, seconds, step):
    "`hmoe sweep` of one part after the other, for the remaining time."
    end = time.monotonic() + seconds
    status = 0
    for part in parts_of(options.profile, step):
        left = end - time.monotonic()
        if left <= 0:
            break
        command = [sys.executable, "-m", "hmoe_repro.cli.app", "sweep", part.study]
        command += ["--device", options.device, "--minutes", f"{left / 60:.3f}"]
        command += part.options()
        if options.jobs:
            command += ["--jobs", str(options.jobs)]
        status = call(command, left + LAST / 2) or status
    return {"ok": status == 0, "status": status, **bring_home(options, step)}


def run_bench(options, seconds, step):
    "`hmoe bench` of what a step measures, at the scale of a GPU; its record goes to --out."
    scale = "tiny" if options.profile == "smoke" else "gpu"
    command = [sys.executable, "-m", "hmoe_repro.cli.app", "bench", "--what", BENCHES[step]]
    command += ["--scale", scale, "--device", options.device]
    status = call(command, seconds)
    for path in Path(os.environ["HMOE_RUNS"]).glob("bench-*.json"):
        shutil.copy(path, options.out)
    return {"ok": status == 0, "status": status}


# There: the outputs


def furthest(store, ids, most):
    "The unfinished runs with the most updates whose checkpoints fit into `most` bytes."
    from hmoe_repro.training.checkpoint_io import load_state

    steps = {i: load_state(store.path(i) / "state.safetensors")["trainer"]["step"] for i in ids}
    chosen = []
    for run_id in sorted(ids, key=lambda i: -steps[i]):
        most -= sum(path.stat().st_size for path in store.path(run_id).iterdir())
        if most < 0:
            break
        chosen.append(run_id)
    return chosen


def bring_home(options, step):
    """Write archives of all records of a step that were made here and not yet packed by this call,
    and of the checkpoints of unfinished runs, within the limit of files."""
    from hmoe_repro.training.store import RunStore

    store, ids, limit = RunStore(), ids_of(options.profile, step), int(options.mib * 2**20)
    known = {*(options.work / "came").read_text().split(), *options.packed}
    new = [i for i in ids if store.record_path(i).exists() and i not in known]
    begun = [
        i
        for i in ids
        if not store.record_path(i).exists() and (store.path(i) / "state.safetensors").exists()
    ]
    for name in (step, "states"):
        for old in options.out.glob(f"{name}-*.tar.gz"):
            old.unlink()
    if new:
        pack_parts(store, options.out, step, new, limit)
    options.packed += new
    room = options.files - 2 - len(list(options.out.glob("*.tar.gz")))
    chosen = furthest(store, begun, max(0, room) * limit)
    states = pack_parts(store, options.out, "states", chosen, limit) if chosen else []
    small = [path for path in states if path.stat().st_size <= limit]
    for path in {*states} - {*small[: max(0, room)]}:
        path.unlink()
    kept = sum(path.exists() for path in states)
    complete = sum(
        json.loads(store.record_path(i).read_text())["status"] == "complete"
        for i in ids
        if store.record_path(i).exists()
    )
    say(
        f"{complete} of {len(ids)} runs of {step} complete, {len(new)} packed; "
        f"{len(begun)} unfinished, of which at most {len(chosen)} in {kept} archives"
    )
    return {
        "runs": len(ids),
        "complete": complete,
        "packed": len(new),
        "half_done": len(begun),
        "state_parcels": kept,
    }


def say(line):
    "Print a line, and append it to gpu.log."
    print(line, flush=True)
    with open(LOG, "a") as log:
        log.write(line + "\n")


def call(command, seconds):
    "Run a command, copying its output to gpu.log; returns its status, or 'out of time'."
    import threading

    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        late = threading.Timer(max(1, seconds), child.terminate)
        late.start()
        for line in child.stdout:
            say(line.rstrip())
        status = child.wait()
        late.cancel()
    return "out of time" if status == -15 else status


def perform(options, step, seconds):
    "Run one step; an error does not stop the others."
    from hmoe_repro.core.errors import HmoeError

    say(f"== {step}, {seconds:.0f} s")
    try:
        if (STEPS | SLOTS)[step]:
            return run_training(options, seconds, step)
        if step in BENCHES:
            return run_bench(options, seconds, step)
        return run_check(options, seconds)
    except HmoeError as error:
        reason = str(error)
    except Exception as error:
        import traceback

        say(traceback.format_exc())
        reason = f"{type(error).__name__}: {error}"
    say(f"{step} failed: {reason}")
    return {"ok": False, "reason": reason}


def train_all(options, begun):
    "Perform the steps and slots of a call, and write gpu.json after each; returns what they did."
    from hmoe_repro.core.devices import resolve_device
    from hmoe_repro.core.environment import environment

    for line in unpack_in(options.work):
        say(line)
    options.device = str(resolve_device(options.device))
    path = options.out / "gpu.json"
    before = json.loads(path.read_text())["steps"] if path.exists() else {}
    report = {
        "environment": environment(options.device),
        "profile": options.profile,
        "steps": before,
    }
    steps = list(STEPS) if "all" in options.steps else options.steps
    with shared_gpu(options.device, options.work) as together:
        options.jobs = options.jobs or together
        for step in steps:
            started = time.monotonic()
            left = options.minutes * 60 - (started - begun) - LAST
            if left <= 0:
                done = {"ok": False, "reason": "the time was up"}
            else:
                done = perform(options, step, left)
            report["steps"][step] = done | {"seconds": round(time.monotonic() - started, 1)}
            path.write_text(json.dumps(report, indent=1))
    return [report["steps"][step] for step in steps]


HERE = {"prepare": prepare, "thin": thin, "restore": restore, "slots": list_slots}


def parsed_options():
    "The options of a call; `steps` without the command that precedes them."
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = (*HERE, "unpack", "all", *STEPS, *SLOTS)
    parser.add_argument("steps", nargs="+", choices=known, metavar="STEP")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all steps of this call")
    parser.add_argument("--out", type=Path, default=None, help="folder of the outputs")
    parser.add_argument("--work", type=Path, default=ROOT / ".gpu", help="folder to work in")
    parser.add_argument("--profile", choices=("paper", "smoke"), default="paper")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=None, help="concurrent runs")
    parser.add_argument("--files", type=int, default=8, help="most files in --out")
    parser.add_argument("--mib", type=float, default=16, help="most MiB of each of them")
    parser.add_argument("--part", type=float, default=28, help="most MiB of a file of inputs")
    parser.add_argument("--wheels", nargs="*", default=[], help="packages to take along")
    options = parser.parse_args()
    options.work = options.work.absolute()
    options.command = None
    if options.steps[0] in (*HERE, "unpack"):
        options.command = options.steps.pop(0)
    return options


def main():
    global LOG
    begun = time.monotonic()
    options = parsed_options()
    set_environment(options.work, home=options.command in HERE)
    if options.command in HERE:
        return HERE[options.command](options)
    if options.command == "unpack":
        return unpack_data(options.work)
    options.packed = []
    options.out = (options.out or Path(os.environ.get("OUT") or options.work / "out")).absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    LOG = options.out / "gpu.log"
    install_wheels(options.work)
    done = train_all(options, begun)
    say(f"{time.monotonic() - begun:.0f} s in all; outputs: {options.out}")
    sys.exit(0 if all(step["ok"] for step in done) else 1)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        if type(error).__name__ != "HmoeError":
            raise
        sys.exit(f"gpu.py: {error}")
