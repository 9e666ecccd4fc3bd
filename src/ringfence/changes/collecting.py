"""From the records of a capture to `Changes`: what differs between the host's directory and what the sandbox sees.

Guards against an upper layer that lies. Its records say "here is a file", "below this nothing of the host shows" or
"this is gone", and each is taken to mean no more than that, inside the workspace: a deletion lists every file of the
host that it covers, so that nothing can vanish that the review did not name, and marks that our mounts never make
(redirects, metacopy) are shown and mean nothing. Guards the reviewer's machine too: only what the upper holds is read,
and of the host the same names and what lies below a deleted or hidden directory.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import IO

from ringfence.changes.differences import Work, is_text, unified
from ringfence.changes.model import Change, Changes, FileState
from ringfence.changes.places import Seen, Tree
from ringfence.errors import CaptureError
from ringfence.node.capture import Entry
from ringfence.policy.protected import protection
from ringfence.stream.trees import link_stays_inside

__all__ = ["collect"]

TEXT = 1 << 20  # bytes of one side of a diff
_MOST = 4 << 30  # bytes of a file of the host that is read for its hash
_ENTRIES = 1_000_000  # changes of one capture, those of deleted trees included
_BITS = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX


@dataclass(slots=True)
class _Node:
    """One record of the upper, with its content put aside."""

    kind: str
    mode: int
    size: int
    opaque: bool
    strange: tuple[str, ...]
    target: bytes
    offset: int = -1
    sha256: str | None = None


@dataclass(slots=True)
class _Draft:
    """A change while it is put together."""

    path: bytes
    seen: Seen | None
    node: _Node | None
    before: FileState | None = None
    after: FileState | None = None
    old: _Draft | None = None  # of a rename: the deletion that it is made of
    conflict: str = ""
    note: str = ""
    impossible: str = ""

    @property
    def kind(self) -> str:
        if self.old is not None:
            return "renamed"
        if self.before is None or self.after is None:
            return "created" if self.before is None else "deleted"
        same = replace(self.before, mode=0) == replace(self.after, mode=0)
        return "mode" if same else "modified"


def collect(
    entries: Iterable[Entry],
    source: Tree,
    name: str = "",
    *,
    started_ns: int = 1 << 62,
    written: Mapping[bytes, Seen] | None = None,
    frozen: bool = True,
    entries_limit: int = _ENTRIES,
) -> Changes:
    """The changes that `entries` make to the directory `source`, called `name`.

    `started_ns`: when the sandbox started, in nanoseconds since 1970; what the host changed later is a conflict,
    except where it is as `written` says, which `apply` left there.
    Raises CaptureError beyond the bounds, and OSError where the host's directory cannot be read.
    """
    contents = tempfile.TemporaryFile(prefix="ringfence-changes-")  # noqa: SIM115 - it lives as long as the changes
    try:
        nodes = _spool(entries, contents)
        collector = _Collector(source, nodes, contents, started_ns, written or {}, entries_limit)
        changes = collector.changes()
    except BaseException:
        contents.close()
        raise
    state = os.fstat(source.descriptor)
    return Changes(changes, contents, name, frozen=frozen, device=state.st_dev, inode=state.st_ino)


def _spool(entries: Iterable[Entry], contents: IO[bytes]) -> dict[bytes, _Node]:
    nodes: dict[bytes, _Node] = {}
    for entry in entries:
        node = _Node(entry.kind, entry.mode, entry.size, entry.opaque, entry.strange, entry.target)
        if entry.content is not None:
            node.offset, digest, size = contents.tell(), hashlib.sha256(), 0
            for piece in entry.content:
                digest.update(piece)
                contents.write(piece)
                size += len(piece)
            node.size, node.sha256 = size, digest.hexdigest()
        nodes[entry.path] = node
    contents.flush()
    return nodes


class _Collector:
    def __init__(
        self, source: Tree, nodes: dict[bytes, _Node], contents: IO[bytes], started_ns: int,
        written: Mapping[bytes, Seen], limit: int,
    ) -> None:  # fmt: skip
        self.source = source
        self.nodes = nodes
        self.contents = contents
        self.started_ns = started_ns
        self.written = written
        self.limit = limit
        self.drafts: dict[bytes, _Draft] = {}
        self.created_sizes = {node.size for node in nodes.values() if node.kind == "file" and node.size}
        self.texts: dict[bytes, bytes] = {}  # what the host had, where it is small enough for a diff
        self.kept = 64 << 20  # bytes that `texts` may still grow by
        self.children: dict[bytes, set[bytes]] = {}
        for path in nodes:
            if path:
                self.children.setdefault(path.rpartition(b"/")[0], set()).add(path)

    def changes(self) -> list[Change]:
        for path, node in self.nodes.items():
            self._entry(path, node)
        drafts = [draft for draft in self.drafts.values() if draft.before != draft.after or draft.impossible]
        _find_renames(drafts)
        gone = {id(draft.old) for draft in drafts if draft.old is not None}
        finished = [self._finish(draft) for draft in drafts if id(draft) not in gone]
        work = Work()
        # What needs a person's eyes most comes first, then what is small, lest one long text uses up the budget.
        for index in sorted(range(len(finished)), key=lambda index: (finished[index].ordinary, _weight(finished[index]))):
            finished[index] = self._with_diff(finished[index], work)
        return sorted(finished, key=lambda change: change.raw_path)

    # What is there, and what was -------------------------------------------------------------------------

    def _entry(self, path: bytes, node: _Node) -> None:
        seen = self.source.look(path) if path else None
        if path and node.kind == "whiteout":
            if seen is not None:
                self._deleted(path, seen)
                if seen.kind == "directory":
                    self._deleted_below(path)
            return
        if path:
            draft = self._draft(path, seen, node)
            draft.after = self._after(draft, node)
            if seen is not None:
                self._before(draft, seen)
                if seen.kind == "directory" and node.kind != "directory":
                    self._deleted_below(path)
        if node.opaque and (not path or (seen is not None and seen.kind == "directory")):
            self._hidden_below(path)

    def _draft(self, path: bytes, seen: Seen | None, node: _Node | None) -> _Draft:
        if len(self.drafts) >= self.limit:
            raise CaptureError(
                f"more than {self.limit} files were changed", hint="discard the changes, or copy files out instead"
            )
        draft = self.drafts[path] = _Draft(path, seen, node)
        return draft

    def _after(self, draft: _Draft, node: _Node) -> FileState:
        if node.kind == "other":
            draft.impossible = "a device, socket or FIFO is never written"
            return FileState("other", node.mode & 0o777)
        if node.mode & _BITS and node.kind == "file":
            draft.note = "set-id and sticky bits are left out"
        if node.kind == "link":
            return FileState("link", 0o777, target=os.fsdecode(node.target))
        if node.kind == "directory":
            return FileState("directory", node.mode & 0o777)
        return FileState("file", node.mode & 0o777, node.size, node.sha256)

    def _deleted(self, path: bytes, seen: Seen) -> None:
        if path not in self.drafts:
            self._before(self._draft(path, seen, None), seen)

    def _deleted_below(self, path: bytes) -> None:
        unreadable: list[bytes] = []
        for child, seen in self.source.below(path, unreadable):
            self._deleted(child, seen)
        self._cannot_be_read(unreadable)

    def _hidden_below(self, path: bytes) -> None:
        """An opaque directory: what the host has in it and the upper has not is gone."""
        unreadable: list[bytes] = []
        own = self.children.get(path, set())
        inside = b""  # a child that the upper has: its own record says what becomes of it
        for child, seen in self.source.below(path, unreadable):
            top = path + b"/" + child[len(path) + 1 :].partition(b"/")[0] if path else child.partition(b"/")[0]
            if top in own:
                inside = top
            elif top != inside:
                self._deleted(child, seen)
        self._cannot_be_read([each for each in unreadable if each not in self.nodes])
        for child in own:
            # The host's directory below shows through no further, though the upper's own has no mark.
            node = self.nodes[child]
            if node.kind == "directory":
                node.opaque = True

    def _cannot_be_read(self, paths: list[bytes]) -> None:
        for path in paths:
            draft = self.drafts.get(path)
            if draft is not None:
                draft.impossible = "what is in it cannot be read, so nothing can be said about what would be lost"

    def _before(self, draft: _Draft, seen: Seen) -> None:
        """What the host has, read as far as it matters, and whether the host changed it meanwhile."""
        path, mode = draft.path, seen.mode & 0o777
        if seen.device != self.source.device:
            draft.impossible = "another file system is mounted there"
            draft.before = FileState(seen.kind, mode)  # type: ignore[arg-type]
            return
        if seen.kind == "link":
            draft.before = FileState("link", 0o777, target=os.fsdecode(self._link(path)))
        elif seen.kind == "file":
            draft.before = FileState("file", mode, seen.size, self._hash(draft, seen))
        else:
            draft.before = FileState(seen.kind, mode)  # type: ignore[arg-type]
            if seen.kind == "other":
                draft.impossible = "a device, socket or FIFO of the host is never touched"
        ours = self.written.get(path)
        if seen.kind != "directory" and seen.ctime_ns > self.started_ns and seen != ours:
            draft.conflict = "the host changed it after the sandbox started"

    def _link(self, path: bytes) -> bytes:
        try:
            return self.source.read_link(path)
        except OSError:
            return b""

    def _hash(self, draft: _Draft, seen: Seen) -> str | None:
        """SHA-256 of the host's file where it is needed: to compare, to find renames, to show what is lost."""
        small = seen.size <= TEXT and self.kept >= seen.size
        if draft.node is None and not small and seen.size not in self.created_sizes:
            return None
        try:
            read, digest, text = self.source.read(draft.path, _MOST, TEXT if small else 0)
        except OSError as error:
            draft.conflict = f"the host's file cannot be read: {error.strerror or error}"
            return None
        if read != seen:
            draft.conflict = "the host changes it right now"
        if small:
            self.kept -= len(text)
            self.texts[draft.path] = text
        return digest

    # What a person has to know ---------------------------------------------------------------------------

    def _finish(self, draft: _Draft) -> Change:
        old = draft.old
        parts = [draft] if old is None else [old, draft]
        held: list[str] = []
        for part in parts:
            held += [reason for reason in self._reasons(part) if reason not in held]
        base = old if old is not None else draft
        return Change(
            kind=draft.kind,  # type: ignore[arg-type]
            path=os.fsdecode(draft.path),
            before=base.before,
            after=draft.after,
            old_path=None if old is None else os.fsdecode(old.path),
            held="; ".join(held),
            impossible=next((part.impossible for part in parts if part.impossible), ""),
            conflict=next((part.conflict for part in parts if part.conflict), ""),
            note=draft.note,
            seen=base.seen,
            offset=-1 if draft.node is None else draft.node.offset,
        )

    def _reasons(self, draft: _Draft) -> list[str]:
        path, found = os.fsdecode(draft.path), []
        for state in (draft.before, draft.after):
            row = protection(path, state.kind) if state is not None else None
            if row is not None:
                found.append(f"`{row.pattern}` is protected: {row.reason}")
                break
        if self._in_bare_repository(draft.path):
            found.append("it lies in a bare git repository, where git would run what it names")
        if draft.after is not None and draft.after.kind == "link":
            target = draft.after.target
            if not link_stays_inside(path.count("/"), target):
                found.append("the link points outside of the workspace, or may")
            else:
                pointed = os.path.normpath(os.path.join(os.path.dirname(path), target))
                row = protection(pointed, "link")
                if row is not None:
                    found.append(f"the link points at `{row.pattern}`, which is protected: {row.reason}")
        if draft.node is not None and draft.node.strange:
            found.append(f"the layer has marks there that Ringfence never makes: {', '.join(draft.node.strange)[:200]}")
        return found

    def _in_bare_repository(self, path: bytes) -> bool:
        """`config` and `hooks` beside `HEAD`, `objects` and `refs`: git takes such a directory for a repository."""
        names = path.split(b"/")
        for index, name in enumerate(names):
            if name.lower() in (b"config", b"hooks", b"config.worktree", b"commondir") and names[index - 1 : index] != [b".git"]:
                here = b"/".join(names[:index])
                if all(self._will_exist(here + b"/" + each if here else each) for each in (b"HEAD", b"objects", b"refs")):
                    return True
        return False

    def _will_exist(self, path: bytes) -> bool:
        node = self.nodes.get(path)
        return node.kind != "whiteout" if node is not None else self.source.look(path) is not None

    def _with_diff(self, change: Change, work: Work) -> Change:
        before, after = change.before, change.after
        kinds = {state.kind for state in (before, after) if state is not None}
        if change.kind in ("renamed", "mode") or not kinds <= {"file"}:
            if kinds == {"link"} and change.kind != "renamed":
                old, new = (os.fsencode(state.target) if state is not None else b"" for state in (before, after))
                return replace(change, diff=unified(old, new, work) or "")
            return replace(change, diff_note="it became something else" if len(kinds) > 1 else "")
        if any(state is not None and state.size > TEXT for state in (before, after)):
            return replace(change, diff_note=f"more than {TEXT >> 20} MiB")
        old = b"" if before is None else self.texts.get(change.raw_path)
        new = b"" if after is None else os.pread(self.contents.fileno(), after.size, change.offset)
        if old is None:
            return replace(change, diff_note="the limit of all diffs together is reached")
        if not is_text(old) or not is_text(new):
            return replace(change, diff_note="binary")
        diff = unified(old, new, work)
        if diff is None:
            return replace(change, diff_note="the limit of all diffs together is reached")
        return replace(change, diff=diff, diff_note="" if diff else "empty")


