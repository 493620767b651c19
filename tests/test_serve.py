"""The server of the page on which groups are corrected, asked by clients that do not behave."""

import csv
import hashlib
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from hmoe_repro.apps import correct_groups as module
from hmoe_repro.apps.correct_groups import (
    THUMBNAIL_SIDE,
    GroupServer,
    Pictures,
    Refusal,
    check_groups,
    has_corrections,
)
from hmoe_repro.apps.discover import WRITTEN_FILE, category_colours
from hmoe_repro.apps.own_images import image_files, read_corrected_groups, write_corrected_groups
from hmoe_repro.cli.discover_predict import _shows_last_groups
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.data.transforms import read_image

HACK = "<img src=x onerror=alert(1)>.png"
FORMULA = "=1+1.png"
COUNT = 12


def fill(root, count=COUNT):
    "Pictures of one grey each, `10 * i`; two of them have hostile names."
    root.mkdir()
    names = [HACK, FORMULA, *(f"picture {i:02d}.png" for i in range(count - 2))]
    for i, name in enumerate(sorted(names)):
        Image.new("RGB", (40, 30), (10 * i,) * 3).save(root / name)
    return root


def write_table(folder, output, names=("one", "two")):
    "Groups of the files of a folder in turn, all found; the first two are borderline."
    output.mkdir(exist_ok=True)
    files = image_files(folder)
    found = [names[i % len(names)] for i in range(len(files))]
    confidence = [0.1 if i < 2 else 0.9 for i in range(len(files))]
    table = pd.DataFrame({"file": files, "group": found, "confidence": confidence, "found": found})
    write_corrected_groups(output / "groups.csv", table.assign(borderline=table.confidence < 0.8))


@contextmanager
def serving(folder, output, **options):
    server = GroupServer(folder, output, **options)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.close()
        thread.join(10)


@pytest.fixture
def place(tmp_path):
    folder = fill(tmp_path / "my <b>pictures")
    write_table(folder, tmp_path / "out")
    return folder, tmp_path / "out"


@pytest.fixture
def server(place):
    with serving(*place) as server:
        yield server


def ask(server, path, body=None, method=None, token=None, **headers):
    "(status, headers, body) of a request, as a browser or a program sends it."
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    method = method or ("GET" if body is None else "POST")
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    if body is not None:
        headers = {"Content-Type": "application/json"} | headers
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    token = server.token if token is None else token
    connection.request(method, f"/{token}/{path}", body, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


def raw(server, content, wait=10.0):
    "Everything that the server answers to some bytes, until it closes the connection."
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=wait) as connection:
        connection.sendall(content)
        received = b""
        while True:
            try:
                part = connection.recv(65536)
            except TimeoutError:
                return received
            if not part:
                return received
            received += part


def request(server, line, *headers, body=b""):
    "The bytes of a request, with the right host unless `headers` have one."
    lines = [line.replace("TOKEN", server.token), *headers]
    if not any(header.lower().startswith("host:") for header in headers):
        lines.append(f"Host: 127.0.0.1:{server.server_port}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def status_of(answer):
    return int(answer.split(b" ", 2)[1])


def listing(server):
    status, _, body = ask(server, "images")
    assert status == 200
    return json.loads(body)


def groups_of(listed, rename=None):
    return [
        {"name": (rename or {}).get(g["name"], g["name"]), "images": g["images"]}
        for g in listed["groups"]
    ]


PATHS = ("", "images", "training", "report", "thumbnail/0", "picture/0", "nothing", "thumbnail/x")
POSTS = ("save", "train", "stop", "done", "nothing", "")


# Who may ask


def test_it_listens_on_this_computer_only(server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/{server.token}/", server.address)


def test_every_server_has_another_long_token(place):
    tokens = set()
    for _ in range(5):
        with serving(*place) as server:
            tokens.add(server.token)
    assert len(tokens) == 5
    assert all(len(token) >= 43 for token in tokens)


@pytest.mark.parametrize("wrong", ["", "x", "same length", "longer", "case", "é", "%00"])
def test_no_request_is_answered_without_the_token(server, wrong):
    token = server.token
    given = {
        "same length": "A" * len(token),
        "longer": token + "A",
        "case": token.swapcase(),
        "é": "%C3%A9" * 10,
    }.get(wrong, wrong)
    for path in PATHS:
        status, _, body = ask(server, path, token=given)
        assert status == 403, path
        assert token.encode() not in body
    for path in POSTS:
        assert ask(server, path, {}, token=given)[0] == 403, path
    assert listing(server)["version"] == 1


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/favicon.ico",
        "//TOKEN/",
        "/x/TOKEN/",
        "TOKEN/",
        "/TOKEN",
        "*",
        "http://127.0.0.1/TOKEN/",
        "/?TOKEN",
        "/%2e/TOKEN/",
    ],
)
def test_the_token_counts_only_at_its_place(server, path):
    answer = raw(server, request(server, f"GET {path} HTTP/1.1"))
    assert status_of(answer) in (403, 404) or path == "//TOKEN/"  # which is read as /TOKEN/
    assert b"<script" not in answer or path == "//TOKEN/"


