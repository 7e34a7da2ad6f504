"""The same history on fsspec's local files and on ours: results, exception types and trees must be the same.

Where fsspec's own is plainly wrong, or less than we promise, :data:`DIFFERENCES` says so, and the machine holds ours to
what is right.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from xds.filesystem import XdsFileSystem


@dataclass(frozen=True)
class Difference:
    """What is not the same, and why."""

    what: str
    local: str
    ours: str
    reason: str


DIFFERENCES = {
    "ranges": Difference(
        "cat_file and cat_ranges with bounds that cross, or an end before the start of the file",
        "the rest of the file",
        "b'', as data[start:end]",
        "fsspec issue 2101: a negative count means 'all' to read()",
    ),
    "append": Difference(
        "open(mode='ab' or 'xb') in a transaction",
        "written at once; the commit raises AttributeError",
        "written at the end of the transaction",
        "its files have a temporary name for mode 'wb' alone",
    ),
    "append position": Difference(
        "tell() after open(mode='ab')",
        "counted from 0 until the first flush",
        "counted from the size of the file, as of open()",
        "it looks for the size and goes back to 0",
    ),
    "parents": Difference(
        "put_file and get_file into a folder that does not exist",
        "FileNotFoundError, unless auto_mkdir",
        "the folder is made",
        "as AbstractFileSystem and all remote file systems do",
    ),
    "put in a transaction": Difference(
        "put_file in a transaction",
        "copied at once",
        "copied at the end of the transaction",
        "all that a transaction writes appears together",
    ),
    "errors of a transaction": Difference(
        "open(mode='wb') in a transaction, of a file that cannot be made",
        "raised at the end, when part of the files have their names; never, if the transaction fails",
        "raised at once",
        "its temporary files are elsewhere, and show nothing of the target",
    ),
    "folder in a transaction": Difference(
        "open(mode='wb') of a folder in a transaction",
        "a file of a random name in that folder",
        "IsADirectoryError",
        "shutil.move moves into folders",
    ),
    "visible": Difference(
        "a file between open(mode='wb') and close()",
        "emptied at once, then half written",
        "what it was; nothing, if it was not there",
        "a reader never sees half a file, and what fails leaves the old one",
    ),
    "failed block": Difference(
        "an exception within `with fs.open(path, 'wb')`",
        "what was written so far stays",
        "the old file stays",
        "a failed save leaves the old file",
    ),
    "hard links": Difference(
        "open(mode='wb') of a file with several hard links",
        "all names show the new bytes",
        "the other names keep the old bytes",
        "the new file takes the name at once, which needs an inode of its own",
    ),
    "protected folder": Difference(
        "open(mode='wb') of a writable file in a folder that is not",
        "written",
        "PermissionError; mode 'r+b' writes in place",
        "a new file cannot be made beside the old one",
    ),
    "brackets": Difference(
        "copy, get, put, cat, expand_path of a name that looks like a pattern, is there, and matches nothing else",
        "FileNotFoundError",
        "the name is meant",
        "as in a shell; fsspec issue 838",
    ),
    "links": Difference(
        "info of a link that leads nowhere; types of links in ls",
        "FileNotFoundError; 'other'",
        "type 'link'; the type of what the link leads to",
        "find and walk would lose every linked file",
    ),
    "relative": Difference(
        "paths that are relative, or begin with ~",
        "below the current or home folder",
        "UrlError, with what was probably meant",
        "a URL of a storage system has no current folder",
    ),
}

#: More by hand: ``XDS_TEST_EXAMPLES=5000 pytest tests/test_state_machine.py --timeout 0``.
EXAMPLES = int(os.environ.get("XDS_TEST_EXAMPLES", "150"))
# No phase that explains: it takes minutes, and the shrunk history says it all.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]

NAMES = ["a", "b", "c.txt", "a[1]", "ü #?%41"]
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
# Most steps should meet something that is there.
shallow = st.one_of(st.sampled_from(NAMES), paths)
contents = st.one_of(st.binary(max_size=12), st.just(b"line\n" * 3))
bounds = st.one_of(st.none(), st.integers(-15, 15))
patterns = st.one_of(
    st.sampled_from(["*", "**", "*/*", "**/*", "?", "a*", "*.txt", "[ab]", "a/*", "*/", "a/**", "b/*/c.txt", "a[[]1]"]),
    paths,
)


class Failed(Exception):
    """Ends a transaction."""


def outcome(action, root):
    """What an action gives: its result with names relative to ``root``, or the type of what it raises."""
    try:
        return "returned", relative(action(), root)
    except Exception as error:
        return "raised", type(error)


def relative(value, root):
    if isinstance(value, str):
        return "<root>" + value[len(root) :] if value == root or value.startswith(root + "/") else value
    if isinstance(value, dict):
        if {"name", "type", "size"} <= set(value):
            size = value["size"] if value["type"] == "file" else None  # of folders, a matter of the file system
            return relative(value["name"], root), value["type"], size, value["islink"], value["mode"]
        return {relative(key, root): relative(one, root) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [relative(one, root) for one in value]
    return type(value) if isinstance(value, Exception) else value


def tree(root):
    """Each path below ``root``: permission bits, and the bytes of a file."""
    found = {}
    for path in Path(root).rglob("*"):
        data = None if path.is_dir() else path.read_bytes()
        found[str(path.relative_to(root))] = stat.S_IMODE(path.stat().st_mode), data
    return found


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = os.path.realpath(tempfile.mkdtemp())
        # One last name for both: copying what "**" matches copies the root too.
        self.roots = {name: os.path.join(self.folder, name, "root") for name in ("local", "ours")}
        for root in self.roots.values():
            Path(root).mkdir(parents=True)
        self.outside = os.path.join(self.folder, "outside")

    def teardown(self):
        shutil.rmtree(self.folder)

    @initialize(auto_mkdir=st.booleans())
    def make(self, auto_mkdir):
        self.auto_mkdir = auto_mkdir
        self.fs = {"local": LocalFileSystem(auto_mkdir=auto_mkdir), "ours": XdsFileSystem(auto_mkdir=auto_mkdir)}

    def both(self, action, *, ordered=True):
        """Run on both, compare, return what both gave."""
        results = {}
        for name, root in self.roots.items():
            fs = self.fs[name]
            results[name] = outcome(lambda fs=fs, root=root: action(fs, lambda path: f"{root}/{path}"), root)
        local, ours = results["local"], results["ours"]
        if not ordered and local[0] == ours[0] == "returned":
            local, ours = (("returned", sorted(one[1], key=repr)) for one in (local, ours))
        note(f"  {ours}")
        # An error of ours may be of a more specific class.
        if not (local[0] == ours[0] == "raised" and issubclass(ours[1], local[1])):
            assert ours == local
        return ours

    def bytes_of(self, path):
        return Path(self.roots["local"], path).read_bytes()

    def is_literal(self, pattern):
        """DIFFERENCES["brackets"]."""
        path = f"{self.roots['local']}/{pattern}"
        return has_magic(pattern) and os.path.exists(path) and set(self.fs["local"].glob(path)) <= {path}

    def missing_parent(self, path):
        return not Path(self.roots["local"], path).parent.is_dir()

    @invariant()
    def trees_are_the_same(self):
        assert tree(self.roots["ours"]) == tree(self.roots["local"])

    # Writing.

    @rule(path=shallow, data=contents, mode=st.sampled_from(["overwrite", "create"]))
    def pipe_file(self, path, data, mode):
        self.both(lambda fs, at: fs.pipe_file(at(path), data, mode=mode))

    @rule(items=st.dictionaries(shallow, contents, max_size=3))
    def pipe(self, items):
        self.both(lambda fs, at: fs.pipe({at(path): data for path, data in items.items()}))

    @rule(path=shallow, mode=st.sampled_from(["wb", "xb", "ab"]), pieces=st.lists(contents, max_size=3))
    def write(self, path, mode, pieces):
        def action(fs, at):
            with fs.open(at(path), mode) as file:
                written = [file.write(piece) for piece in pieces]
                return written, file.tell() if mode != "ab" else None  # DIFFERENCES["append position"]

        self.both(action)

    @rule(path=shallow, mode=st.sampled_from(["w", "a", "x"]), text=st.text("aü\n", max_size=5))
    def write_text(self, path, mode, text):
        def action(fs, at):
            with fs.open(at(path), mode, encoding="utf-8") as file:
                return file.write(text)

        self.both(action)

    @rule(path=shallow, mode=st.sampled_from(["r+b", "w+b"]), offset=st.integers(0, 20), data=contents)
    def change(self, path, mode, offset, data):
        def action(fs, at):
            with fs.open(at(path), mode) as file:
                before = file.read(3)
                file.seek(offset)
                file.write(data)
                file.seek(0)
                # What is raised must not leave the block: DIFFERENCES["failed block"]
                kind, last = outcome(lambda: file.seek(-1, 2), "")
                return before, file.readline(), file.read(), kind, last if kind == "returned" else None

        self.both(action)

    @rule(path=shallow, size=st.integers(0, 30))
    def cut(self, path, size):
        def action(fs, at):
            with fs.open(at(path), "r+b") as file:
                return file.truncate(size), file.tell()

        self.both(action)

    @rule(path=shallow, truncate=st.booleans())
    def touch(self, path, truncate):
        self.both(lambda fs, at: fs.touch(at(path), truncate=truncate))

    @rule(items=st.lists(st.tuples(shallow, contents), max_size=3), fails=st.booleans())
    def transaction(self, items, fails):
        # DIFFERENCES["errors of a transaction"] and ["folder in a transaction"]
        names = {path for path, _ in items}
        if any(
            Path(self.roots["local"], name).is_dir()
            or (not self.auto_mkdir and self.missing_parent(name))
            or any(other.startswith(f"{name}/") for other in names)
            for name in names
        ):
            return

        def action(fs, at):
            with contextlib.suppress(Failed), fs.transaction:
                for path, data in items:
                    fs.pipe_file(at(path), data)
                seen = [fs.exists(at(path)) for path, _ in items]
                if fails:
                    raise Failed
            return seen if not fails else None

        self.both(action)
        for fs in self.fs.values():
            fs._intrans, fs._transaction = False, None

    @rule(path=shallow, data=contents)
    def put_file(self, path, data):
        with open(self.outside, "wb") as file:
            file.write(data)
        if not self.auto_mkdir and self.missing_parent(path):  # DIFFERENCES["parents"]
            return
        self.both(lambda fs, at: fs.put_file(self.outside, at(path)))

    @rule(path=shallow)
    def get_file(self, path):
        def action(fs, at):
            fs.get_file(at(path), self.outside)
            with open(self.outside, "rb") as file:
                return file.read()

        if not Path(self.roots["local"], path).is_dir():
            self.both(action)

    # Names.

    @rule(path=shallow, create_parents=st.booleans())
    def mkdir(self, path, create_parents):
        self.both(lambda fs, at: fs.mkdir(at(path), create_parents=create_parents))

    @rule(path=shallow, exist_ok=st.booleans())
    def makedirs(self, path, exist_ok):
        self.both(lambda fs, at: fs.makedirs(at(path), exist_ok=exist_ok))

    @rule(path=shallow)
    def rmdir(self, path):
        self.both(lambda fs, at: fs.rmdir(at(path)))

    @rule(path=shallow, recursive=st.booleans())
    def rm(self, path, recursive):
        self.both(lambda fs, at: fs.rm(at(path), recursive=recursive))

    @rule(some=st.lists(shallow, max_size=3))
    def rm_many(self, some):
        self.both(lambda fs, at: fs.rm([at(path) for path in some], recursive=True))

    @rule(path=shallow)
    def rm_file(self, path):
        self.both(lambda fs, at: fs.rm_file(at(path)))

    @rule(old=shallow, new=shallow)
    def mv(self, old, new):
        self.both(lambda fs, at: fs.mv(at(old), at(new)))

    @rule(old=shallow, new=shallow)
    def cp_file(self, old, new):
        self.both(lambda fs, at: fs.cp_file(at(old), at(new)))

    @rule(old=st.one_of(shallow, patterns), new=shallow, recursive=st.booleans(), slash=st.sampled_from(["", "/"]))
    def copy(self, old, new, recursive, slash):
        if not self.is_literal(old):
            self.both(lambda fs, at: fs.copy(at(old), at(new) + slash, recursive=recursive))

    # Reading.

    @rule(path=shallow, start=bounds, end=bounds)
    def cat_file(self, path, start, end):
        kind, data = outcome(lambda: self.fs["ours"].cat_file(f"{self.roots['ours']}/{path}", start, end), "")
        if kind == "returned":
            assert data == self.bytes_of(path)[start:end]
        if kind == "raised" or not self.local_is_wrong(path, start, end):
            self.both(lambda fs, at: fs.cat_file(at(path), start, end))

    def local_is_wrong(self, path, start, end):
        """DIFFERENCES["ranges"]."""
        size = len(self.bytes_of(path))
        low = 0 if start is None else max(0, size + start) if start < 0 else start
        high = size if end is None else size + end if end < 0 else end
        return high < low

    @rule(ranges=st.lists(st.tuples(shallow, bounds, bounds), max_size=4))
    def cat_ranges(self, ranges):
        fs, root = self.fs["ours"], self.roots["ours"]
        names, starts, ends = ([one[place] for one in ranges] for place in range(3))
        found = fs.cat_ranges([f"{root}/{name}" for name in names], starts, ends)
        for path, start, end, data in zip(names, starts, ends, found, strict=True):
            assert outcome(lambda path=path: self.bytes_of(path)[start:end], "") == (  # noqa: B023 (called here)
                ("raised", type(data)) if isinstance(data, Exception) else ("returned", data)
            )

    @rule(path=shallow)
    def read_lines(self, path):
        def action(fs, at):
            with fs.open(at(path)) as file:
                return list(file), file.tell(), file.seek(2), file.read(2), file.size

        self.both(action)

    @rule(path=shallow)
    def ask(self, path):
        for name in ("info", "exists", "lexists", "isfile", "isdir"):
            self.both(lambda fs, at, name=name: getattr(fs, name)(at(path)))
        if Path(self.roots["local"], path).is_file():
            self.both(lambda fs, at: fs.size(at(path)))

    @rule(path=st.one_of(st.just(""), shallow), detail=st.booleans())
    def ls(self, path, detail):
        self.both(lambda fs, at: fs.ls(at(path), detail=detail), ordered=False)

    @rule(
        path=st.one_of(st.just(""), shallow),
        maxdepth=st.sampled_from([None, 1, 2]),
        withdirs=st.booleans(),
        detail=st.booleans(),
    )
    def find(self, path, maxdepth, withdirs, detail):
        self.both(lambda fs, at: fs.find(at(path), maxdepth=maxdepth, withdirs=withdirs, detail=detail))

    @rule(path=st.one_of(st.just(""), shallow), topdown=st.booleans(), maxdepth=st.sampled_from([None, 1, 2]))
    def walk(self, path, topdown, maxdepth):
        def action(fs, at):
            steps = fs.walk(at(path), topdown=topdown, maxdepth=maxdepth)
            return sorted((folder, sorted(folders), sorted(files)) for folder, folders, files in steps)

        self.both(action)

    @rule(pattern=patterns, detail=st.booleans())
    def glob(self, pattern, detail):
        self.both(lambda fs, at: fs.glob(at(pattern), detail=detail))

    @rule(path=st.one_of(st.just(""), shallow), total=st.booleans())
    def du(self, path, total):
        self.both(lambda fs, at: fs.du(at(path), total=total))

    @rule(pattern=patterns, recursive=st.booleans())
    def expand_path(self, pattern, recursive):
        if not self.is_literal(pattern):
            self.both(lambda fs, at: fs.expand_path(at(pattern), recursive=recursive))


def test_the_same_history_gives_the_same():
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("key", DIFFERENCES)
def test_differences_say_what_and_why(key):
    difference = DIFFERENCES[key]
    assert all((difference.what, difference.local, difference.ours, difference.reason))
    assert difference.local != difference.ours
