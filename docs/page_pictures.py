"""Draw the pictures of docs/evaluate.md: parts of the pages of `hmoe evaluate` and `hmoe report`.

    python docs/page_pictures.py

Two algorithms are trained on the embedded digits for a few updates. Their pages are shown in a
headless Chromium (playwright), and a part of each is kept as a PNG file next to this one.
"""

import io
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from hmoe_repro.apps.evaluate import evaluate
from hmoe_repro.apps.study_page import study_page
from hmoe_repro.studies.studies import study_configs
from hmoe_repro.studies.sweep import sweep
from hmoe_repro.training.store import RunStore

HERE = Path(__file__).resolve().parent
WIDTH = 1150  # of a page, in pixels
COLOURS = 128  # of a picture
STUDY = """
title = "ERM and GroupDRO on two unseen styles of digits"
algorithms = ["ERM", "GroupDRO"]
datasets = ["DigitDomains"]
test_domains = ["negative", "sketch"]
seeds = 2
steps = 301
checkpoint_frequency = 50
network = "small_cnn"

[hparams.all]
batch_size = 32
"""


def keep_part(page_file: Path, picture: Path, height: int, first: int = 0):
    "Write `height` rows of pixels of a page, from row `first` on, as a small PNG file."
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium")
        page = browser.new_page(viewport={"width": WIDTH, "height": first + height})
        page.goto(page_file.as_uri())
        part = {"x": 0, "y": first, "width": WIDTH, "height": height}
        shot = page.screenshot(clip=part)
        browser.close()
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    image.quantize(COLOURS).save(picture, optimize=True)


def main():
    "Train, write both pages, and keep a part of each."
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        file = work / "two_algorithms.toml"
        file.write_text(STUDY, encoding="utf-8")
        store = RunStore(work / "runs")
        sweep(study_configs(file), store=store, jobs=0)
        evaluated = evaluate(file, store=store)  # which also keeps predictions for the report
        keep_part(evaluated.save(work / "evaluation.html"), HERE / "evaluate_page.png", 1500)
        keep_part(study_page(file, store, work), HERE / "report_page.png", 1500)


if __name__ == "__main__":
    main()