HOSTS = (
    "evil.example",
    "evil.example:{port}",
    "127.0.0.1",
    "127.0.0.1:1",
    "localhost",
    "127.0.0.1:{port}.evil.example",
    "[::1]:{port}",
    "0.0.0.0:{port}",
    "LOCALHOST:{port}",
    " ",
    "127.0.0.1:{port}, evil.example",
)


@pytest.mark.parametrize("host", HOSTS)
def test_another_host_is_refused(server, host):
    "A name that its owner points to 127.0.0.1 (DNS rebinding)."
    host = host.format(port=server.server_port)
    for path in PATHS:
        answer = raw(server, request(server, f"GET /TOKEN/{path} HTTP/1.1", f"Host: {host}"))
        assert status_of(answer) == 403, path
    body = request(
        server,
        "POST /TOKEN/done HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        "Content-Length: 2",
        body=b"{}",
    )
    assert status_of(raw(server, body)) == 403


def test_a_request_without_a_host_or_with_two_is_refused(server):
    line = f"GET /{server.token}/images HTTP/1.1\r\n"
    host = f"Host: 127.0.0.1:{server.server_port}\r\n"
    for headers in ("", host + host, host + "Host: evil.example\r\n"):
        assert status_of(raw(server, (line + headers + "\r\n").encode())) == 403


def test_both_names_of_this_computer_are_accepted(server):
    for name in ("127.0.0.1", "localhost"):
        host = f"{name}:{server.server_port}"
        assert ask(server, "images", Host=host, Origin=f"http://{host}")[0] == 200


def test_a_browser_that_names_another_site_is_refused_without_an_origin(server):
    for site in ("cross-site", "same-site"):
        assert ask(server, "images", **{"Sec-Fetch-Site": site})[0] == 403
        clicked = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"}
        assert ask(server, "", **clicked)[0] == 200  # a link to the page, as in a notebook
        assert ask(server, "save", {}, **clicked)[0] == 403
    for site in ("same-origin", "none"):
        assert ask(server, "images", **{"Sec-Fetch-Site": site})[0] == 200


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "",
        "http://evil.example",
        "https://127.0.0.1:{port}",
        "http://127.0.0.1",
        "http://localhost:{port}",
        "http://127.0.0.1:{port}/",
        "http://127.0.0.1:{port}.evil.example",
    ],
)
def test_another_origin_is_refused(server, origin):
    origin = origin.format(port=server.server_port)
    before = listing(server)
    saved = {"version": 1, "groups": groups_of(before, {"one": "evil"})}
    for path, body in [
        *((path, None) for path in PATHS),
        *((path, {}) for path in POSTS),
        ("save", saved),
    ]:
        status, headers, _ = ask(server, path, body, Origin=origin)
        assert status == 403, path
        assert "Access-Control-Allow-Origin" not in headers
    assert listing(server) == before


