"""Whatever is thrown at a command: one line that names the cause and the fix, within seconds; no
traceback, no hang, and nothing of what is finished is lost."""

import gzip
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import warnings

import pytest
from commands import hmoe

from hmoe_repro.algorithms import from_file
from hmoe_repro.apps.own_images import image_files
from hmoe_repro.core.config import CONFIG
from hmoe_repro.core.errors import HmoeError, printable, system_error
from hmoe_repro.core.toml import line_of
from hmoe_repro.data.image_folder import walk
from hmoe_repro.studies.filters import shard
from hmoe_repro.studies.plan import missing_runs
from hmoe_repro.training.planning import make_config
from hmoe_repro.training.run import run
from hmoe_repro.training.store import RunStore

STUDY = """title = "Mine"
algorithms = ["ERM"]
datasets = ["DigitDomainsTiny"]
test_domains = ["sketch"]
seeds = 1
steps = 2
checkpoint_frequency = 1
network = "small_cnn"
"""


class Late(BaseException):
    "No command catches it."


@pytest.fixture(autouse=True)
def soon():
    "Fails whatever takes longer than two minutes, beside other work: a hang is a defect."

    def late(*_):
        raise Late("still running after 120 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def told(done, *words, status=1):
    "A command ended in one line on standard error, with these words."
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("hmoe: note: ")]
    assert "Traceback" not in done.stderr, done.stderr
    assert lines, done.stderr
    assert lines[-1].startswith("hmoe: "), done.stderr
    for word in words:
        assert word in done.stderr, (word, done.stderr)
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A store with two finished runs."
    store = RunStore(tmp_path_factory.mktemp("trained") / "runs")
    for seed in (0, 1):
        config = make_config(
            "ERM", "DigitDomainsTiny", ["sketch"], trial_seed=seed, steps=2, network="small_cnn"
        )
        run(config, store)
    return store


def copy_of(store, folder):
    "The same runs in a folder of their own."
    subprocess.run(["cp", "-r", str(store.folder), str(folder / "runs")], check=True)
    return RunStore(folder / "runs")


def changed(record, **values):
    return json.dumps(json.loads(record) | values)


DAMAGED = {
    "deep": lambda text: "[" * 100_000 + "]" * 100_000,
    "digits": lambda text: text.replace('"trial_seed": 0', f'"trial_seed": {"9" * 5000}'),
    "domains": lambda text: text.replace('"test_domains": [', '"test_domains": 5, "x": ['),
    "no config": lambda text: changed(text, config=[]),
    "checkpoints": lambda text: changed(text, checkpoints=[3]),
    "selected": lambda text: changed(text, selected={"default": 3}),
    "status": lambda text: changed(text, status="done"),
    "time": lambda text: changed(text, wall_time_s="long"),
    "environment": lambda text: changed(text, environment=3),
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "bytes": lambda text: "\udcff",
    "endless": lambda text: changed(text, wall_time_s=10**400),
}


@pytest.fixture(params=DAMAGED)
def one_damaged(request, trained, tmp_path):
    "A store of two runs, one of them damaged: (store, id of the damaged run)."
    store = copy_of(trained, tmp_path)
    path = min(
        store.folder.glob("*/record.json"),
        key=lambda p: json.loads(p.read_text())["config"]["trial_seed"],
    )
    text = DAMAGED[request.param](path.read_text())
    assert text != path.read_text()
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return store, path.parent.name


def test_a_damaged_record_is_named_and_left_out_by_every_command(one_damaged, tmp_path):
    store, bad = one_damaged
    study = STUDY.replace("seeds = 1", "seeds = 2").replace("checkpoint_frequency = 1\n", "")
    (tmp_path / "mine.toml").write_text(study)
    done = hmoe("runs", folder=tmp_path)
    assert "1 runs" in done.stdout
    assert bad in told(done, "1 record cannot be read").stderr
    done = hmoe("pack", "all.tar.gz", folder=tmp_path)
    assert done.returncode == 0
    assert "1 finished" in done.stdout
    assert bad in done.stderr
    done = hmoe("plan", "mine.toml", folder=tmp_path)
    assert done.returncode == 0
    assert "inf" not in done.stdout
    assert hmoe("select", folder=tmp_path).returncode == 0
    done = hmoe("select", "mine.toml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert bad in done.stderr, done.stderr
    before = store.record_path(bad).read_bytes()
    with pytest.warns(UserWarning, match=bad):
        assert store.read_or_warn(bad) is None
    assert store.record_path(bad).read_bytes() == before, "what is damaged is never overwritten"


SPECIAL = {
    "fifo": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "sparse": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 2**36),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["record.json", "arrays.safetensors"])
