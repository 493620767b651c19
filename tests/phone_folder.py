"""A phone's folder of photographs, made up: three styles, and everything that goes wrong in such a
folder. `python tests/phone_folder.py FOLDER [--layout none|classes|domains|split]` writes one."""

import argparse
import io
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter

STYLES = ("outdoors", "scanned", "night")
CLASSES = ("house", "person", "tree")
LAYOUTS = ("none", "classes", "domains", "split")
SIZE = (480, 360)
ORIENTATION = 0x0112  # tag number in EXIF
TURNED = {
    3: Image.Transpose.ROTATE_180,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}


@dataclass
class Planted:
    "What was written: paths below `root`, with '/' between folders."

    root: str
    images: list[str] = field(default_factory=list)  # the ordinary ones
    styles: dict[str, str] = field(default_factory=dict)  # image -> style
    classes: dict[str, str] = field(default_factory=dict)  # image -> class
    same_file: list[tuple[str, str]] = field(default_factory=list)
    same_pixels: list[tuple[str, str]] = field(default_factory=list)
    near: list[tuple[str, str]] = field(default_factory=list)  # (image, altered copy)
    turned: list[tuple[str, str]] = field(default_factory=list)  # (image, the same by EXIF)
    leaks: list[tuple[str, str]] = field(default_factory=list)  # pairs in two folders
    screenshots: list[str] = field(default_factory=list)
    panoramas: list[str] = field(default_factory=list)
    dark: list[str] = field(default_factory=list)
    blurred: list[str] = field(default_factory=list)
    overexposed: list[str] = field(default_factory=list)
    tiny: list[str] = field(default_factory=list)
    outliers: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    heic: list[str] = field(default_factory=list)
    heic_readable: bool = False
    unknown: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)


def texture(rng, width, height):
    "Noise whose amplitude falls with frequency, as in photographs: (height, width) in 0..1."
    rows = np.fft.fftfreq(height)[:, None]
    columns = np.fft.rfftfreq(width)[None]
    frequency = np.maximum(np.hypot(rows * height, columns * width), 1)
    phase = np.exp(2j * np.pi * rng.random(frequency.shape))
    noise = np.fft.irfft2(phase / frequency**1.15, (height, width))
    return (noise - noise.min()) / np.ptp(noise)