@pytest.mark.parametrize(
    "method", ["HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "CONNECT", "PATCH", "get"]
)
def test_other_methods_are_refused(server, method):
    answer = raw(
        server, request(server, f"{method} /TOKEN/images HTTP/1.1", "Origin: http://evil.example")
    )
    assert status_of(answer) >= 400
    assert b"Access-Control" not in answer


def test_every_answer_has_the_headers_of_security(server):
    answers = [ask(server, path) for path in PATHS]
    answers += [ask(server, "save", body) for body in ({}, b"{", b"x" * 10)]
    answers += [ask(server, "images", token="x"), ask(server, "images", method="PUT")]
    assert len({status for status, _, _ in answers}) > 3
    for _, headers, _ in answers:
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Frame-Options"] == "DENY"
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none';")
        assert "unsafe-eval" not in policy
        assert "script-src 'unsafe" not in policy
        assert not [name for name in headers if name.startswith("Access-Control")]
        assert "Python" not in headers["Server"]


# The page


class Page(HTMLParser):
    "Its tags with their attributes, and the texts of its scripts."

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_the_page_has_one_script_that_its_policy_allows_and_nothing_from_outside(server):
    status, headers, body = ask(server, "")
    text = body.decode()
    page = Page(text)
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    styles = [attributes for tag, attributes in page.tags if tag == "style"]
    (nonce,) = {found["nonce"] for found in scripts + styles}
    parts = headers["Content-Security-Policy"].split("; ")
    assert (status, len(scripts), len(styles)) == (200, 1, 1)
    assert len(nonce) >= 22
    assert f"script-src 'nonce-{nonce}'" in parts
    assert f"style-src 'nonce-{nonce}'" in parts
    assert {
        "default-src 'none'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    } <= set(parts)
    assert "unsafe" not in headers["Content-Security-Policy"]
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    assert not re.search(r"https?://|//[a-z]+\.", text.replace("http://www.w3.org", ""))
    for never in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert never not in text
    assert nonce.encode() not in ask(server, "")[2]


def test_names_of_folders_and_files_are_no_markup(server):
    text = ask(server, "")[2].decode()
    assert "my &lt;b&gt;pictures" in text
    assert "<b>pictures" not in text
    status, headers, body = ask(server, "images")
    assert HACK in json.loads(body)["files"]
    assert headers["Content-Type"] == "application/json"


def test_the_report_is_served_without_scripts(server, place):
    assert ask(server, "report")[0] == 404
    (place[1] / "index.html").write_text("<script>alert(1)</script>")
    status, headers, body = ask(server, "report")
    assert status == 200
    assert body == b"<script>alert(1)</script>"
    policy = headers["Content-Security-Policy"]
    assert {"default-src 'none'", "sandbox"} <= set(policy.split("; "))
    assert "script-src" not in policy


# Pictures


def test_a_number_gives_the_picture_of_its_file(server, place):
    files = listing(server)["files"]
    for i in (0, 5, COUNT - 1):
        status, headers, body = ask(server, f"thumbnail/{i}")
        assert (status, headers["Content-Type"]) == (200, "image/jpeg")
        with Image.open(io.BytesIO(body)) as image:
            assert image.size == (THUMBNAIL_SIDE, THUMBNAIL_SIDE)
            grey = np.asarray(image).mean()
        with Image.open(place[0] / files[i]) as original:
            assert abs(grey - np.asarray(original).mean()) < 2
        assert ask(server, f"picture/{i}")[0] == 200


def test_a_photograph_is_upright(tmp_path):
    image = Image.fromarray(np.repeat([[255], [0]], [20, 20], 0).repeat(60, 1).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees: the top of the file is the right side
    image.convert("RGB").save(tmp_path / "a.jpg", exif=exif)
    pictures = Pictures(tmp_path, ["a.jpg"])
    for content in (pictures.picture(0), pictures.thumbnail(0)):
        with Image.open(io.BytesIO(content)) as upright:
            values = np.asarray(upright.convert("L"))
            assert values[:, -5:].mean() > 200
            assert values[:, :5].mean() < 50
    with Image.open(io.BytesIO(pictures.picture(0))) as upright:
        assert upright.size == (40, 60)


def test_a_large_photograph_is_reduced_like_a_small_one(tmp_path):
    "Decoding at a fraction of the size changes neither orientation nor content."
    x = np.linspace(0, 255, 1600)[None] * np.linspace(0, 1, 1200)[:, None]
    image = Image.fromarray(np.stack([x, 255 - x, x / 2], -1).astype(np.uint8))
    for orientation in (1, 6):
        exif = Image.Exif()
        exif[0x0112] = orientation
        image.save(tmp_path / "a.jpg", exif=exif, quality=95)
        pictures = Pictures(tmp_path, ["a.jpg"])
        reduced = module.read_image(tmp_path / "a.jpg", THUMBNAIL_SIDE)
        assert min(reduced.size) >= THUMBNAIL_SIDE
        assert max(reduced.size) < 500
        thumbnails = [pictures.thumbnail(0)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "read_image", lambda path, side: read_image(path))
            thumbnails.append(Pictures(tmp_path, ["a.jpg"]).thumbnail(0))
        first, second = (np.asarray(Image.open(io.BytesIO(t))).astype(int) for t in thumbnails)
        assert np.abs(first - second).mean() < 3


NUMBERS = (
    "-1",
    "12",
    "99999999999999999999",
    "x",
    "",
    "1.0",
    "1e0",
    "0x1",
    "%30",
    "٣",
    "+1",
    " 1",
    "../0",
    "..%2f..%2fetc%2fpasswd",
    "0/..",
    "../../../../etc/passwd",
    "0\\..",
    "0%00",
)


@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_no_number_of_a_picture_is_not_found(server, number):
    for kind in ("thumbnail", "picture"):
        line = f"GET /TOKEN/{kind}/{number} HTTP/1.1".encode().decode("latin-1")
        answer = raw(server, request(server, line))
        assert status_of(answer) in (400, 404)  # a space in an address is bad syntax
        assert b"root:" not in answer


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    folder = fill(tmp_path / "folder")
    secret = tmp_path / "secret.png"
    Image.new("RGB", (9, 9)).save(secret)
    (tmp_path / "elsewhere").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "elsewhere" / "b.png")
    (tmp_path / "folder2").mkdir()  # a name that begins like the folder's
    Image.new("RGB", (9, 9)).save(tmp_path / "folder2" / "c.png")
    (folder / "a.png").symlink_to(secret)
    (folder / "dir").symlink_to(tmp_path / "elsewhere")
    (folder / "c.png").symlink_to(tmp_path / "folder2" / "c.png")
    (folder / "inside.png").symlink_to(folder / FORMULA)
    (folder / "loop.png").symlink_to(folder / "loop.png")
    cases = {
        "a.png": 403,
        "dir/b.png": 403,
        "c.png": 403,
        "../secret.png": 403,
        "loop.png": 404,
        "gone.png": 404,
        str(secret): 403,
    }
    pictures = Pictures(folder, [*cases, "inside.png"])
    for i, status in enumerate(cases.values()):
        for make in (pictures.thumbnail, pictures.picture):
            with pytest.raises(Refusal) as refused:
                make(i)
            assert refused.value.status == status
    assert pictures.thumbnail(len(cases)).startswith(b"\xff\xd8")


def test_a_picture_that_becomes_a_link_later_is_refused(server, place, tmp_path):
    secret = tmp_path / "secret.png"
    Image.new("RGB", (9, 9)).save(secret)
    file = place[0] / listing(server)["files"][3]
    file.unlink()
    file.symlink_to(secret)
    assert ask(server, "thumbnail/3")[0] == 403
    file.unlink()
    assert ask(server, "thumbnail/3")[0] == 404
    file.write_bytes(b"\x89PNG damaged")
    status, _, body = ask(server, "thumbnail/3")
    assert status == 404
    assert "cannot be read" in json.loads(body)["error"]


def test_thumbnails_in_memory_are_bounded(place):
    files = image_files(place[0])
    size = len(Pictures(place[0], files).thumbnail(0))
    pictures = Pictures(place[0], files, limit=3 * size + size // 2)
    decoded = []
    read = pictures._read
    pictures._read = lambda number, *more: decoded.append(number) or read(number, *more)
    for number in (0, 1, 2, 0, 1, 2):
        pictures.thumbnail(number)
    assert decoded == [0, 1, 2]
    for number in range(len(files)):
        pictures.thumbnail(number)
        assert pictures.cached_bytes <= pictures.limit
    assert pictures.cached_bytes == sum(map(len, pictures._cache.values()))
    assert len(pictures._cache) <= 4


# Saving


def saved_rows(output):
    with open(
        output / "groups.csv", encoding="utf-8", errors="surrogateescape", newline=""
    ) as file:
        return list(csv.DictReader(file))


def test_a_save_moves_renames_and_keeps_the_found_group(server, place):
    listed = listing(server)
    before = saved_rows(place[1])
    first, second = groups_of(listed)
    moved = first["images"].pop()
    second["images"].append(moved)
    first["name"] = '  Füße 日本, "quoted" '
    status, _, body = ask(
        server, "save", {"version": 1, "groups": [first, second, {"name": "empty", "images": []}]}
    )
    assert (status, json.loads(body)["version"]) == (200, 2)
    rows = saved_rows(place[1])
    name = first["name"].strip()
    for i, (row, old) in enumerate(zip(rows, before)):
        assert row["group"] == (name if i in first["images"] else second["name"])
        assert row["found"] == old["group"]
        assert {**row, "group": ""} == {**old, "group": ""}
    assert rows[moved]["group"] == second["name"]
    again = listing(server)
    assert again["version"] == 2
    assert {g["name"] for g in again["groups"]} == {name, second["name"]}
    assert (
        read_corrected_groups(place[1] / "groups.csv", image_files(place[0])).group.nunique() == 2
    )


def test_groups_have_the_colours_of_the_report(place):
    "The page orders groups by size, and the report of corrected groups by name."
    with serving(*place) as server:
        one, two = groups_of(listing(server), {"one": "zebra"})
        for _ in range(2):  # the larger group first, then the other
            one["images"].append(two["images"].pop())
            changed = {"version": listing(server)["version"], "groups": [one, two]}
            assert ask(server, "save", changed)[0] == 200
            shown = {group["name"]: group["colour"] for group in listing(server)["groups"]}
            report = read_corrected_groups(place[1] / "groups.csv", image_files(place[0]))
            names = pd.Series(report.group, dtype="category")
            assert shown == {name: category_colours(names)[name] for name in ("two", "zebra")}
            one, two = two, one
    assert len(set(shown.values())) == 2


def test_what_was_saved_is_there_in_the_next_session(place):
    with serving(*place) as server:
        assert not has_corrections(*place)
        groups = groups_of(listing(server), {"one": "=HYPERLINK(1)"})
        assert ask(server, "save", {"version": 1, "groups": groups})[0] == 200
    assert has_corrections(*place)
    with serving(*place) as server:
        listed = listing(server)
        assert {g["name"] for g in listed["groups"]} == {"=HYPERLINK(1)", "two"}
        assert set(listed["found"]) == {"one", "two"}
    assert saved_rows(place[1])[0]["group"].startswith("'=")  # a spreadsheet computes nothing


def test_groups_are_not_found_again_if_the_last_report_had_the_same_options(place, capsys):
    folder, output = map(str, place)
    three = [["--experts", "3"]]
    table = place[1] / "groups.csv"
    assert not _shows_last_groups(folder, output, [])  # nothing says which command wrote it
    digest = hashlib.sha256(table.read_bytes()).hexdigest()
    note = {"groups.csv": digest, "options": three, "corrected": False}
    (place[1] / WRITTEN_FILE).write_text(json.dumps(note))
    assert not capsys.readouterr().out
    assert _shows_last_groups(folder, output, three)
    assert "groups.csv" in capsys.readouterr().out
    assert not _shows_last_groups(folder, output, [])
    assert not _shows_last_groups(folder, output, None)
    table.write_bytes(table.read_bytes() + b"\n")
    assert not _shows_last_groups(folder, output, three)


GOOD = [{"name": "a", "images": [0, 2]}, {"name": "b", "images": [1]}]
BAD_GROUPS = {
    "nothing": None,
    "a text": "x",
    "a dictionary": {"a": [0, 1, 2]},
    "no group": [],
    "groups of numbers": [1, 2],
    "no name": [{"images": [0, 1, 2]}],
    "no images": [{"name": "a"}],
    "a name of numbers": [{"name": 3, "images": [0, 1, 2]}, GOOD[1]],
    "unknown image": [*GOOD, {"name": "c", "images": [3]}],
    "negative image": [{"name": "a", "images": [0, 2, -1]}, GOOD[1]],
    "a truth as image": [{"name": "a", "images": [0, 2]}, {"name": "b", "images": [True]}],
    "a float as image": [{"name": "a", "images": [0, 2]}, {"name": "b", "images": [1.0]}],
    "a text as image": [{"name": "a", "images": [0, 2]}, {"name": "b", "images": ["1"]}],
    "a list as image": [{"name": "a", "images": [0, 2]}, {"name": "b", "images": [[1]]}],
    "images as text": [{"name": "a", "images": "02"}, GOOD[1]],
    "an image twice": [{"name": "a", "images": [0, 2, 1]}, GOOD[1]],
    "an image missing": [{"name": "a", "images": [0]}, GOOD[1]],
    "one group": [{"name": "a", "images": [0, 1, 2]}],
    "one group and an empty one": [{"name": "a", "images": [0, 1, 2]}, {"name": "b", "images": []}],
    "two groups of one name": [GOOD[0], {"name": "a", "images": [1]}],
    "names that differ in case": [GOOD[0], {"name": "A", "images": [1]}],
    "names that differ in Unicode's form": [
        {"name": "\u00e9", "images": [0, 2]},
        {"name": "e\u0301", "images": [1]},
    ],
}
BAD_NAMES = (
    "",
    "  ",
    ".",
    "..",
    "a/b",
    "a\\b",
    "../x",
    "a\0b",
    "a\nb",
    "x" * 101,
    "\ud800",
    "held out",
)


@pytest.mark.parametrize("groups", BAD_GROUPS)
def test_groups_that_are_no_partition_are_refused(groups):
    with pytest.raises(Refusal) as refused:
        check_groups(BAD_GROUPS[groups], 3)
    assert refused.value.status == 400
    assert check_groups(GOOD, 3) == ["a", "b", "a"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_no_folder_is_refused(server, place, name):
    content = (place[1] / "groups.csv").read_bytes()
    groups = groups_of(listing(server), {"one": name})
    status, _, body = ask(server, "save", {"version": 1, "groups": groups})
    assert status == 400
    assert json.loads(body)["error"]
    assert (place[1] / "groups.csv").read_bytes() == content


BODIES = {
    "empty": (b"", 400),
    "no JSON": (b"version=1", 400),
    "cut": (b'{"version": 1', 400),
    "a list": (b"[]", 400),
    "null": (b"null", 400),
    "no UTF-8": (b'{"a": "\xff"}', 400),
    "deep": (b"[" * 100_000, 400),
    "a huge number": (b'{"version": ' + b"9" * 5000 + b"}", 400),
    "no groups": (b'{"version": 1}', 400),
    "large": (b'{"a": "' + b"x" * 2**20 + b'"}', 413),
}


@pytest.mark.parametrize("body", BODIES)
def test_a_body_that_is_no_save_has_a_status_and_changes_nothing(server, place, body):
    content = (place[1] / "groups.csv").read_bytes()
    sent, expected = BODIES[body]
    status, _, answer = ask(server, "save", sent)
    assert status == expected
    assert json.loads(answer)["error"]
    assert (place[1] / "groups.csv").read_bytes() == content
    assert listing(server)["version"] == 1


def test_a_form_cannot_save(server):
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "",
        "text/plain; application/json",
    ):
        assert ask(server, "save", b"{}", Content_Type=kind)[0] == 415
        assert ask(server, "done", b"{}", Content_Type=kind)[0] == 415
    assert ask(server, "images")[0] == 200


LENGTHS = {
    "none": ((), 411),
    "negative": (("Content-Length: -1",), 411),
    "no number": (("Content-Length: x",), 411),
    "two": (("Content-Length: 2", "Content-Length: 3"), 411),
    "chunked": (("Transfer-Encoding: chunked",), 411),
    "both": (("Content-Length: 2", "Transfer-Encoding: chunked"), 411),
    "huge": (("Content-Length: " + "9" * 60,), 413),
    "a gigabyte": (("Content-Length: 1073741824",), 413),
}


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_body_without_a_clear_small_length_is_refused(server, lengths):
    headers, expected = LENGTHS[lengths]
    sent = request(
        server, "POST /TOKEN/save HTTP/1.1", "Content-Type: application/json", *headers, body=b"{}"
    )
    assert status_of(raw(server, sent)) == expected
    assert ask(server, "images")[0] == 200


def test_the_body_of_a_get_is_not_the_next_request(server):
    hidden = request(server, "GET /TOKEN/images HTTP/1.1")
    line = f"GET /{server.token}/training HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
    sent = line.encode() + f"Content-Length: {len(hidden)}\r\n\r\n".encode() + hidden
    assert raw(server, sent).count(b"HTTP/1.1 ") == 1


def test_of_two_windows_the_second_does_not_overwrite_the_first(server, place):
    groups = groups_of(listing(server), {"one": "first"})
    assert ask(server, "save", {"version": 1, "groups": groups})[0] == 200
    mine = groups_of(listing(server), {"first": "second"})
    for version in (1, 0, None, "2", 2.5, [2]):
        status, _, body = ask(server, "save", {"version": version, "groups": mine})
        assert status == 409
        assert json.loads(body)["version"] == 2
    assert {row["group"] for row in saved_rows(place[1])} == {"first", "two"}
    assert ask(server, "save", {"version": 2, "groups": mine})[0] == 200


def test_of_many_saves_at_once_exactly_one_succeeds(server, place):
    listed = listing(server)
    statuses = {}

    def save(i):
        groups = groups_of(listed, {"one": f"name {i}"})
        statuses[i] = ask(server, "save", {"version": 1, "groups": groups})[0]

    threads = [threading.Thread(target=save, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = (i for i, status in statuses.items() if status == 200)
    assert sorted(statuses.values()) == [200] + 11 * [409]
    assert {row["group"] for row in saved_rows(place[1])} == {f"name {winner}", "two"}
    assert not list(place[1].glob(".*"))


def test_a_table_that_a_spreadsheet_changes_is_not_overwritten(server, place):
    groups = groups_of(listing(server), {"one": "mine"})
    path = place[1] / "groups.csv"
    path.write_text(path.read_text().replace(",one,", ",theirs,"))
    status, _, body = ask(server, "save", {"version": 1, "groups": groups})
    assert status == 409
    assert {g["name"] for g in listing(server)["groups"]} == {"theirs", "two"}
    version = json.loads(body)["version"]
    assert listing(server)["version"] == version
    path.write_text("not, a table\n")
    status, _, body = ask(server, "save", {"version": version, "groups": groups})
    assert status == 409
    assert path.read_text() == "not, a table\n"
    version = json.loads(body)["version"]
    assert ask(server, "save", {"version": version, "groups": groups})[0] == 200
    assert {row["group"] for row in saved_rows(place[1])} == {"mine", "two"}


def test_a_save_that_fails_says_so_and_keeps_the_table(server, place, monkeypatch):
    def full(path, table):
        raise OSError(28, "No space left on device")

    groups = groups_of(listing(server), {"one": "mine"})
    content = (place[1] / "groups.csv").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_corrected_groups", full)
        status, _, body = ask(server, "save", {"version": 1, "groups": groups})
    assert status == 500
    assert "No space left" in json.loads(body)["error"]
    assert (place[1] / "groups.csv").read_bytes() == content
    assert ask(server, "save", {"version": 1, "groups": groups})[0] == 200


# Slow and many clients


@pytest.mark.parametrize(
    "sent",
    [
        "GET /",
        "GET /TOKEN/images HTTP/1.1\r\nHost: 127.",
        "POST /TOKEN/save HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n"
        "Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    ],
)
def test_a_request_that_does_not_arrive_in_time_has_status_408(place, sent):
    with serving(*place, seconds=0.6) as server:
        content = sent.replace("TOKEN", server.token).replace("PORT", str(server.server_port))
        began = time.monotonic()
        answer = raw(server, content.encode())
        assert status_of(answer) == 408
        assert time.monotonic() - began < 8
        assert ask(server, "images")[0] == 200


def test_a_client_that_sends_a_byte_now_and_then_is_cut_off_too(place):
    with serving(*place, seconds=1.0) as server:
        content = request(server, "GET /TOKEN/images HTTP/1.1")
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
            with pytest.raises(ConnectionError):  # the server has closed the connection
                for byte in content:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.2)
        assert time.monotonic() - began < 8
        assert ask(server, "images")[0] == 200


def test_an_idle_connection_is_closed_without_an_answer(place):
    with serving(*place, seconds=0.5) as server:
        assert raw(server, b"") == b""


def eventually(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


@pytest.mark.parametrize("sent", [b"", b"GET /", b"GET /x HTTP/1.1\r\nHost: 127."])
def test_idle_and_slow_clients_do_not_keep_others_out(place, monkeypatch, sent):
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 8)
    with serving(*place, seconds=60) as server:
        address = ("127.0.0.1", server.server_port)
        slow = [socket.create_connection(address, timeout=10) for _ in range(8)]
        for connection in slow:
            connection.sendall(sent)
        eventually(lambda: server._free._value == 0)
        eventually(lambda: len(server._waiting) == 8)
        began = time.monotonic()
        for _ in range(12):  # more than the idle ones
            assert ask(server, "images")[0] == 200
        assert time.monotonic() - began < 20  # and not the 60 seconds of an idle one
        for connection in slow:
            connection.close()
        eventually(lambda: server._free._value == 8)
        assert not server._waiting


def test_a_slow_body_is_the_first_to_be_closed(place, monkeypatch):
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 1)
    with serving(*place, seconds=60) as server:
        head = request(
            server,
            "POST /TOKEN/save HTTP/1.1",
            "Content-Type: application/json",
            "Content-Length: 50",
        )
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as slow:
            slow.sendall(head)
            eventually(lambda: server._free._value == 0)
            assert ask(server, "images")[0] == 200
        assert listing(server)["version"] == 1


def test_if_all_connections_are_being_answered_the_next_is_turned_away(place, monkeypatch):
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 4)
    may_end = threading.Event()
    with serving(*place, seconds=60) as server:

        def thumbnail(number):
            may_end.wait(30)
            return b"jpeg"

        monkeypatch.setattr(server.pictures, "thumbnail", thumbnail)
        address = ("127.0.0.1", server.server_port)
        busy = [socket.create_connection(address, timeout=10) for _ in range(4)]
        for connection in busy:
            connection.sendall(request(server, "GET /TOKEN/thumbnail/0 HTTP/1.1"))
        eventually(lambda: server._free._value == 0 and not server._waiting)
        refused = raw(server, b"")
        assert status_of(refused) == 503
        head, _, body = refused.partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}\r\n".encode() in head
        assert json.loads(body)["error"]
        may_end.set()
        for connection in busy:  # and what was asked before is answered
            assert status_of(connection.recv(4096)) == 200
            connection.close()
        eventually(lambda: server._free._value == 4)
        assert ask(server, "images")[0] == 200


def test_the_browser_is_started_without_the_token(place, monkeypatch):
    """Arguments of programs are visible to every user of a computer."""
    folder, output = place
    opened = []

    def browse(address):
        path = Path(address.removeprefix("file://"))
        opened.append((address, path, path.stat().st_mode & 0o777, path.read_text("utf-8")))

    def answer(server, poll_interval):
        opened.append(server)

    monkeypatch.setattr(module.webbrowser, "open", browse)
    monkeypatch.setattr(GroupServer, "serve_forever", answer)
    before = set(output.iterdir())
    module.correct_groups(folder, output, open_page=True)
    (address, path, mode, text), server = opened
    assert server.token not in address
    assert address == path.as_uri()
    assert mode == 0o600
    assert text.count(server.address) == 2
    assert "<script" not in text
    assert set(output.iterdir()) == before


def test_a_client_that_leaves_harms_nobody(server):
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.sendall(request(server, "GET /TOKEN/picture/0 HTTP/1.1"))
    assert ask(server, "images")[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\0" * 100,
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"A" * 70_000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_noise_is_answered_by_an_error_or_by_nothing(place, sent):
    with serving(*place, seconds=1) as server:
        answer = raw(server, sent)
        assert not answer or answer.startswith(b"{") or status_of(answer) >= 400
        assert server.token.encode() not in answer
        assert ask(server, "images")[0] == 200


# Tables that do not fit


def test_a_table_of_another_folder_is_refused(place, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    Image.new("RGB", (9, 9)).save(other / "other.png")
    with pytest.raises(HmoeError, match="names no image of other"):
        GroupServer(other, place[1])
    with pytest.raises(HmoeError, match="there is no groups.csv"):
        GroupServer(place[0], tmp_path)


def test_images_without_a_row_are_new(place):
    Image.new("RGB", (9, 9)).save(place[0] / "new.png")
    with serving(*place) as server:
        listed = listing(server)
        assert [listed["files"][i] for i in listed["new"]] == ["new.png"]
        assert len(listed["files"]) == COUNT + 1


# The end


def test_done_ends_the_server_and_keeps_what_was_saved(place):
    server = GroupServer(*place)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    groups = groups_of(listing(server), {"one": "kept"})
    assert ask(server, "save", {"version": 1, "groups": groups})[0] == 200
    assert ask(server, "done", {})[0] == 200
    thread.join(10)
    assert not thread.is_alive()
    server.close()
    with pytest.raises(ConnectionError):
        ask(server, "images")
    assert {row["group"] for row in saved_rows(place[1])} == {"kept", "two"}


@pytest.mark.slow
def test_ctrl_c_ends_it_and_what_was_saved_is_kept(place):
    code = "import sys; from hmoe_repro.apps.correct_groups import correct_groups as serve; "
    code += "serve(*sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, place)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        # a shell starts jobs in the background with this signal ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        lines = [process.stdout.readline(), process.stdout.readline()]
        address = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]+)/", lines[-1].strip())
        assert address
        there = type("Server", (), {"server_port": int(address[1]), "token": address[2]})
        groups = groups_of(listing(there), {"one": "kept"})
        assert ask(there, "save", {"version": 1, "groups": groups})[0] == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in err
    assert out == ""  # the address is the last line
    assert str(place[1] / "groups.csv") in err
    assert {row["group"] for row in saved_rows(place[1])} == {"kept", "two"}


# Training, by a process that does what `discover` would


def fake_child(body):
    "A training that runs `body` with its task in `task`."
    start = "import json, sys, time, pathlib; task = json.load(sys.stdin)\n"
    start += "out = pathlib.Path(task['output'])\n"
    return start + body


TRAINED = """
table = pathlib.Path(task['groups']).read_text()
(out / 'groups.csv').write_text(table.replace('0.9000', '0.7000'))
(out / 'index.html').write_text('new page')
(out / '.hmoe-discover.json').write_text('{}')
result = {'run': 'hmoe-dl-000000000000', 'verdict': 'Two groups.'}
(out / 'result.json').write_text(json.dumps(result))
"""


@pytest.fixture
def trainer(monkeypatch):
    "Replace the program of the training."

    def replace(body):
        popen = subprocess.Popen

        def start(command, **options):
            assert command[:4] == [sys.executable, "-P", "-u", "-c"]
            return popen([*command[:4], fake_child(body)], **options)

        monkeypatch.setattr(module.subprocess, "Popen", start)

    return replace


def until(server, *states):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        status = json.loads(ask(server, "training")[2])
        if status["state"] in states:
            return status
        time.sleep(0.05)
    raise AssertionError(status)


def test_a_training_replaces_page_and_table(server, place, trainer):
    trainer("print('training <b>HMOE</b> ...')\n" + TRAINED)
    (place[1] / "index.html").write_text("old page")
    groups = groups_of(listing(server), {"one": "mine"})
    assert ask(server, "save", {"version": 1, "groups": groups})[0] == 200
    assert until(server, "none")["lines"] == []
    assert ask(server, "train", {})[0] == 202
    status = until(server, "done", "failed")
    assert (status["state"], status["run_id"]) == ("done", "hmoe-dl-000000000000")
    assert status["lines"] == ["training <b>HMOE</b> ..."]
    assert ask(server, "report")[2] == b"new page"
    assert {row["group"] for row in saved_rows(place[1])} == {"mine", "two"}
    assert {row["confidence"] for row in saved_rows(place[1])} == {"0.1000", "0.7000"}
    assert listing(server)["version"] == status["version"] == 3
    assert status["replaced"] == 2
    assert status["count"] == len(listing(server)["files"])
    assert status["verdict"] == "Two groups."
    assert status["command"].split()[:4] == ["hmoe", "predict", "--model", status["run_id"]]
    assert status["notes"] == []
    assert json.loads(ask(server, "done", {})[2])["command"] == status["command"]
    assert [path.name for path in place[1].glob(".*")] == [".hmoe-discover.json"]


def test_a_save_during_a_training_is_kept(server, place, trainer):
    trainer(
        TRAINED + f"\nwhile not pathlib.Path({str(place[1] / 'go')!r}).exists(): time.sleep(.05)"
    )
    assert ask(server, "train", {})[0] == 202
    assert ask(server, "train", {})[0] == 409
    groups = groups_of(listing(server), {"one": "later"})
    assert ask(server, "save", {"version": 1, "groups": groups})[0] == 200
    assert not json.loads(ask(server, "training")[2])["has_report"]
    (place[1] / "go").touch()
    status = until(server, "done", "failed")
    assert status["state"] == "done"
    assert status["replaced"] is None  # the table of the training is not taken over
    assert len(status["notes"]) == 1  # the model is of older groups
    assert status["has_report"]
    assert {row["group"] for row in saved_rows(place[1])} == {"later", "two"}
    assert ask(server, "report")[2] == b"new page"


FAILURES = {
    "an error": "sys.exit('the group has too few images')",
    "no result": "print('done')",
    "a result that is no JSON": TRAINED + "\n(out / 'result.json').write_text('{')",
    "another table": TRAINED + "\n(out / 'groups.csv').write_text('file,group\\nx.png,a\\n')",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_training_that_fails_leaves_everything(server, place, trainer, failure):
    trainer(FAILURES[failure])
    (place[1] / "index.html").write_text("old page")
    content = (place[1] / "groups.csv").read_bytes()
    assert ask(server, "train", {})[0] == 202
    status = until(server, "done", "failed")
    assert status["state"] == "failed"
    assert status["lines"]
    assert (place[1] / "groups.csv").read_bytes() == content
    assert (place[1] / "index.html").read_text() == "old page"
    assert not list(place[1].glob(".*"))
    assert ask(server, "save", {"version": 1, "groups": groups_of(listing(server))})[0] == 200


def test_a_training_is_stopped_by_its_button_and_by_the_end(place, trainer):
    trainer("print('begun')\ntime.sleep(600)")
    with serving(*place) as server:
        assert ask(server, "stop", {})[0] == 200  # none is running
        for end in ("stop", "close"):
            assert ask(server, "train", {})[0] == 202
            while not json.loads(ask(server, "training")[2])["lines"]:
                time.sleep(0.05)
            process = server.training._process
            if end == "stop":
                assert ask(server, "stop", {})[0] == 200
                assert until(server, "stopped")["run_id"] is None
            else:
                server.training.stop()
            assert process.poll() is not None
    assert not list(place[1].glob(".*"))


@pytest.mark.slow
def test_the_training_does_not_search_the_working_folder_for_modules(place, tmp_path, monkeypatch):
    "A folder of photographs may have a file `json.py` or `torch.py`."
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json", "torch", "hmoe_repro"):
        (here / f"{name}.py").write_text(f"open({str(here / 'ran')!r}, 'w')")
    monkeypatch.chdir(here)
    with serving(*place, settings={"network": "no such network"}) as server:
        assert ask(server, "train", {})[0] == 202
        deadline = time.monotonic() + 100
        while server.training.status()["state"] == "running" and time.monotonic() < deadline:
            time.sleep(0.2)
        status = server.training.status()
    assert status["state"] == "failed"
    assert not os.path.exists(here / "ran")
    assert "ModuleNotFoundError" not in "\n".join(status["lines"])