def test_a_special_file_in_a_run_is_named(kind, name, trained, tmp_path):
    store = copy_of(trained, tmp_path)
    path = min(store.folder.glob("*/record.json")).with_name(name)
    path.unlink(missing_ok=True)
    SPECIAL[kind](path)
    if name == "record.json":
        told(hmoe("runs", folder=tmp_path), "1 record cannot be read", str(path))
        assert hmoe("plan", folder=tmp_path).returncode == 0
    else:
        told(hmoe("pack", "a.tar.gz", folder=tmp_path), str(path))
    told(hmoe("merge", "runs", HMOE_RUNS=str(tmp_path / "other"), folder=tmp_path), str(path))


def test_what_holds_no_run_is_not_merged(tmp_path):
    images(tmp_path / "im", 1)
    told(hmoe("merge", "im", folder=tmp_path), "im holds no run")


@pytest.mark.slow
def test_a_sweep_counts_a_damaged_record_as_a_failed_run(trained, tmp_path):
    store = copy_of(trained, tmp_path)
    config = make_config("ERM", "DigitDomainsTiny", ["sketch"], steps=2, network="small_cnn")
    other = config.replace(trial_seed=3)
    store.record_path(config.run_id).write_text("{")
    from hmoe_repro.studies.sweep import sweep

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ended = sweep([config, other], store=store, device="cpu", jobs=1)
    assert ended[config.run_id][0] == "failed"
    assert "cut or not JSON" in ended[config.run_id][1]
    assert ended[other.run_id][0] == "complete"
    assert store.record_path(config.run_id).read_text() == "{"


def archive_with(tmp_path, members):
    "A .tar.gz of (name, content, header) members."
    path = tmp_path / "a.tar.gz"
    with gzip.open(path, "wb") as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content, headers in members:
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = len(content), headers
            archive.addfile(member, io.BytesIO(content))
    return path


def test_a_damaged_record_in_an_archive_is_left_out_and_the_others_are_added(trained, tmp_path):
    import hashlib

    members = []
    for i, path in enumerate(sorted(trained.folder.glob("*/record.json"))):
        content = b"[" * 100_000 if i else path.read_bytes()
        digest = {"HMOE.sha256": hashlib.sha256(content).hexdigest()}
        members.append((f"{path.parent.name}/record.json", content, digest))
    archive_with(tmp_path, members)
    done = hmoe("unpack", "a.tar.gz", folder=tmp_path)
    assert done.returncode == 0
    assert "1 run added" in done.stdout
    assert "left out" in done.stderr


def test_a_member_that_says_it_is_huge_is_refused_before_it_is_read(trained, tmp_path):
    path, member = tmp_path / "a.tar", tarfile.TarInfo("0123456789ab/state.safetensors")
    member.size = 64 * 2**30
    path.write_bytes(member.tobuf(tarfile.GNU_FORMAT))
    told(hmoe("unpack", "a.tar", folder=tmp_path), "68,719,476,736 bytes")


# -- study files


