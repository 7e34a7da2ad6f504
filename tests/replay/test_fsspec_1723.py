"""fsspec#1723 and #1685: a __del__ at the end of the interpreter waited for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAMS = {
    "a file that reads": "f = fs.open(path); f.read(10)",
    "a file that reads wide": "f = fs.open(path); f.read()",
    "a file with a cache": "f = fs.open(path, cache_type='background'); f.read(10)",
    "a file that writes": "f = fs.open(path + '2', 'wb'); f.write(b'x' * 10)",
    "a text that writes": "f = fs.open(path + '2', 'w'); f.write('x' * 10)",
    "a codec that writes": "f = fs.open(path + '2', 'wb', compression='gzip'); f.write(b'x')",
    "a transaction": "fs.start_transaction(); f = fs.open(path + '2', 'wb'); f.write(b'x')",
    "a future": "import numpy; a = numpy.empty(3 << 20, 'u1'); f = fs.open(path); p = f.pread(a)",
    "a cycle": "f = fs.open(path + '2', 'wb'); f.me = f; f.write(b'x')",
    "a chain": "import fsspec; f = fsspec.open('simplecache::xds://' + path).open(); f.read(1)",
    "a coroutine": "import asyncio; fs = XdsFileSystem(asynchronous=True); asyncio.run(fs._cat_file(path))",
    "a thread": "import threading; threading.Thread(target=fs.cat_file, args=(path,)).start()",
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_the_interpreter_ends(data_file, what):
    begin = "import sys; from xds.filesystem import XdsFileSystem; path = sys.argv[1]; fs = XdsFileSystem(); "
    program = begin + PROGRAMS[what]
    done = subprocess.run(
        [sys.executable, "-c", program, data_file], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