def _weight(change: Change) -> int:
    return sum(state.size for state in (change.before, change.after) if state is not None)


# Renames ----------------------------------------------------------------------------------------------------


def _find_renames(drafts: list[_Draft]) -> None:
    """Join a deletion and a creation of the same content: whole directories first, then files and links by name.

    Every step is a look-up, since the sandbox chooses how many equal files there are. Empty files are no evidence.
    """
    old, new = _Side(drafts, created=False), _Side(drafts, created=True)
    taken: set[bytes] = set()
    # Large trees first: then none is met whose inside was given away before.
    for path in sorted(new.digests, key=lambda path: (-new.sizes[path], path)):
        if new.drafts[path].old is not None:
            continue
        for candidate in old.by_digest.get(new.digests[path], ())[:8]:
            if candidate not in taken:
                _join_trees(old, new, candidate, path, taken)
                break
    for by_name in (True, False):
        left: dict[tuple[str, bytes], list[bytes]] = {}
        for path, draft in old.drafts.items():
            if path not in taken and (content := _content(draft.before)):
                left.setdefault((content, _name(path) if by_name else b""), []).append(path)
        for path, draft in new.drafts.items():
            found = left.get((_content(draft.after), _name(path) if by_name else b""))
            if found and draft.old is None:
                match = found.pop()
                taken.add(match)
                draft.old = old.drafts[match]


