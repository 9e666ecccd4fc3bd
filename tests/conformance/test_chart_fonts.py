"""Charts speak the user's language: no glyph is missing, in cells and in programs, and shapes are real ones."""

from __future__ import annotations

import struct
import zlib
from typing import Any

from ringfence import Sandbox

SCRIPTS = {
    "Japanese": "日本語", "Chinese": "中文简体", "Korean": "한국어", "Arabic": "العربية", "Devanagari": "हिन्दी",
    "Thai": "ภาษาไทย", "Hebrew": "עברית",
}  # fmt: skip

CHART = """
import io, warnings
import matplotlib.pyplot as plt
caught = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    plt.figure(figsize=(6, 1)); plt.axis("off")
    plt.title("日本語 العربية हिन्दी 中文 한국어")
    plt.savefig("chart.png")
    plt.close("all")
print([str(each.message) for each in caught])
"""

PIXELS = """
import numpy, matplotlib.pyplot as plt
def drawn(text, family=None):
    figure = plt.figure(figsize=(3, 1), dpi=60)
    figure.text(0.05, 0.3, text, fontsize=24, **({"family": family} if family else {}))
    figure.canvas.draw()
    dark = numpy.asarray(figure.canvas.buffer_rgba())[..., 0] < 128
    plt.close(figure)
    return dark
def cropped(dark):
    rows, columns = numpy.where(dark)
    return dark[rows.min():rows.max() + 1, columns.min():columns.max() + 1]
"""


def lines(execution: Any) -> str:
    assert execution.error is None, execution.error
    return "".join(execution.logs.stdout).strip()


def test_a_title_in_other_scripts_comes_out_without_a_warning(data_sandbox: Sandbox) -> None:
    assert lines(data_sandbox.run_code(CHART)) == "[]"
    picture = data_sandbox.files.read("chart.png", format="bytes")
    width, height = struct.unpack(">II", picture[16:24])
    assert (width, height) == (600, 100)
    assert zlib.crc32(picture)  # a whole file came back


def test_a_program_of_its_own_finds_the_same_fonts(data_sandbox: Sandbox) -> None:
    data_sandbox.files.write("chart.py", CHART)
    done = data_sandbox.commands.run("python chart.py", timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_no_glyph_is_the_box_for_a_missing_one(data_sandbox: Sandbox) -> None:
    """Two different characters that no font has give the same picture; two that a font has do not."""
    code = PIXELS + f"""
import warnings; warnings.simplefilter("ignore")
def same(first, second, family=None):
    one, other = cropped(drawn(first, family)), cropped(drawn(second, family))
    return one.shape == other.shape and bool((one == other).all())
scripts = {SCRIPTS!r}
# The control: with DejaVu Sans alone, which has no Han, every character is the same box.
print(same("日", "本", "DejaVu Sans"))
boxes = set()
for name, text in scripts.items():
    letters = [each for each in text if each.isalpha()]
    box = cropped(drawn("\U000F0000"))
    for letter in letters:
        picture = cropped(drawn(letter))
        if picture.shape == box.shape and (picture == box).all():
            boxes.add((name, letter))
    if all(same(letters[0], other) for other in letters[1:] if other != letters[0]):
        boxes.add((name, text))
print(sorted(boxes))
"""
    assert lines(data_sandbox.run_code(code, timeout=120)).splitlines() == ["True", "[]"]


def test_arabic_is_joined_and_runs_from_the_right(data_sandbox: Sandbox) -> None:
    """Where letters are joined, a word is narrower than its letters side by side."""
    code = PIXELS + """
import matplotlib
word = cropped(drawn("بيت")).shape[1]
apart = cropped(drawn("ب\u200cي\u200cت")).shape[1]
print(tuple(map(int, matplotlib.__version__.split(".")[:2])) < (3, 11) or word < apart)
"""
    assert lines(data_sandbox.run_code(code)) == "True"
