"""Groups are corrected in a real browser: with the mouse, with the keyboard, in a narrow window.

Each test begins with the command `hmoe discover FOLDER --serve` on a small folder of drawn images.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import browser
import pandas as pd
import pytest
from PIL import Image

from hmoe_repro.apps.discover import category_colours
from hmoe_repro.apps.own_images import image_files, write_corrected_groups
from hmoe_repro.data.image_folder import sample_tree

pytestmark = pytest.mark.slow
RUN_ID = r"[0-9a-f]{12}"
HACK = "<img src=x onerror=document.title='hacked'>.png"
SMALL = (
    "--network image_cnn --method hmoe --steps 3 --resolution 24 --set batch_size=8 --device cpu"
).split()


@pytest.fixture(scope="module", autouse=True)
def has_browser():
    if not importlib.util.find_spec("playwright"):
        pytest.skip("playwright is not installed: `pip install -c constraints.txt '.[browser]'`")
    if not browser.chromium():
        pytest.skip("there is no Chromium here: install one, or name it in HMOE_CHROMIUM")


def begin(place):
    "A folder of drawn images, one with a hostile name, and its found groups, one image wrong."
    folder, output = place / "garden", place / "out"
    sample_tree(folder, per_class=8, size=24)
    files = image_files(folder)
    (folder / files[0]).rename((folder / files[0]).with_name(HACK))
    files = image_files(folder)
    found = [file.split("/")[0] for file in files]
    confidence = [0.3 if i == 20 else 0.9 for i in range(len(files))]
    table = pd.DataFrame({"file": files, "group": found, "confidence": confidence, "found": found})
    table.loc[0, "group"] = table.group.iloc[-1]  # corrected before, so that nothing is found again
    output.mkdir()
    write_corrected_groups(output / "groups.csv", table.assign(borderline=table.confidence < 0.8))
    return folder, output


@contextmanager
def served(folder, output, *options, **variables):
    "The address of the page that the command serves."
    command = [sys.executable, "-m", "hmoe_repro", "discover", str(folder), "--serve", *options]
    command += ["--output", str(output), *SMALL]
    place = folder.parent
    variables |= {"HMOE_RUNS": str(place / "runs"), "HMOE_CACHE": str(place / "cache")}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | variables,
    )
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if line.startswith("http://"):
                break
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{43}/\n", said[-1]), said
        yield said[-1].strip(), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 0


@contextmanager
def opened(address, width=1400):
    "The page in a browser, without a complaint."
    with browser.pages(width) as page:
        page.context.set_default_timeout(60_000)
        page.complaints.clear()
        requests = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        page.wait_for_selector(".tile")
        page.wait_for_function("() => document.querySelector('.tile img').naturalWidth > 0")
        yield page
        assert all(url.startswith(address) for url in requests), requests
        complaints = [text for text in page.complaints if address not in text]
        assert not complaints
        assert page.title() == "Groups of garden"


def column(page, name):
    return page.locator(f'section.group[aria-label="{name}"]')


def drag_by_hand(page, tile, target):
    "Drag a picture to a group above it, without any scrolling on the way."
    target.evaluate("e => e.scrollIntoView({block: 'center'})")
    box, there = tile.bounding_box(), target.bounding_box()
    assert box["y"] + box["height"] / 2 < 900, "both must be visible"
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    for part in range(1, 6):
        page.mouse.move(box["x"] + 20, box["y"] + part / 5 * (there["y"] + 200 - box["y"]))
    page.mouse.up()


def groups_of(output):
    return pd.read_csv(output / "groups.csv").set_index("file").group


def saved(page):
    page.wait_for_selector("#message.good")


def test_a_picture_is_dragged_saved_and_the_model_is_trained_again(tmp_path):
    folder, output = begin(tmp_path)
    before = groups_of(output)
    first, second, *_ = sorted(set(before))
    with served(folder, output) as (address, process), opened(address) as page:
        tile = column(page, first).locator(".tile").first
        file = tile.locator("img").get_attribute("alt")
        tile.drag_to(column(page, second).locator(".pictures"))
        assert column(page, second).locator(".tile.moved").count() == 1
        assert "not saved" in page.locator("#summary").text_content()
        assert groups_of(output)[file] == first
        page.click("#save")
        saved(page)
        after = groups_of(output)
        assert after[file] == second
        assert (before != after).sum() == 1

        runs = set()
        for renamed in ("", "drawing"):
            if renamed:
                name = column(page, second).locator(".name")
                name.fill(renamed)
                name.press("Enter")
                column(page, first).locator(".tile").last.drag_to(column(page, renamed))
            page.click("#train")
            page.wait_for_function("() => !document.getElementById('stop').hidden")
            page.wait_for_selector("#report:not([hidden])", timeout=120_000)
            said = page.locator("#training-line").text_content()
            runs |= set(re.findall(RUN_ID, said))
        assert len(runs) == 2
        assert {path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()} >= runs
        assert set(groups_of(output)) == (set(before) - {second}) | {"drawing"}
        with page.context.expect_page() as popup:
            page.click("#report")
        popup.value.wait_for_load_state()
        text = popup.value.locator("body").text_content()
        assert "drawing" in text
        assert runs & set(re.findall(RUN_ID, text))
        page.click("#done")
        saved(page)
        assert process.wait(20) == 0


def test_the_browser_is_started_with_a_file_that_leads_to_the_page(tmp_path):
    folder, output = begin(tmp_path)
    starter = tmp_path / "browser"
    starter.write_text('#!/bin/sh\necho "$@" > "$0.told.part"; mv "$0.told.part" "$0.told"\n')
    starter.chmod(0o700)
    with served(folder, output, "--open", BROWSER=str(starter)) as (address, _):
        deadline = time.monotonic() + 30
        while not (tmp_path / "browser.told").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        told = (tmp_path / "browser.told").read_text().strip()
        assert address.split("/")[-2] not in told
        with browser.pages(1400) as page:
            page.goto(told)
            page.wait_for_url(address)
            page.wait_for_selector(".tile")
    assert not list(output.glob("open_*"))


def test_the_keyboard_alone_moves_renames_and_saves(tmp_path):
    folder, output = begin(tmp_path)
    before = groups_of(output)
    with served(folder, output) as (address, _), opened(address) as page:
        first = page.locator("section.group").first.get_attribute("aria-label")
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.className").startswith("tile"):
                break
        focused = "document.activeElement.querySelector('img').alt"
        files = [page.evaluate(focused)]
        page.keyboard.press("Shift+ArrowRight")
        files.append(page.evaluate(focused))
        assert page.locator("#chosen-count").text_content() == "2 pictures selected"
        page.keyboard.press("m")
        target = page.locator("#target option:checked").text_content()
        assert target != first
        page.keyboard.press("Enter")
        assert page.locator("#said").text_content() == f"2 pictures moved to the group “{target}”"
        page.keyboard.press("Control+z")
        assert "not saved" not in page.locator("#summary").text_content()
        page.keyboard.press("Control+Shift+z")
        page.keyboard.press("Control+s")
        saved(page)
        after = groups_of(output)
        assert set(after[files]) == {target}
        assert set(after.index[before != after]) == set(files)


def test_in_a_narrow_window_pictures_are_selected_and_moved_by_the_menu(tmp_path):
    folder, output = begin(tmp_path)
    before = groups_of(output)
    with served(folder, output) as (address, _), opened(address, width=400) as page:
        sections = page.locator("section.group")
        first, second = (sections.nth(i).get_attribute("aria-label") for i in range(2))
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        tiles = column(page, first).locator(".tile")
        chosen = [tiles.nth(i).locator("img").get_attribute("alt") for i in range(1, 4)]
        tiles.nth(1).click()
        tiles.nth(3).click(modifiers=["Shift"])
        page.select_option("#target", label="a new group")
        page.click("#move")
        page.keyboard.type("night")
        page.keyboard.press("Enter")
        box = column(page, "night").locator(".tile").first.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 400
        drag_by_hand(page, column(page, second).locator(".tile").first, column(page, first))
        page.click("#save")
        saved(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        page.screenshot(path=tmp_path / "narrow.png")
        after = groups_of(output)
        assert set(after[chosen]) == {"night"}
        assert (before != after).sum() == 4
    with Image.open(tmp_path / "narrow.png") as picture:
        assert picture.width == 400


def test_groups_are_merged_and_borderline_pictures_come_first(tmp_path):
    folder, output = begin(tmp_path)
    before = groups_of(output)
    with served(folder, output) as (address, _), opened(address) as page:
        unsure = page.locator(".tile.unsure")
        assert unsure.count() == 1
        file = unsure.locator("img").get_attribute("alt")
        assert (
            column(page, before[file]).locator(".tile").first.locator("img").get_attribute("alt")
            == file
        )
        first, second, *_ = names = sorted(set(before))
        report = category_colours(pd.Series(names, dtype="category"))
        for name in names:
            shown = column(page, name).evaluate("e => e.style.getPropertyValue('--colour')")
            assert shown == report[name]
        column(page, first).get_by_label("Merge into").select_option(label=second)
        assert column(page, first).count() == 0
        page.click("#save")
        saved(page)
        assert list(groups_of(output)) == [second if group == first else group for group in before]


def test_what_another_window_saved_is_overwritten_only_if_one_says_so(tmp_path):
    folder, output = begin(tmp_path)
    with served(folder, output) as (address, _), opened(address) as page:
        other = page.context.new_page()
        other.goto(address)
        other.wait_for_selector(".tile")
        for window, name in ((page, "mine"), (other, "theirs")):
            window.locator(".name").first.fill(name)
            window.locator(".name").first.press("Enter")
            window.click("#save")
            window.wait_for_selector("#message:not([hidden])")
        assert "mine" in set(groups_of(output))
        assert "theirs" not in set(groups_of(output))
        other.click("#overwrite")
        saved(other)
        assert "theirs" in set(groups_of(output))
        assert "not saved" not in other.locator("#summary").text_content()
        page.complaints[:] = [text for text in page.complaints if "409" not in text]


def test_contrast_is_sufficient(tmp_path):
    folder, output = begin(tmp_path)
    with served(folder, output) as (address, _), opened(address) as page:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.click("#help")
            page.locator(".tile").first.click()
            assert not page.evaluate(browser.CONTRAST), scheme


def test_new_pictures_are_shown_and_small_groups_stop_the_training_before_it_begins(tmp_path):
    folder, output = begin(tmp_path)
    first = sorted(folder.rglob("*.png"))[3]
    picture = Image.open(first).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    picture.save(first.with_name("new.png"))
    with served(folder, output) as (address, _), opened(address) as page:
        unplaced = page.locator("section.unplaced .tile")
        assert unplaced.count() == 1
        assert unplaced.locator("img").get_attribute("alt").endswith("new.png")
        assert page.locator("#train").is_enabled()
        group = page.locator("section.group:not(.unplaced)").first
        tiles = group.locator(".tile")
        tiles.nth(1).click()
        tiles.nth(2).click(modifiers=["Shift"])
        page.select_option("#target", label="a new group")
        page.click("#move")
        page.keyboard.press("Enter")
        assert page.locator("#train").is_disabled()
        assert page.locator("#blocked").is_visible()
        assert page.locator("section.group .small:visible").count() == 1
        page.click("#undo")
        assert page.locator("#train").is_enabled()
        assert not page.locator("#blocked").is_visible()
        page.click("#train")
        page.wait_for_selector("#report:not([hidden])", timeout=300_000)
        page.wait_for_function("() => !document.querySelector('section.unplaced')")
        file = first.with_name("new.png").relative_to(folder).as_posix()
        assert groups_of(output)[file] in set(groups_of(output).drop(file))
        assert page.locator(f'.tile.unsure img[alt="{file}"]').count() == 1


def test_after_done_the_page_shows_what_was_saved_and_changes_nothing(tmp_path):
    folder, output = begin(tmp_path)
    before = groups_of(output)
    with served(folder, output) as (address, process), opened(address) as page:
        page.on("dialog", lambda dialog: dialog.accept())
        names = [section.get_attribute("aria-label") for section in page.locator(".group").all()]
        sizes = [column(page, name).locator(".tile").count() for name in names]
        tile = column(page, names[0]).locator(".tile").first
        tile.drag_to(column(page, names[1]).locator(".pictures"))
        assert column(page, names[1]).locator(".tile").count() == sizes[1] + 1
        page.click("#done")
        saved(page)
        assert process.wait(30) == 0
        assert [column(page, name).locator(".tile").count() for name in names] == sizes
        assert "not saved" not in page.locator("#summary").text_content()
        assert page.locator("button:enabled, input:enabled, select:enabled").count() == 0
        column(page, names[0]).locator(".tile").first.click()
        page.keyboard.press("Control+z")
        assert not page.locator("#chosen").is_visible()
        assert page.locator(".tile[aria-selected=true]").count() == 0
    pd.testing.assert_series_equal(groups_of(output), before)


def test_changes_during_a_training_can_be_saved_after_it(tmp_path):
    folder, output = begin(tmp_path)
    first, second, *_ = sorted(set(groups_of(output)))
    with served(folder, output) as (address, _), opened(address) as page:
        page.click("#train")
        page.wait_for_function("() => !document.getElementById('stop').hidden")
        tile = column(page, first).locator(".tile").first
        file = tile.locator("img").get_attribute("alt")
        tile.drag_to(column(page, second).locator(".pictures"))
        page.wait_for_selector("#report:not([hidden])", timeout=120_000)
        run = re.search(RUN_ID, page.locator("#training-line").text_content())[0]
        assert run in page.locator("#command").text_content()
        assert page.locator("#verdict").text_content()
        assert column(page, second).locator(f'.tile.moved img[alt="{file}"]').count() == 1
        page.click("#save")
        saved(page)
        assert groups_of(output)[file] == second


def test_a_message_is_about_the_last_step(tmp_path):
    folder, output = begin(tmp_path)
    first, second, *_ = sorted(set(groups_of(output)))
    with served(folder, output) as (address, _), opened(address, width=400) as page:
        last = page.locator("section.group").last.locator(".name")
        last.fill("")
        last.press("Enter")
        message = page.locator("#message")
        message.wait_for()
        box = message.bounding_box()
        assert 0 <= box["y"] <= box["y"] + box["height"] <= page.viewport_size["height"]
        last.fill("renamed")
        last.press("Enter")
        assert not message.is_visible()
        page.click("#save")
        saved(page)
        page.click("#undo")
        assert not message.is_visible()


def test_a_folder_that_is_moved_is_no_success(tmp_path):
    folder, output = begin(tmp_path)
    with served(folder, output) as (address, _), opened(address) as page:
        tile = page.locator(".tile").last
        file = tile.locator("img").get_attribute("alt")
        folder.rename(folder.with_name("moved"))
        tile.dblclick()
        page.wait_for_function("() => document.getElementById('large-name').textContent.length > 0")
        title = tile.get_attribute("title")
        page.wait_for_function(
            "title => document.getElementById('large-name').textContent !== title", arg=title
        )
        assert file in page.locator("#large-name").text_content()
        page.keyboard.press("Escape")
        page.click("#train")
        page.wait_for_selector("#training.failed", timeout=120_000)
        assert not page.locator("#trained").is_visible()
        folder.with_name("moved").rename(folder)
        page.complaints.clear()  # of pictures that were not found


PROGRESS = {
    "precomputing phone, pooled: 174/217 images, about 7 s left": "174 217 7",
    "[0/1] HMOE-ND on phone, seed 0 (4d4d10) 1/300 updates, about 20 s left in all": "1 300 20",
    "[1/1] HMOE-ND on phone, pooled, test held out, seed 0 (4d4d10547359): 23 s": "",
    "note: 1 of 218 images cannot be read and are left out: IMG_0001.jpg": "",
    "something 5 unknown": "5",
}


def test_progress_and_sizes_are_in_plain_numbers(tmp_path):
    folder, output = begin(tmp_path)
    with served(folder, output) as (address, _), opened(address) as page:
        for line, numbers in PROGRESS.items():
            words = page.evaluate("line => inPlainWords(line)", line)
            assert " ".join(re.findall(r"\d+", words)) == numbers, line
            assert not re.search("HMOE|pooled|seed|note", words)
        sizes = page.evaluate("() => [...Array(30).keys()].map(sizeToTrain)")
        assert sizes[2:] == [size - max(1, size // 5) for size in range(2, 30)]
        page.evaluate("() => { data.held_out = null; }")
        minimum = page.evaluate("() => data.minimum")
        for size in range(1, 8):
            lacking = page.evaluate(
                "size => { groupOf.fill(1); groupOf.fill(2, 0, size); return lacking(2); }", size
            )
            assert sizes[size + lacking] >= minimum
            assert not lacking or sizes[size + lacking - 1] < minimum


def test_the_menu_keeps_the_group_to_which_pictures_were_moved(tmp_path):
    folder, output = begin(tmp_path)
    first, second, third, *_ = sorted(set(groups_of(output)))
    with served(folder, output) as (address, _), opened(address) as page:
        size = column(page, third).locator(".tile").count()
        column(page, first).locator(".tile").last.click()
        page.select_option("#target", label=third)
        page.click("#move")
        column(page, first).locator(".tile").last.click()
        page.click("#move")
        assert column(page, third).locator(".tile").count() == size + 2
        column(page, second).locator(".tile").last.click()
        page.select_option("#target", label="a new group")
        page.click("#move")
        column(page, second).locator(".tile").last.click()
        page.click("#move")
        made = page.evaluate("() => groups[groups.length - 1].name")
        assert column(page, made).locator(".tile").count() == 2


def test_if_the_program_ends_no_training_is_shown(tmp_path):
    folder, output = begin(tmp_path)
    with served(folder, output) as (address, process), opened(address) as page:
        page.click("#train")
        page.wait_for_function("() => !document.getElementById('stop').hidden")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        page.wait_for_selector("#message:not([hidden]):not(.good)")
        assert not page.locator("#training").is_visible()
        page.complaints.clear()  # of requests that nobody answers