class _Side:
    """The deleted or the created names, and a digest of each directory that has a file in it."""

    def __init__(self, drafts: list[_Draft], created: bool) -> None:
        self.drafts = {
            draft.path: draft for draft in drafts
            if (draft.before if created else draft.after) is None and not draft.impossible
        }  # fmt: skip
        self.children: dict[bytes, list[bytes]] = {}
        broken: set[bytes] = {draft.path for draft in drafts if draft.impossible}
        for path in (*self.drafts, *broken):
            self.children.setdefault(path.rpartition(b"/")[0], []).append(path)
        digests: dict[bytes, str] = {}
        self.sizes: dict[bytes, int] = {}
        evidence: set[bytes] = set()
        for path in sorted(self.drafts, key=lambda path: path.count(b"/"), reverse=True):
            draft = self.drafts[path]
            state = draft.after if created else draft.before
            assert state is not None
            if state.kind != "directory":
                digest = _content(state) or ("empty" if state.kind == "file" and not state.size else "")
                if _content(state):
                    evidence.add(path)
            else:
                children = sorted(self.children.get(path, ()))
                digest = ""
                if all(digests.get(child) for child in children):
                    described = b"".join(b"%s\0%s\0" % (_name(child), os.fsencode(digests[child])) for child in children)
                    digest = "tree " + hashlib.sha256(described).hexdigest()
                    if not evidence.isdisjoint(children):
                        evidence.add(path)
            digests[path] = digest
            self.sizes[path] = 1 + sum(self.sizes[child] for child in self.children.get(path, ()) if child in self.sizes)
        self.digests = {path: digest for path, digest in digests.items() if digest.startswith("tree ") and path in evidence}
        self.by_digest: dict[str, list[bytes]] = {}
        for path, digest in self.digests.items():
            self.by_digest.setdefault(digest, []).append(path)


def _join_trees(old: _Side, new: _Side, old_path: bytes, new_path: bytes, taken: set[bytes]) -> None:
    waiting = [(old_path, new_path)]
    while waiting:
        old_here, new_here = waiting.pop()
        new.drafts[new_here].old = old.drafts[old_here]
        taken.add(old_here)
        named = {_name(child): child for child in old.children.get(old_here, ())}
        waiting += [(named[_name(child)], child) for child in new.children.get(new_here, ())]


def _name(path: bytes) -> bytes:
    return path.rpartition(b"/")[2]


def _content(state: FileState | None) -> str:
    """What a file or a link is recognised by; empty where nothing speaks for a rename."""
    if state is None or (state.kind == "file" and (not state.size or state.sha256 is None)):
        return ""
    return f"file {state.sha256}" if state.kind == "file" else f"link {state.target}" if state.kind == "link" else ""
