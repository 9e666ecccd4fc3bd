"""Fonts for charts in scripts that matplotlib's own fonts lack: Chinese, Japanese, Korean, Arabic, Devanagari and more.

Guards against tofu: a chart whose title is a row of empty boxes says nothing, and nobody inside a sandbox can
install a font. Two packages bring Google's Noto fonts under the SIL Open Font License; their files are linked into
matplotlib's own directory of fonts, where every process of a sandbox finds them without a look at the system, and
matplotlib's own defaults name them as fall-backs behind DejaVu Sans, glyph by glyph.

A program that replaces `font.family` (some styles do) has replaced the fall-backs too. The host imports nothing
of these packages; matplotlib itself is imported once, in a process of its own, to list the fonts. Standard library
only.
"""

from __future__ import annotations

import os
from collections.abc import Callable

_FOLDERS = ("noto_cjk_sans_jp_regular", "manimgx_fonts")
"""Of `noto-cjk-sans-jp-regular` (16 MB: the Han of all three languages, kana, Hangul) and `manimgx-fonts` (7 MB: some
twenty further scripts), PyPI projects that hold nothing but fonts."""

FAMILIES = (
    "DejaVu Sans", "Noto Sans CJK JP", "Noto Sans Arabic", "Noto Sans Devanagari", "Noto Sans Bengali",
    "Noto Sans Gurmukhi", "Noto Sans Gujarati", "Noto Sans Oriya", "Noto Sans Tamil", "Noto Sans Telugu",
    "Noto Sans Kannada", "Noto Sans Malayalam", "Noto Sans Sinhala", "Noto Sans Thai", "Noto Sans Lao",
    "Noto Sans Khmer", "Noto Sans Myanmar", "Noto Sans Ethiopic", "Noto Sans Symbols", "Noto Emoji",
)  # fmt: skip
"""In the order in which a glyph is looked for. Families that are not there are left out of the defaults: matplotlib
would warn of each."""


def lend(site_packages: str) -> list[str]:
    """Link the fonts below `site_packages` into matplotlib there and name them in its defaults.

    Returns the families named; nothing is changed where the font packages are absent.
    """
    data = os.path.join(site_packages, "matplotlib", "mpl-data")
    target = os.path.join(data, "fonts", "ttf")
    found = set()
    for folder in _FOLDERS:
        for name in sorted(_listing(os.path.join(site_packages, folder))):
            family = _family(name)
            if family in FAMILIES and os.path.isdir(target):
                # Relative, because the tree is mounted elsewhere. Plain names: brackets mean much to globs.
                plain = name.replace("[", "-").replace("]", "")
                os.symlink(f"../../../../{folder}/{name}", os.path.join(target, plain))
                found.add(family)
    families = [family for family in FAMILIES if family in found or family == FAMILIES[0]]
    if found:
        _write_defaults(os.path.join(data, "matplotlibrc"), families)
    return families if found else []


def _family(name: str) -> str:
    """The family a file of these packages holds, by its name: `NotoSansArabic[wght].ttf` is Noto Sans Arabic."""
    stem, extension = os.path.splitext(name)
    if extension not in (".ttf", ".otf") or "Italic" in stem:
        return ""
    stem = stem.partition("[")[0]
    for family in FAMILIES:
        if stem in (family.replace(" ", ""), family.replace(" CJK JP", "CJKjp").replace(" ", "") + "-Regular"):
            return family
    return ""


def _write_defaults(path: str, families: list[str]) -> None:
    """Replace the one line of matplotlib's defaults that names the family; all lines there are comments with values."""
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    for number, line in enumerate(lines):
        if line.lstrip("#").split(":")[0].strip() == "font.family":
            lines[number] = f"font.family: {', '.join(families)}"
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


_SCRIPT = """
import os, sys
site_packages, target = sys.argv[1:]
sys.path.insert(0, site_packages)
import matplotlib.font_manager as fonts
manager = fonts.fontManager
data = fonts.cbook._get_data_path() if hasattr(fonts.cbook, "_get_data_path") else ""
def usable(entry):
    return str(entry.fname).startswith(("/usr/share/", str(data) + os.sep))
manager.ttflist = [entry for entry in manager.ttflist if usable(entry)]
manager.afmlist = [entry for entry in manager.afmlist if usable(entry)]
os.makedirs(target, exist_ok=True)
fonts.json_dump(manager, os.path.join(target, "fontlist-v%s.json" % fonts.FontManager.__version__))
"""


def write_list(
    target: str, directory: str, site_packages: str, executable: str, run: Callable[..., None]
) -> None:
    """Matplotlib's font list, with paths that are right inside: relative for its own, /usr/share for the system's.

    Only a cache: where it fails, the first plot scans the fonts itself. It imports matplotlib on the host, so it is
    for packages that are installed here anyway, never for a wheel that was fetched for a sandbox.
    """
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["-B", "-c", _SCRIPT, site_packages, target]
        run(executable, arguments, None, {"HOME": scratch, "MPLCONFIGDIR": scratch, "MPLBACKEND": "agg"})
    for name in _listing(target):
        path = os.path.join(target, name)
        with open(path, encoding="utf-8") as file:
            if directory in file.read():
                os.unlink(path)  # a path of this build would be wrong inside, and says where the cache lies


def _listing(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
