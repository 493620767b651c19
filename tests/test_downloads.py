"""Downloads against a server on this machine that does everything a server should not, and the
preparation of every data set from archives as its sources pack them."""

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from trees import cct20, folder_tree, known_tree, packed, picture

import hmoe_repro.data.download as downloading
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.core.files import sha256
from hmoe_repro.data.benchmarks import KNOWN, read_known
from hmoe_repro.data.download import (
    download,
    download_dataset,
    prepare_dataset,
    prepare_given,
    terra_plan,
)

CONTENT = os.urandom(3 * (1 << 20) + 17)
SHA = hashlib.sha256(CONTENT).hexdigest()
QUICK = dict(wait=0.001, retries=3, timeout=5)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with `server.behave(self, start)`; `start` is what the Range header asks for."""

    def do_GET(self):
        asked = self.headers.get("Range")
        self.start = int(asked[6:-1]) if asked else 0
        self.server.asked.append(self.start)
        self.server.behave(self)

    def reply(self, content, status=200, length=None, send=None, **headers):
        self.send_response(status)
        if length is None:
            length = len(content)
        if length >= 0:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content[:send])
        self.wfile.flush()
        self.close_connection = True

    def file(self, content=CONTENT, send=None, mark='"v1"'):
        "The file as a good server sends it; `send` bytes of it, then silence."
        headers = {"ETag": mark} if mark else {}
        if self.start and self.headers.get("If-Range") == mark:
            if self.start >= len(content):
                return self.reply(b"", 416)
            return self.reply(
                content[self.start :],
                206,
                send=send,
                Content_Range=f"bytes {self.start}-{len(content) - 1}/{len(content)}",
                **headers,
            )
        self.reply(content, 200, send=send, **headers)
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads, made.asked, made.handle_error = True, [], lambda *_: None
    made.url = f"http://127.0.0.1:{made.server_port}/file.bin"
    made.behave = lambda h: h.file()
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def whole(folder):
    return (folder / "f").read_bytes() == CONTENT and [p.name for p in folder.iterdir()] == ["f"]


def test_a_good_server_is_asked_once_and_progress_ends_at_the_end(server, tmp_path):
    seen = []
    assert (
        download(
            server.url, tmp_path / "f", SHA, lambda done, total: seen.append((done, total)), **QUICK
        )
        == tmp_path / "f"
    )
    assert whole(tmp_path)
    assert server.asked == [0]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)
    download(server.url, tmp_path / "f", SHA, **QUICK)
    assert server.asked == [0], "a whole file is not asked for again"
    (tmp_path / "f").write_bytes(b"other")
    with pytest.raises(HmoeError, match="f is damaged or another file"):
        download(server.url, tmp_path / "f", SHA, **QUICK)


def test_interruptions_are_continued_not_repeated(server, tmp_path):
    server.behave = lambda h: h.file(send=1 << 20)
    download(server.url, tmp_path / "f", SHA, **QUICK)
    assert whole(tmp_path)
    assert server.asked == [0, 1 << 20, 2 << 20, 3 << 20]


def test_what_arrived_is_kept_for_another_day(server, tmp_path):
    server.behave = lambda h: h.file(send=1 << 20) if h.start == 0 else h.reply(b"", 503)
    with pytest.raises(HmoeError, match="503.*the partial file is kept"):
        download(server.url, tmp_path / "f", SHA, **QUICK)
    assert (tmp_path / "f.part").stat().st_size == 1 << 20
    assert not (tmp_path / "f").exists()
    server.behave, before = lambda h: h.file(), len(server.asked)
    download(server.url, tmp_path / "f", SHA, **QUICK)
    assert whole(tmp_path)
    assert server.asked[before:] == [1 << 20]


def test_a_killed_download_goes_on(server, tmp_path):
    def slowly(h):
        if h.start:
            return h.file()
        h.send_response(200)
        h.send_header("Content-Length", str(len(CONTENT)))
        h.send_header("ETag", '"v1"')
        h.end_headers()
        h.wfile.write(CONTENT[: 1 << 20])
        h.wfile.flush()
        time.sleep(30)
        return None

    server.behave = slowly
    code = (
        "from hmoe_repro.data.download import download; "
        f"download({server.url!r}, {str(tmp_path / 'f')!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ)
    for _ in range(600):
        if (tmp_path / "f.part").exists() and (tmp_path / "f.part").stat().st_size >= 1 << 20:
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    download(server.url, tmp_path / "f", SHA, **QUICK)
    assert whole(tmp_path)
    assert server.asked == [0, 1 << 20]


def test_a_server_without_ranges_starts_anew(server, tmp_path):
    server.behave = lambda h: h.reply(CONTENT, send=1 << 20 if len(server.asked) < 3 else None)
    download(server.url, tmp_path / "f", SHA, **QUICK)
    assert whole(tmp_path)
    assert server.asked == [0, 0, 0]
    (tmp_path / "f").unlink()
    server.asked.clear()
    server.behave = lambda h: h.reply(
        CONTENT, send=1 << 20 if len(server.asked) < 3 else None, ETag='"v1"'
    )  # promises a mark, ignores Range
    download(server.url, tmp_path / "f", SHA, **QUICK)
    assert whole(tmp_path)
    assert server.asked == [0, 1 << 20, 1 << 20]


def test_two_versions_of_a_file_are_never_glued_together(server, tmp_path):
    old = os.urandom(len(CONTENT))
    server.behave = lambda h: (
        h.file(old, send=1 << 20, mark='"old"') if len(server.asked) == 1 else h.file(mark='"new"')
    )
    download(server.url, tmp_path / "f", **QUICK)
    assert whole(tmp_path)
    assert server.asked == [0, 1 << 20]


@pytest.mark.parametrize("ranged", ["bytes 0-9/{n}", "nonsense", ""])
def test_a_continuation_of_something_else_is_not_believed(ranged, server, tmp_path):
    def lying(h):
        if not h.start:
            return h.file(send=(1 << 20) if len(server.asked) == 1 else None)
        h.reply(b"wrong bytes", 206, Content_Range=ranged.format(n=len(CONTENT), s=h.start))
        return None

    server.behave = lying
    download(server.url, tmp_path / "f", **QUICK)
    assert whole(tmp_path)
    assert server.asked == [0, 1 << 20, 0]


def test_weak_marks_are_not_used(server, tmp_path):
    server.behave = lambda h: h.file(
        send=1 << 20 if len(server.asked) == 1 else None, mark='W/"v1"'
    )
    download(server.url, tmp_path / "f", SHA, **QUICK)
    assert whole(tmp_path)
    assert server.asked == [0, 0]


@pytest.mark.parametrize("note", ["", "rubbish", None])
def test_leftovers_that_mean_nothing_are_no_obstacle(note, server, tmp_path):
    (tmp_path / "f.part").write_bytes(b"rubbish" * 1_000_000)
    if note:
        (tmp_path / "f.mark").write_bytes(note.encode("utf-8", "surrogateescape"))
    download(server.url, tmp_path / "f", SHA, **QUICK)
    assert whole(tmp_path)


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_passing_errors_are_tried_again(status, server, tmp_path):
    server.behave = lambda h: h.reply(b"busy", status) if len(server.asked) < 3 else h.file()
    download(server.url, tmp_path / "f", SHA, **QUICK)
    assert whole(tmp_path)
    assert len(server.asked) == 3


@pytest.mark.parametrize("status", [404, 403, 401, 410])
def test_lasting_errors_are_not(status, server, tmp_path):
    server.behave = lambda h: h.reply(b"no", status)
    with pytest.raises(HmoeError, match=f"the server answered {status}.*Fix: try another source"):
        download(server.url, tmp_path / "f", **QUICK)
    assert len(server.asked) == 1
    assert not list(tmp_path.iterdir())


def test_a_server_that_never_gets_further_is_given_up(server, tmp_path):
    server.behave = lambda h: h.reply(CONTENT, send=1000 + 7 * (len(server.asked) % 2))
    with pytest.raises(HmoeError, match="the connection ended after"):
        download(server.url, tmp_path / "f", **QUICK)
    assert len(server.asked) <= 7


def test_silence_ends(server, tmp_path):
    server.behave = lambda h: time.sleep(3)
    started = time.monotonic()
    with pytest.raises(HmoeError, match="timed out"):
        download(server.url, tmp_path / "f", wait=0.001, retries=1, timeout=0.2)
    assert time.monotonic() - started < 3


def test_nobody_there(tmp_path):
    with pytest.raises(HmoeError, match="(?i)refused"):
        download("http://127.0.0.1:9/x", tmp_path / "f", **QUICK)


def test_a_part_that_is_whole_or_too_long_is_fetched_again(server, tmp_path):
    (tmp_path / "f.part").write_bytes(CONTENT + b"more")
    (tmp_path / "f.mark").write_text('"v1"')
    download(server.url, tmp_path / "f", SHA, **QUICK)
    assert whole(tmp_path)
    assert server.asked == [len(CONTENT) + 4, 0]


def test_another_file_is_not_kept(server, tmp_path):
    with pytest.raises(HmoeError, match="SHA-256 " + SHA):
        download(server.url, tmp_path / "f", "0" * 64, **QUICK)
    assert not list(tmp_path.iterdir())


def test_pages_are_not_files(server, tmp_path):
    server.behave = lambda h: h.reply(
        b"<html><title>Google Drive -\n Quota exceeded</title>",
        Content_Type="text/html; charset=utf-8",
    )
    with pytest.raises(HmoeError) as caught:
        download(server.url, tmp_path / "f", **QUICK)
    assert "Quota exceeded" in str(caught.value)
    assert "--archive" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "f").exists()


def test_only_the_web_is_asked(server, tmp_path):
    (tmp_path / "secret").write_text("x")
    for url in ("file:///etc/passwd", "ftp://example.org/x", "data.zip"):
        with pytest.raises(HmoeError, match="not a web address"):
            download(url, tmp_path / "f", **QUICK)
    server.behave = lambda h: h.reply(b"", 302, Location=f"file://{tmp_path / 'secret'}")
    with pytest.raises(HmoeError):
        download(server.url, tmp_path / "f", **QUICK)
    assert not (tmp_path / "f").exists()
    server.behave = lambda h: (
        h.reply(b"", 302, Location="/elsewhere") if h.path != "/elsewhere" else h.file()
    )
    download(server.url, tmp_path / "f", SHA, **QUICK)


def test_a_given_archive_with_one_wrong_bit_leaves_nothing(tmp_path):
    """What `hmoe data download --archive` does with a .tar.gz that was damaged on the way."""
    known_tree(tmp_path / "made", "VLCS", 1)
    archive, data = packed(tmp_path / "made", tmp_path / "x.tar.gz"), tmp_path / "data"
    whole = archive.read_bytes()
    for at in (len(whole) // 3, len(whole) // 2, -6, -2):
        changed = bytearray(whole)
        changed[at] ^= 4
        archive.write_bytes(changed)
        with pytest.raises(HmoeError, match="x.tar.gz is damaged"):
            prepare_given("VLCS", [str(archive)], None, data)
        assert not list(data.iterdir())


def test_sha256_of_a_file(tmp_path):
    (tmp_path / "f").write_bytes(CONTENT)
    assert sha256(tmp_path / "f") == SHA


# Data sets


def served(server, folder):
    "Serve the files of a folder by their names."

    def behave(h):
        file = folder / h.path.lstrip("/")
        h.file(file.read_bytes()) if file.is_file() else h.reply(b"gone", 404)

    server.behave = behave
    base = f"http://127.0.0.1:{server.server_port}/"
    return lambda *names, title="a mirror": {"title": title, "files": {n: base + n for n in names}}


def archives_of(name, folder):
    "Archives of a known data set with the folders that its sources have in them."
    known, made = KNOWN[name], folder / "made"
    if name == "TerraIncognita":
        return cct20(made, 300)[0]
    root = known_tree(made, name, 1)
    if name == "DomainNet":
        paths = []
        for domain in known.domains:
            (made / "one" / domain).mkdir(parents=True)
            (root / domain).rename(made / "one" / domain / domain)
            paths.append(packed(made / "one" / domain, folder / f"{domain}.zip"))
        return paths
    inside = {
        "VLCS": "VLCS",
        "PACS": "kfold",
        "OfficeHome": "OfficeHomeDataset_10072016",
        "SVIRO": "SVIRO_DOMAINBED",
    }.get(name, known.places and known.folder)
    (made / "top").mkdir()
    shutil.move(root, made / "top" / inside if inside else made / "top2")
    return [
        packed(
            made / ("top" if inside else "top2"),
            folder / f"x{'.zip' if name in ('PACS', 'OfficeHome', 'SVIRO') else '.tar.gz'}",
        )
    ]


@pytest.mark.parametrize("name", KNOWN)
def test_every_data_set_is_prepared_from_archives_as_its_sources_pack_them(name, tmp_path):
    archives = archives_of(name, tmp_path)
    prepare_dataset(name, archives, tmp_path / "data")
    assert [p.name for p in (tmp_path / "data").iterdir()] == [KNOWN[name].folder]
    tree = read_known(name, tmp_path / "data")
    assert tree.domain_names == list(KNOWN[name].domains)
    assert all((tree.root / f).is_file() for files in tree.files for f in files)
    with pytest.raises(HmoeError, match="exists already"):
        prepare_dataset(name, archives, tmp_path / "data")


def test_every_data_set_has_a_source_of_the_right_shape():
    assert len(KNOWN["TerraIncognita"].sources) == 2
    for known in KNOWN.values():
        for source in known.sources:
            assert source["files"]
            assert source["title"]
            for file, url in source["files"].items():
                assert url.startswith("http")
                assert file.endswith((".zip", ".tar.gz"))
                assert "drive.usercontent" not in url or url.endswith("&confirm=t")


def slow_terra(tables):
    "What DomainBed's script does: for each image, look through all annotations."
    data = {k: [x for t in tables for x in t[k]] for k in ("categories", "images", "annotations")}
    names, plan = {c["id"]: c["name"] for c in data["categories"]}, {}
    for image in data["images"]:
        if str(image["location"]) not in ("38", "46", "100", "43"):
            continue
        for a in data["annotations"]:
            if (
                a["image_id"] == image["id"]
                and names[a["category_id"]] in KNOWN["TerraIncognita"].classes
            ):
                plan[
                    f"location_{image['location']}/{names[a['category_id']]}/{image['file_name']}"
                ] = image["file_name"]
    return plan


def test_terra_equals_the_slow_way_file_by_file(tmp_path):
    archives, tables = cct20(tmp_path, 300)
    plan = slow_terra(tables)
    assert terra_plan(tables) == plan
    assert len(plan) > 200
    prepare_dataset("TerraIncognita", archives, tmp_path / "data")
    root = tmp_path / "data" / "terra_incognita"
    assert {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*.jpg")} == {
        new: picture("jpg", int(old[:4]) % 6) for new, old in plan.items()
    }


@pytest.mark.parametrize(
    "name, said",
    [
        ("../../escape.jpg", "not in the archive .escape.jpg"),
        ("/etc/x.jpg", "not in the archive .x.jpg"),
        ("missing.jpg", "1 annotated images are not in the archive .missing.jpg"),
    ],
)
def test_annotations_cannot_lead_elsewhere(name, said, tmp_path):
    _, tables = cct20(tmp_path, 60)
    kept = {a["image_id"] for a in tables[0]["annotations"] if a["category_id"] <= 10}
    next(i for i in tables[0]["images"] if i["id"] in kept)["file_name"] = name
    (tmp_path / "b/eccv_18_annotation_files/train_annotations.json").write_text(
        json.dumps(tables[0])
    )
    with pytest.raises(HmoeError, match=said):
        prepare_dataset(
            "TerraIncognita",
            [tmp_path / "images.tar.gz", packed(tmp_path / "b", tmp_path / "changed.tar.gz")],
            tmp_path / "data",
        )
    assert not list((tmp_path / "data").iterdir())


def test_sources_are_tried_in_order_and_each_failure_is_said(server, tmp_path):
    (tmp_path / "site").mkdir()
    mirror = served(server, tmp_path / "site")
    shutil.move(archives_of("PACS", tmp_path)[0], tmp_path / "site" / "good.zip")
    folder_tree(tmp_path / "half", list(KNOWN["PACS"].domains)[:3], KNOWN["PACS"].classes)
    packed(tmp_path / "half", tmp_path / "site" / "half.zip")
    (tmp_path / "site" / "cut.zip").write_bytes(
        (tmp_path / "site" / "good.zip").read_bytes()[:5000]
    )
    bad = (
        mirror("gone.zip", title="first"),
        mirror("cut.zip", title="second"),
        mirror("half.zip", title="third"),
    )
    with pytest.raises(HmoeError) as caught:
        download_dataset("PACS", tmp_path / "data", bad, **QUICK)
    said = str(caught.value)
    assert "first failed: http" in said
    assert "404" in said
    assert "second failed: cut.zip is damaged" in said
    assert "third failed: the archives contain no sketch" in said
    assert "--archive" in said
    assert "\n" not in said
    assert not (tmp_path / "data" / "PACS").exists()
    lines = download_dataset(
        "PACS", tmp_path / "data", (*bad, mirror("good.zip", title="fourth")), **QUICK
    )
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["PACS"]
    assert "PACS: from fourth" in lines
    assert any("9,991" in line for line in lines)
    assert sum("failed" in line for line in lines) == 3
    assert download_dataset("PACS", tmp_path / "data", bad)[0] == "PACS is there already"


def test_files_that_arrived_are_not_fetched_again(server, tmp_path):
    (tmp_path / "site").mkdir()
    mirror = served(server, tmp_path / "site")
    paths = archives_of("DomainNet", tmp_path)
    for p in paths[:5]:
        shutil.move(p, tmp_path / "site" / p.name)
    source = mirror(*(p.name for p in paths))
    with pytest.raises(HmoeError, match="sketch.zip: the server answered 404"):
        download_dataset("DomainNet", tmp_path / "data", (source,), **QUICK)
    shutil.move(paths[5], tmp_path / "site" / paths[5].name)
    before = len(server.asked)
    seen = []
    download_dataset(
        "DomainNet",
        tmp_path / "data",
        (source,),
        on_progress=lambda what, *_: seen.append(what),
        **QUICK,
    )
    assert len(server.asked) == before + 1
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["domain_net"]
    assert set(seen) == {"sketch.zip", "unpacking DomainNet"}


def test_a_half_downloaded_folder_of_the_user_is_not_touched(tmp_path):
    root = known_tree(tmp_path, "PACS", 1)
    shutil.rmtree(root / "sketch")
    with pytest.raises(HmoeError, match="PACS lacks sketch"):
        download_dataset("PACS", tmp_path, ())
    assert (root / "photo").is_dir()


def test_given_archives_files_or_addresses(server, tmp_path):
    (archive,) = archives_of("VLCS", tmp_path)
    sha = sha256(archive)
    with pytest.raises(HmoeError, match="damaged or another file: SHA-256"):
        prepare_given("VLCS", [str(archive)], ["0" * 64], tmp_path / "data")
    with pytest.raises(HmoeError, match="does not exist"):
        prepare_given("VLCS", [str(tmp_path / "no.zip")], None, tmp_path / "data")
    prepare_given("VLCS", [str(archive)], [sha.upper()], tmp_path / "data")
    assert archive.exists()
    assert (tmp_path / "data" / "VLCS").is_dir()
    shutil.rmtree(tmp_path / "data")
    served(server, tmp_path)
    prepare_given(
        "VLCS",
        [f"http://127.0.0.1:{server.server_port}/{archive.name}"],
        [sha],
        tmp_path / "data",
        **QUICK,
    )
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["VLCS"]


def test_a_fetched_archive_that_is_unfit_is_not_taken_for_another(server, tmp_path):
    (archive,) = archives_of("VLCS", tmp_path)
    source = served(server, tmp_path)
    for folder in "ab":
        (tmp_path / folder).mkdir()
    url = f"http://127.0.0.1:{server.server_port}/"

    def fetch(path):
        return prepare_given("VLCS", [url + path], None, tmp_path / "data", **QUICK)

    packed(tmp_path / "made" / "VLCS" / "SUN09", tmp_path / "a" / "x.zip")
    (tmp_path / "b" / "x.zip").write_bytes(archive.read_bytes()[:-50])
    for path, said in (("a/x.zip", "the archives contain no"), ("b/x.zip", "x.zip is damaged")):
        with pytest.raises(HmoeError, match=said):
            fetch(path)
        assert not [p for p in (tmp_path / "data").rglob("*") if p.is_file()]
    with pytest.raises(HmoeError, match="the archives contain no"):
        download_dataset("VLCS", tmp_path / "data", (source("a/x.zip"),), **QUICK)
    assert not [p for p in (tmp_path / "data").rglob("*") if p.is_file()]
    for folder in "ab":
        (tmp_path / folder / "x.zip").write_bytes(archive.read_bytes())
    fetch("b/x.zip")
    with pytest.raises(HmoeError, match="exists already"):
        fetch("nothing there to ask for")
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["VLCS"]


def test_what_was_fetched_stays_where_the_disk_is_at_fault(server, tmp_path, monkeypatch):
    (archive,) = archives_of("VLCS", tmp_path)
    source = served(server, tmp_path)

    def full(*_):
        raise HmoeError("VLCS needs 9.0 GiB, here has 1.0 GiB free.")

    with monkeypatch.context() as patched:
        patched.setattr(downloading, "prepare_dataset", lambda *_: full())
        with pytest.raises(HmoeError, match="GiB free"):
            download_dataset("VLCS", tmp_path / "data", (source(archive.name),), **QUICK)
    assert [p.name for p in (tmp_path / "data").rglob("*") if p.is_file()] == [archive.name]


@pytest.mark.slow
def test_a_killed_preparation_leaves_nothing_that_is_taken_for_data(tmp_path):
    (archive,) = archives_of("VLCS", tmp_path)
    code = (
        "import time; from hmoe_repro.data.download import prepare_dataset; "
        f"prepare_dataset('VLCS', [{str(archive)!r}], {str(tmp_path / 'data')!r}, "
        "lambda n: time.sleep(0.05))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ)
    for _ in range(900):
        if list((tmp_path / "data").rglob("*.jpg")):
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert list((tmp_path / "data").rglob("*.jpg"))
    assert not (tmp_path / "data" / "VLCS").exists()
    prepare_dataset("VLCS", [archive], tmp_path / "data")
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["VLCS"]


def test_progress_names_what_it_counts(server, tmp_path):
    """`on_progress(what, done, total, unit)`: first the file that comes, then what is unpacked."""
    (archive,) = archives_of("VLCS", tmp_path)
    source, states = served(server, tmp_path)(archive.name), []
    download_dataset(
        "VLCS", tmp_path / "data", (source,), lambda *state: states.append(state), **QUICK
    )
    file, size = archive.name, states[0][2]
    assert (file, size, size, "B") in states
    assert states[-1][0] == "unpacking VLCS"
    assert {state[0] for state in states} == {file, "unpacking VLCS"}
    assert all(unit == "B" for *_, unit in states)