def draw_object(draw, rng, name, ink, fill=None, width=1):
    "Draw a house, a person or a tree at a random place."
    x, y = rng.integers(90, SIZE[0] - 190), rng.integers(80, SIZE[1] - 190)
    s = int(rng.integers(70, 120))
    line = {"outline": ink, "width": width}
    if name == "house":
        draw.rectangle((x, y + s // 2, x + s, y + s + s // 4), fill=fill, **line)
        draw.polygon(((x - 9, y + s // 2), (x + s // 2, y), (x + s + 9, y + s // 2)), fill, ink)
        draw.rectangle((x + s // 3, y + s * 3 // 4, x + s // 2, y + s + s // 4), **line)
    elif name == "person":
        draw.ellipse((x, y, x + s // 2, y + s // 2), fill=fill, **line)
        draw.rectangle((x, y + s // 2, x + s // 2, y + s + s // 3), fill=fill, **line)
        draw.line((x - s // 3, y + s // 2, x, y + s // 2 + 12), ink, width + 2)
    else:
        draw.rectangle((x + s // 3, y + s // 2, x + s // 2, y + s + s // 3), fill=fill, **line)
        for k in range(3):
            top = y + k * s // 5
            corners = (
                (x - 8 * k, top + s // 3),
                (x + s // 2, top - 20),
                (x + s + 8 * k, top + s // 3),
            )
            draw.polygon(corners, fill, ink)


def outdoors(rng, name):
    "A photograph by daylight: a sky, a ground, an object, texture and the sensor's noise."
    width, height = SIZE
    detail = texture(rng, width, height)[..., None]
    horizon = int(height * rng.uniform(0.3, 0.6))
    sky = np.array((110, 160, 220)) + rng.integers(-30, 30, 3)
    ground = np.array((90, 120, 60)) + rng.integers(-30, 30, 3)
    base = np.where(np.arange(height)[:, None, None] < horizon, sky, ground)
    pixels = base * (0.35 + 1.1 * detail)
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    fill = tuple(int(v) for v in rng.integers(40, 230, 3))
    for _ in range(3):
        draw_object(draw, rng, name, (20, 15, 15), fill, 2)
    return noisy(image, rng, 3)


def scanned(rng, name):
    "A drawing in pencil, scanned: grey lines on paper."
    width, height = SIZE
    paper = 232 + 8 * (texture(rng, width, height) - 0.5)
    image = Image.fromarray(np.clip(paper, 0, 255).astype(np.uint8)).convert("RGB")
    draw = ImageDraw.Draw(image)
    for _ in range(3):
        draw_object(draw, rng, name, (60, 60, 60), None, 2)
    for _ in range(25):  # hatching
        x, y = rng.integers(0, width - 60), rng.integers(0, height - 60)
        draw.line((x, y, x + rng.integers(10, 60), y + rng.integers(10, 60)), (90, 90, 95), 1)
    return noisy(image, rng, 2)


def night(rng, name):
    "A street or a room by lamplight: dim and orange, with lamps."
    width, height = SIZE
    detail = texture(rng, width, height)[..., None]
    pixels = np.array((120, 75, 30)) * (0.2 + 0.9 * detail)
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(3):
        fill = tuple(int(v) for v in rng.integers((60, 40, 10), (150, 95, 60)))
        draw_object(draw, rng, name, (15, 10, 5), fill, 2)
    for _ in range(rng.integers(12, 22)):
        x, y, r = rng.integers(20, width - 20), rng.integers(10, height - 60), rng.integers(10, 18)
        draw.ellipse((x - r, y - r, x + r, y + r), (255, 225, 150))
    return noisy(image, rng, 5)


def noisy(image, rng, sigma):
    "An image with the noise of a sensor."
    pixels = np.asarray(image) + rng.normal(0, sigma, (*image.size[::-1], 3))
    return Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))


MAKERS = {"outdoors": outdoors, "scanned": scanned, "night": night}


def make_photograph(rng, style):
    "An image of a style with a random subject."
    return MAKERS[style](rng, CLASSES[rng.integers(3)])


def screenshot(rng, size=(1170, 2532)):
    "A conversation: a bar, and bubbles of text on one colour."
    image = Image.new("RGB", size, (250, 250, 252))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, size[0], 160), fill=(30, 110, 220))
    y = 220
    while y < size[1] - 300:
        right = rng.random() < 0.5
        x, width = (420, 700) if right else (40, 700)
        height = int(rng.integers(90, 260))
        colour = (60, 190, 90) if right else (228, 228, 232)
        draw.rounded_rectangle((x, y, x + width, y + height), 40, fill=colour)
        for line in range(y + 30, y + height - 30, 50):
            draw.rectangle(
                (x + 30, line, x + int(rng.integers(200, 660)), line + 16), fill=(40, 40, 44)
            )
        y += height + int(rng.integers(30, 120))
    return image


def cut(image, fraction, offset=0.5):
    "An image without a fraction of its width and of its height."
    width, height = (round(length * (1 - fraction)) for length in image.size)
    left = round((image.width - width) * offset)
    top = round((image.height - height) * offset)
    return image.crop((left, top, left + width, top + height))


ALTERED = {
    "resized": lambda image: image.resize((image.width * 3 // 5, image.height * 3 // 5)),
    "recompressed": lambda image: image,
    "cropped": lambda image: cut(image, 0.03),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.12),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.85),
}


class Writer:
    "Writes images to the folder of a layout, and remembers what they are."

    def __init__(self, root, layout):
        self.root, self.layout = Path(root), layout
        self.planted = Planted(str(root))
        self.number = 1000

    def folder(self, style, name, part="train"):
        "The folder of an image, with a '/' at its end, or ''."
        names = {"none": "", "classes": f"{name}/", "domains": f"{style}/{name}/"}
        return names.get(self.layout, f"{part}/{name}/")

    def write(self, image, style, name, part="train", suffix=".jpg", quality=92, exif=None):
        "Write an image under the next number, and return its path."
        self.number += 1
        file = f"{self.folder(style, name, part)}IMG_{self.number}{suffix}"
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        options = {"quality": quality} if suffix == ".jpg" else {}
        if exif is not None:
            options["exif"] = exif
        image.save(path, **options)
        self.planted.styles[file] = style
        self.planted.classes[file] = name
        return file


def plant_duplicates(writer, originals):
    "Plant copies: files, pixels, altered, turned, and in another folder."
    planted = writer.planted
    turn = iter(originals)
    for _ in range(2):
        file, image, style, name = next(turn)
        copy = writer.folder(style, name) + f"Copy of {Path(file).name}"
        (writer.root / copy).write_bytes((writer.root / file).read_bytes())
        planted.same_file.append((file, copy))
    file, image, style, name = next(turn)
    same = Image.open(writer.root / file).convert("RGB")
    planted.same_pixels.append((file, writer.write(same, style, name, suffix=".png")))
    for alter in ALTERED.values():
        for _ in range(2):
            file, image, style, name = next(turn)
            copy = writer.write(alter(image), style, name, quality=70)
            planted.near.append((file, copy))
    for orientation, transposed in TURNED.items():
        file, image, style, name = next(turn)
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        copy = writer.write(image.transpose(transposed), style, name, exif=exif)
        planted.turned.append((file, copy))
    for _ in range(3):
        file, image, style, name = next(turn)
        other_style = STYLES[(STYLES.index(style) + 1) % 3]
        if writer.layout in ("none", "classes"):
            name = CLASSES[(CLASSES.index(name) + 1) % 3]
        copy = writer.write(image, other_style, name, "test", quality=75)
        planted.leaks.append((file, copy))


def plant_bursts(writer, rng):
    "Plant two bursts of four shots by a moving hand."
    for style in ("outdoors", "night"):
        wide = MAKERS[style](rng, "person")
        files = []
        for k in range(4):
            shot = wide.crop((k, k // 2, wide.width - 8 + k, wide.height - 6 + k // 2))
            files.append(writer.write(noisy(shot, rng, 2), style, "person"))
        writer.planted.near += [(files[0], file) for file in files[1:]]


def plant_odd(writer, rng):
    "Plant screenshots, a panorama, and dark, blurred, overexposed, tiny and strange images."
    planted = writer.planted
    for _ in range(3):
        file = writer.write(screenshot(rng), "outdoors", "person", suffix=".png")
        planted.screenshots.append(file)
    wide = np.concatenate([np.asarray(outdoors(rng, "tree")) for _ in range(3)], axis=1)
    planted.panoramas.append(writer.write(Image.fromarray(wide), "outdoors", "tree"))
    pocket = ImageEnhance.Brightness(outdoors(rng, "house")).enhance(0.08)
    planted.dark.append(writer.write(pocket, "outdoors", "house"))
    for _ in range(2):
        shaken = outdoors(rng, "house").filter(ImageFilter.GaussianBlur(7))
        planted.blurred.append(writer.write(shaken, "outdoors", "house"))
    flash = outdoors(rng, "person").point(lambda v: min(255, int(1.5 * v + 130)))
    planted.overexposed.append(writer.write(flash, "outdoors", "person"))
    icon = outdoors(rng, "tree").resize((48, 36))
    planted.tiny.append(writer.write(icon, "outdoors", "tree", suffix=".png"))
    strange = np.zeros((360, 480, 3), np.uint8)  # the stripes of a broken camera
    stripe = np.arange(360)[:, None] // 12
    strange[..., 0] = 255
    strange[..., 1] = stripe % 3 * 110
    strange[..., 2] = stripe % 2 * 255
    file = writer.write(Image.fromarray(strange), "outdoors", "tree", suffix=".png")
    planted.outliers.append(file)


def heic_bytes(image):
    "The image as HEIC if pillow-heif is installed, else the head of a file that nobody can decode."
    try:
        import pillow_heif
    except ImportError:
        return b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), False
    buffer = io.BytesIO()
    pillow_heif.from_pillow(image).save(buffer, quality=90)
    return buffer.getvalue(), True


def plant_files(writer, rng):
    "Plant a damaged file, HEIC files, a video, and a hidden file."
    planted = writer.planted
    folder = writer.folder("outdoors", "house")
    buffer = io.BytesIO()
    outdoors(rng, "house").save(buffer, "JPEG", quality=90)
    planted.damaged.append(folder + "IMG_0001.jpg")
    (writer.root / planted.damaged[0]).write_bytes(buffer.getvalue()[:9000])
    for k in range(2):
        content, planted.heic_readable = heic_bytes(outdoors(rng, "tree"))
        planted.heic.append(folder + f"IMG_000{k + 2}.HEIC")
        (writer.root / planted.heic[-1]).write_bytes(content)
    planted.unknown.append(folder + "MOV_0004.mov")
    (writer.root / planted.unknown[0]).write_bytes(b"\0\0\0\x14ftypqt  " + bytes(256))
    planted.hidden.append(folder + "._IMG_1001.jpg")
    (writer.root / planted.hidden[0]).write_bytes(b"\0\5\x16\7" + bytes(64))


def make_phone_folder(root, per_style=60, layout="classes", seed=0):
    """Write the folder.

    Args:
        root: a new or empty folder.
        per_style: ordinary images of each of the three styles, at least 24.
        layout: 'none' (all in one folder), 'classes' (house, person, tree), 'domains'
            (<style>/<class>), or 'split' (train/<class> and test/<class>).
        seed: of everything drawn.

    Returns:
        What was planted.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: one of {', '.join(LAYOUTS)}")
    if per_style < 24:
        raise ValueError("per_style: at least 24")
    rng = np.random.default_rng(seed)
    writer = Writer(root, layout)
    Path(root).mkdir(parents=True, exist_ok=True)
    originals = []
    for i in range(per_style):
        for style in STYLES:
            name = CLASSES[i % 3]
            image = MAKERS[style](rng, name)
            part = "test" if i % 5 == 4 else "train"
            file = writer.write(image, style, name, part)
            writer.planted.images.append(file)
            if part == "train":
                originals.append((file, image, style, name))
    plant_duplicates(writer, originals)
    plant_bursts(writer, rng)
    plant_odd(writer, rng)
    plant_files(writer, rng)
    return writer.planted


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--layout", choices=LAYOUTS, default="classes")
    parser.add_argument("--per-style", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    made = make_phone_folder(given.folder, given.per_style, given.layout, given.seed)
    print(json.dumps(asdict(made), indent=1))
