"""Looks for a canary: walks all that can be listed, reads all that can be read, and says where it was found.

Arguments: the canary, then the directory to begin at. Skips /proc, files that are no regular files, and all
but the first 64 KiB of a file.
"""

import os
import stat
import sys

from report import say

canary = sys.argv[1].encode()
found = []
count = 0
for directory, directories, files in os.walk(sys.argv[2]):
    if directory in ("/", "//"):
        directories[:] = [name for name in directories if name not in ("proc", "usr", "opt")]
    for name in files + directories:
        path = os.path.join(directory, name)
        count += 1
        if canary in os.fsencode(name):
            found.append(path)
        try:
            if stat.S_ISREG(os.stat(path).st_mode):
                with open(path, "rb") as file:
                    if canary in file.read(65536):
                        found.append(path)
        except OSError:
            continue
say("found", found)
say("looked at", count)
for path in sys.argv[3:]:
    try:
        with open(path, "rb") as file:
            say(path, canary in file.read())
    except OSError:
        say(path, False)