BAD_STUDIES = {
    "seeds = 1\n": {
        "seeds = 10000000\n": "at most 10,000",
        "seeds = [18446744073709551616]\n": "less than 4294967296",
        "seeds = 100000000000\n": "at most 10,000",
        f"seeds = {'9' * 5000}\n": "thousands of digits",
        "seeds = 9000\nrestarts = 9000\n": "more than 100,000 runs",
    },
    "steps = 2\n": {
        "steps = 100000000000000000000\n": "less than or equal to 1000000000",
        "steps = 2\nresolution = 1000000000\n": "less than or equal to 8192",
        "steps = 2\n[hparams.all]\nbatch_size = 100000000000000000000\n": "batch_size",
        "steps = 2\n[hparams.all]\nbatch_size = 10000000\n": "at most 65536",
        "steps = 2\n[search]\ntrials = 100000000\n": "less than or equal to 10000",
        'steps = 2\nprotocol = "dmg"\nsplits = "nowhere"\n': "nowhere",
        'steps = 2\nprecisions = ["bf16-compile"]\ndeterminism = "portable"\n': "exclude each",
    },
    'network = "small_cnn"\n': {
        'network = "no_such_net"\n': "no_such_net",
        "[grid]\n"
        + "".join(f"h{i} = [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" for i in range(9)): "too large",
        "x = " + "[" * 2000 + "]" * 2000 + "\n": "",
        "#" + "x" * 200_000 + "\n": "limit of a settings file",
    },
    '["sketch"]\n': {'[["negative", "photo", "plain", "sketch"]]\n': "leave a training domain"},
}
CASES = [(old, new, said) for old, those in BAD_STUDIES.items() for new, said in those.items()]


@pytest.mark.parametrize("old, new, said", CASES, ids=[new[:40] for _, new, _ in CASES])
def test_a_study_that_cannot_be_trained_is_refused_by_plan(old, new, said, tmp_path):
    (tmp_path / "mine.toml").write_text(STUDY.replace(old, new))
    told(hmoe("plan", "mine.toml", folder=tmp_path), said)


def test_the_line_of_a_mistake_is_found_in_a_long_file():
    text = "".join(f"a{i} = {i}\n" for i in range(4000)) + "[t]\nb = [\n1,\n2]\n"
    assert line_of(text, "a3999") == 4000
    assert line_of(text, "t", "b") == 4002
    assert line_of(text, "t", "b", 1) == 4004
    assert line_of(text, "t", "c") == 1


@pytest.mark.parametrize("name", ["fifo.toml", "fifo.tar.gz", "fifo.csv"])
def test_a_fifo_is_refused_at_once(name, tmp_path):
    os.mkfifo(tmp_path / name)
    command = {"toml": "plan", "gz": "unpack"}.get(name.rpartition(".")[2])
    if command:
        told(hmoe(command, name, folder=tmp_path), "no regular file")
    else:
        images(tmp_path / "im", 30)
        told(hmoe("discover", "im", "--labels", name, folder=tmp_path), "no regular file")


# -- folders of images


def images(folder, count, suffix=".png"):
    from PIL import Image

    folder.mkdir(parents=True)
    for i in range(count):
        Image.new("RGB", (8, 8), (i, 2 * i, 3 * i)).save(folder / f"{i}{suffix}")
    return folder


def tree(tmp_path, suffix=".png"):
    for domain in ("a", "b"):
        for name in ("cat", "dog"):
            images(tmp_path / "own" / domain / name, 3, suffix)
    return tmp_path / "own"


@pytest.mark.parametrize("special", ["fifo", "zero"])
def test_what_never_ends_is_no_image(special, tmp_path, own_names):
    path = tree(tmp_path) / "a" / "cat" / "x.png"
    os.mkfifo(path) if special == "fifo" else path.symlink_to("/dev/zero")
    done = hmoe("data", "verify", "own", folder=tmp_path)
    assert done.returncode == 1
    assert "unreadable: a/cat/x.png: " in done.stdout
    train = ("train", "--algorithm", "ERM", "--dataset", "own", "--test-domain", "a")
    told(hmoe(*train, "--network", "image_cnn", "--steps", "1", folder=tmp_path), "x.png")


def test_folders_that_lead_in_circles_or_go_deep_are_refused(tmp_path):
    for i in range(9):
        (tmp_path / "links" / str(i)).mkdir(parents=True)
    for i in range(9):
        for j in range(9):
            (tmp_path / "links" / str(i) / f"l{j}").symlink_to(tmp_path / "links" / str(j))
    with pytest.raises(HmoeError, match="remove circular links"):
        walk(tmp_path / "links")
    here = tmp_path / "deep"
    for _ in range(60):
        here = here / "d"
    here.mkdir(parents=True)
    with pytest.raises(HmoeError, match="50 inside each other"):
        walk(tmp_path / "deep")


def test_a_huge_image_is_refused_before_it_is_decoded(tmp_path):
    from PIL import Image

    from hmoe_repro.data.transforms import read_image

    path = tmp_path / "x.png"
    Image.new("1", (13_000, 13_000)).save(path)
    with pytest.raises(HmoeError, match="more than 64,000,000 pixels"):
        read_image(path)


@pytest.mark.parametrize("suffix", [".gif", ".tif", ".tiff", ".ppm"])
def test_further_kinds_of_images_are_read(suffix, tmp_path, own_names):
    done = hmoe("data", "verify", str(tree(tmp_path, suffix)), folder=tmp_path)
    assert done.returncode == 0
    assert "every image can be read" in done.stdout


LABELS = {
    'file,domain\n"a/0.png,x\n': "labels.csv",
    "file,domain\n0.png,x\0\n": "NUL",
    "file,domain\n0.png,x\n0.png,y\n": "two domains of '0.png'",
    "a,b\n1,2\n": "labels.csv",
    "file,domain\n": "no rows",
    "file,domain\n0.png\n": "rows of different lengths",
    "file,domain\n0.png,x,y\n": "rows of different lengths",
}


@pytest.mark.parametrize("text", LABELS, ids=range(len(LABELS)))
def test_labels_are_read_strictly(text, tmp_path):
    images(tmp_path / "im", 30)
    (tmp_path / "labels.csv").write_text(text)
    told(hmoe("discover", "im", "--labels", "labels.csv", folder=tmp_path), LABELS[text])


def test_no_name_of_a_file_becomes_a_formula_or_moves_the_cursor():
    import pandas as pd

    from hmoe_repro.apps.predict import predictions_csv

    table = pd.DataFrame({"file": ["=1+1.png", "a.png"], "p": [-0.5, 0.5]})
    assert predictions_csv(table) == b"file,p\n'=1+1.png,-0.5000\na.png,0.5000\n"
    assert printable("a\x1b[2J\nb\udcff") == r"a\x1b[2J\nb\udcff"


def test_a_domain_whose_name_moves_the_cursor_is_written_out(tmp_path, own_names):
    (tree(tmp_path) / "a").rename(tmp_path / "own" / "a\x1b[2J\nb")
    done = hmoe("data", "verify", "own", folder=tmp_path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    assert r"a\x1b[2J\nb" in done.stdout


def test_files_that_are_no_images_are_named(tmp_path):
    (images(tmp_path / "im", 30) / "x.pdf").write_bytes(b"1")
    with pytest.warns(UserWarning, match="1 file left out.*x.pdf.*document"):
        assert len(image_files(tmp_path / "im")) == 30


# -- code of the user's

LOOP = "x = 1\nwhile True:\n    x += 1\n"
IN_FUNCTION = "def Mine():\n    while True:\n        pass\n"


@pytest.mark.parametrize("text", [LOOP, IN_FUNCTION], ids=["imported", "called"])
@pytest.mark.parametrize("option", ["--algorithm", "--dataset"])
def test_a_file_that_never_ends_is_stopped(option, text, tmp_path, monkeypatch, own_names):
    if (option, text) == ("--algorithm", IN_FUNCTION):
        text = "class Mine:\n    for i in iter(int, 1):\n        pass\n"
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.setenv("HMOE_FILE_SECONDS", "1")
    given = {"--algorithm": "ERM", "--dataset": "DigitDomainsTiny", option: "mine.py:Mine"}
    words = [word for pair in given.items() for word in pair]
    done = hmoe("train", *words, "--test-domain", "sketch", "--steps", "1", folder=tmp_path)
    told(done, "still running after 1 s, the limit HMOE_FILE_SECONDS", "line", "mine.py")
    assert signal.getsignal(signal.SIGALRM).__name__ == "late"
    assert signal.alarm(60) > 60


@pytest.mark.slow
@pytest.mark.parametrize("method", ["__init__", "update", "predict"])
def test_an_algorithm_of_a_file_that_never_ends_is_a_failed_run(
    method, tmp_path, monkeypatch, own_names
):
    "Its limit is ten times that of an import; here five times."
    importlib.import_module("torch._dynamo")  # by the first update, which takes seconds
    (tmp_path / "mine.py").write_text(
        "from hmoe_repro.algorithms.base import ERM\n\n\nclass Mine(ERM):\n"
        f"    def {method}(self, *given, **named):\n        while True:\n            pass\n"
    )
    monkeypatch.setenv("HMOE_FILE_SECONDS", "1")
    monkeypatch.setattr(from_file, "UPDATE_LIMIT", 5)
    done = hmoe("train", "--algorithm", "mine.py:Mine", "--dataset", "DigitDomainsTiny",
        "--test-domain", "sketch", "--steps", "1", folder=tmp_path)  # fmt: skip
    told(done, "Mine failed in line", "of mine.py", "after 5 s, 5 times")


def test_a_limit_that_is_no_number_is_refused(tmp_path, monkeypatch, own_names):
    (tmp_path / "mine.py").write_text("")
    monkeypatch.setenv("HMOE_FILE_SECONDS", "soon")
    done = hmoe("train", "--algorithm", "mine.py:Mine", "--dataset", "DigitDomainsTiny",
        "--test-domain", "sketch", folder=tmp_path)  # fmt: skip
    told(done, "HMOE_FILE_SECONDS=soon is not a number of seconds")


@pytest.mark.parametrize("option", ["--algorithm", "--dataset"])
def test_a_fifo_is_no_python_file(option, tmp_path, own_names):
    os.mkfifo(tmp_path / "mine.py")
    given = {"--algorithm": "ERM", "--dataset": "DigitDomainsTiny", option: "mine.py:Mine"}
    words = [word for pair in given.items() for word in pair]
    done = hmoe("train", *words, "--test-domain", "sketch", folder=tmp_path)
    told(done, "mine.py", "no regular file")


# -- options and the environment


@pytest.mark.parametrize(
    "words, said, status",
    [
        (("sweep", "smoke-toy", "--minutes", "inf"), "--minutes", 2),
        (("sweep", "smoke-toy", "--shard", "4/3"), "'4/3' is no part", 1),
        (("sweep", "smoke-toy", "--shard", "0/0"), "is no part", 1),
        (("sweep", "smoke-toy", "--n-hparams", "100000000"), "--n-hparams", 2),
        (("plan", "~nosuchuser/x.toml"), "~nosuchuser/x.toml", 1),
        (("plan", "x" * 300 + ".toml"), "File name too long", 1),
        (("plan", "a\0b.toml"), "as study", 1),
        (("train", "--algorithm", "ERM", "--dataset", "DigitDomainsTiny", "--test-domain", "sketch",
          "--device", "hpu"), "hpu", 1),
        (("train", "--algorithm", "ERM", "--dataset", "DigitDomainsTiny", "--test-domain", "sketch",
          "--seed", "18446744073709551616"), "less than 4294967296", 1),
        (("train", "--algorithm", "ERM", "--dataset", "DigitDomainsTiny", "--test-domain", "sketch",
          "--set", "lr=" + "9" * 5000), "lr", 1),
        (("train", "--algorithm", "ERM", "--dataset", "DigitDomainsTiny", "--test-domain", "sketch",
          "--n-hparams", "100000000"), "--n-hparams", 2),
        (("predict", ".", "--model", "*"), "'*'", 1),
        (("predict", ".", "--model", "3f2c*"), "'3f2c*'", 1),
        (("export", "[0-9]f"), "'[0-9]f'", 1),
        (("select", "--n-hparams", "1000000000"), "--n-hparams", 2),
        (("pack", "~nosuchuser/x.tar.gz"), "~nosuchuser", 1),
        (("selct",), "Did you mean 'select'? Fix:", 2),
        (("unpack", "nowhere.tar.gz"), "nowhere.tar.gz", 1),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)  # fmt: skip
def test_an_option_out_of_bounds_is_one_line(words, said, status, tmp_path):
    told(hmoe(*words, folder=tmp_path), said, status=status)


def test_a_variable_that_is_no_number_is_named(tmp_path, monkeypatch):
    code = "from hmoe_repro.core.config import CONFIG; print(CONFIG.workers)"
    env = os.environ | {"HMOE_WORKERS": "abc"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    monkeypatch.setattr(CONFIG, "workers", int(done.stdout))
    told(hmoe("runs", folder=tmp_path), "HMOE_WORKERS")


def test_a_store_is_not_made_by_commands_that_only_read(tmp_path):
    for command in ("runs", "plan"):
        assert hmoe(command, folder=tmp_path).returncode == 0
        assert command == "plan" or not (tmp_path / "runs").exists()


# -- a full disk


def small_disk(folder, size):
    "A file system of `size` in `folder`; skips where none can be mounted."
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")


@pytest.mark.slow
def test_a_full_disk_stops_a_sweep_in_one_line_and_goes_on_when_there_is_room(tmp_path):
    disk = tmp_path / "runs"
    small_disk(disk, "300k")
    try:
        (tmp_path / "mine.toml").write_text(STUDY.replace("seeds = 1", "seeds = 4"))
        done = hmoe("sweep", "mine.toml", "--jobs", "1", folder=tmp_path)
        told(done, "No space left on device", "make room")
        kept = {p: p.read_bytes() for p in disk.glob("*/record.json")}
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        assert hmoe("sweep", "mine.toml", "--jobs", "1", folder=tmp_path).returncode == 0
        assert len(list(disk.glob("*/record.json"))) == 4
        assert all(path.read_bytes() == content for path, content in kept.items())
    finally:
        subprocess.run(["umount", str(disk)], check=False)


def test_what_the_system_refuses_names_the_file():
    full = system_error(OSError(28, "No space left on device", "/x/y"))
    assert str(full).startswith("No space left on device: /x/y. Fix: make room")
    other = str(system_error(OSError(5, "Input/output error", "/x")))
    assert other.startswith("Input/output error: /x. Fix: ")
    assert "make room" not in other


# -- parts of a sweep


def test_parts_are_disjoint_whole_and_the_same_everywhere():
    base = make_config("ERM", "DigitDomainsTiny", ["sketch"], steps=2, network="small_cnn")
    configs = [base.replace(trial_seed=i) for i in range(23)]
    for n in (1, 2, 3, 20, 30):
        parts = [shard(configs, f"{i}/{n}") for i in range(1, n + 1)]
        assert sorted(s.run_id for p in parts for s in p) == sorted(s.run_id for s in configs)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        again = [{s.run_id for s in shard(configs[::-1], f"{i}/{n}")} for i in range(1, n + 1)]
        assert again == [{s.run_id for s in p} for p in parts]


@pytest.mark.slow
def test_shards_trained_apart_and_merged_are_the_sweep(tmp_path):
    (tmp_path / "mine.toml").write_text(STUDY.replace("seeds = 1", "seeds = 3"))
    for i in (1, 2):
        where = {"HMOE_RUNS": str(tmp_path / f"part{i}")}
        assert not hmoe("sweep", "mine.toml", "--shard", f"{i}/2", "--jobs", "1", folder=tmp_path,
                        **where).returncode  # fmt: skip
    assert {len(list((tmp_path / f"part{i}").glob("*/record.json"))) for i in (1, 2)} == {1, 2}
    done = hmoe("merge", "part1", "part2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    from hmoe_repro.studies.studies import study_configs

    configs = study_configs(str(tmp_path / "mine.toml"))
    assert not missing_runs(configs, RunStore(tmp_path / "runs"))
    assert hmoe("merge", "part1", "nowhere", folder=tmp_path).returncode == 1
