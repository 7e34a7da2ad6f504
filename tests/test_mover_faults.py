"""The mover on storage that misbehaves: each case is a process of its own, with ``faulty_io.cpp`` before its reads."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap

import checkpoint_files
import pytest

NBYTES = (2 << 20) + 4321
DIRECT, BUFFERED, PREAD = (
    "pread,mapped,buffered,uring",
    "pread,mapped,direct,uring",
    "mapped,buffered,direct,uring",
)

PRELUDE = """
import ctypes, errno, gc, json, os, signal, sys, threading, time, weakref
import numpy as np
from xds.engine import mover
from xds.engine.mover import MoverTransfer
from xds.errors import CancelledError, ReadTimeoutError, ShortReadError, XdsError
from xds.plan import segments

path = sys.argv[1]
fd = os.open(path, os.O_RDONLY)
size = os.fstat(fd).st_size
with open(path, "rb") as file:
    expected = file.read()

def begin(array, timeout_s=60.0):
    transfer = MoverTransfer([fd], [path], timeout_s=timeout_s)
    batch = segments(1)
    batch[0] = (0, array.nbytes, array.ctypes.data, 0, 0)
    transfer.add(batch, keepalive=array)
    transfer.seal()
    return transfer

def read():
    array = np.zeros(size, np.uint8)
    with begin(array) as transfer:
        report = transfer.wait()
    assert array.tobytes() == expected
    return report

def fault(**variables):
    # From here on: what was imported and read before had good storage.
    for name, value in variables.items():
        os.environ["FAULTY_" + name.upper()] = str(value)

def tell(report):
    print(json.dumps({"method": report.method, "retries": report.retries, "notes": report.notes,
                      "resident": report.resident, "threads": report.threads}), flush=True)
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The library that stands before the reads."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source = os.path.join(os.path.dirname(__file__), "faulty_io.cpp")
    target = tmp_path_factory.mktemp("faulty") / "faulty_io.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", source, "-o", target, "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return str(target)


@pytest.fixture
def process(library, tmp_path):
    """Run a script over a file; gives ``(return code, standard output, standard error)``."""
    path = tmp_path / "the-file"
    path.write_bytes(random.Random(11).randbytes(NBYTES))
    checkpoint_files.drop_cache(path)
    started = []

    def start(script, *, forbid=BUFFERED, chunk_nbytes=65536, threads=4, **variables):
        environment = {
            **os.environ,
            "LD_PRELOAD": library,
            "OPENBLAS_NUM_THREADS": "1",
            "FAULTY_PATH": "the-file",
            "XDS_MOVER_FORBID": forbid,
            "XDS_MOVER_THREADS": str(threads),
            "XDS_MOVER_CHUNK_NBYTES": str(chunk_nbytes),
            **{f"XDS_MOVER_{name.upper()}": str(value) for name, value in variables.items()},
        }
        child = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(path), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        return child

    def run(script, **options):
        child = start(script, **options)
        out, err = child.communicate(timeout=90)
        return child.returncode, out, err

    run.start = start
    run.path = path
    yield run
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.fixture
def told(process):
    """Run a script that ends well; gives what it told."""

    def run(script, **options):
        code, out, err = process(script, **options)
        assert code == 0, err
        return json.loads(out.splitlines()[-1])

    return run


def direct_works(path):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


# ---- faults that pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forbid", [DIRECT, BUFFERED, PREAD])
def test_interrupted_reads_are_repeated(told, forbid):
    report = told(f"fault(fail='7:{errno.EINTR}')\ntell(read())", forbid=forbid)
    assert sum(report["method"].values()) == NBYTES
    if forbid != DIRECT:  # a read with O_DIRECT is repeated in place
        assert report["retries"] >= 7


@pytest.mark.parametrize("forbid", [DIRECT, BUFFERED, PREAD])
@pytest.mark.parametrize("most", [1000, 4096, 30000])
def test_short_reads_are_continued(told, forbid, most):
    report = told(f"fault(short={most})\ntell(read())", forbid=forbid)
    assert sum(report["method"].values()) == NBYTES
    if most % 4096:
        assert report["retries"] > 0


def test_a_direct_read_that_would_block_goes_on_through_the_page_cache(told, process):
    if not direct_works(process.path):
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    report = told(f"fault(direct={errno.EAGAIN})\ntell(read())", forbid=DIRECT)
    assert report["method"] == {"buffered": NBYTES}
    assert report["retries"] > 0


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_refused_direct_reads_go_through_the_page_cache(told, process, code):
    if not direct_works(process.path):
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    report = told(f"fault(direct={code})\ntell(read())", forbid=DIRECT)
    assert report["method"] == {"buffered": NBYTES}
    assert any("refused O_DIRECT" in note for note in report["notes"])


def test_a_file_that_cannot_be_mapped_is_read(told):
    script = f"""
        os.pread(fd, size, 0)
        fault(mmap={errno.ENODEV})
        tell(read())
    """
    report = told(script, forbid="pread,uring,direct,buffered")
    assert report["method"] == {"pread": NBYTES}


def test_residency_that_cannot_be_asked(told):
    report = told(f"fault(nowait={errno.EOPNOTSUPP})\ntell(read())", forbid="")
    assert report["method"] == {"buffered": NBYTES}
    assert report["resident"] is None
    assert any("RWF_NOWAIT refused" in note for note in report["notes"])


def test_cold_says_the_kernel_and_so_the_report(told):
    report = told("fault(cold=1)\ntell(read())", forbid="")
    assert report["resident"] == 0.0
    assert set(report["method"]) <= {"direct", "uring", "buffered"}


DENY_IO_URING = f"""
class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]

class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]

# Load the number of the call; io_uring_setup (425 everywhere) answers EPERM, all else goes through.
code = (Instruction * 4)((0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | {errno.EPERM}),
                         (0x06, 0, 0, 0x7FFF0000))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(Program(4, code)), 0, 0):
    print(json.dumps({{"refused": os.strerror(ctypes.get_errno())}}))
    raise SystemExit
"""


def test_without_io_uring_threads_read_with_direct(told, process):
    if not direct_works(process.path):
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    report = told(DENY_IO_URING + "tell(read())", forbid="pread,mapped,buffered")
    if "refused" in report:
        pytest.skip(f"seccomp is not allowed here: {report['refused']}")
    assert report["method"] == {"direct": NBYTES}
    assert any("io_uring is not allowed here" in note for note in report["notes"])


@pytest.mark.parametrize("most", [1, 3])
def test_as_many_threads_as_there_may_be(told, most):
    report = told(f"fault(threads={most})\ntell(read())\ntell(read())")
    assert 1 <= report["threads"] <= most


# ---- faults that do not ---------------------------------------------------------------------------------------------


def test_no_thread_at_all_is_an_error(process):
    script = f"""
        fault(threads=0)
        try:
            read()
        except XdsError as error:
            assert error.errno == {errno.EAGAIN}, error
            print("refused")
        os.environ.pop("FAULTY_THREADS")
        read()
    """
    code, out, err = process(script)
    assert (code, out) == (0, "refused\n"), err


@pytest.mark.parametrize("forbid", [DIRECT, BUFFERED, PREAD])
def test_a_bad_sector_is_named(process, forbid):
    script = f"""
        fault(at="1500000:{errno.EIO}")
        try:
            read()
        except XdsError as error:
            assert type(error) is XdsError
            assert error.errno == errno.EIO and error.filename == path
            print(error)
        os.environ.pop("FAULTY_AT")
        read()  # the next read is not the worse for it
    """
    code, out, err = process(script, forbid=forbid)
    assert code == 0, err
    nbytes, offset = int(out.split(": ")[1].split()[0]), int(out.split("at offset ")[1].split(":")[0])
    assert str(process.path) in out
    assert "Input/output error" in out
    assert offset <= 1500000 < offset + nbytes


@pytest.mark.parametrize("forbid", [DIRECT, BUFFERED, PREAD])
def test_a_hanging_read_times_out_and_its_array_stays(process, tmp_path, forbid):
    script = """
        hang = os.path.join(sys.argv[2], "hang")
        open(hang, "w").close()
        fault(hang=hang)
        array = np.zeros(size, np.uint8)
        alive = weakref.ref(array)
        begun = time.monotonic()
        try:
            with begin(array, timeout_s=0.3) as transfer:
                transfer.wait()
        except ReadTimeoutError as error:
            assert "no byte arrived for 0.3 s" in str(error) and path in str(error)
            assert "still hangs in the kernel" in str(error)
            assert error.errno == errno.ETIMEDOUT and isinstance(error, TimeoutError)
        else:
            raise AssertionError("no time-out")
        # Bounded: the time-out and one drain, however often the transfer is cancelled on the way out.
        assert time.monotonic() - begun < 20
        address = array.ctypes.data
        assert not transfer.done()
        del array, transfer
        gc.collect()
        assert alive() is not None
        os.unlink(hang)
        while mover._PROCESS.held:
            mover._PROCESS.sweep()
            time.sleep(0.01)
        read()
        gc.collect()
        assert alive() is None, gc.get_referrers(alive())
        print("freed")
    """
    code, out, err = process(script, forbid=forbid)
    assert (code, out) == (0, "freed\n"), err


@pytest.mark.parametrize("magic", [0x6969, 0xFF534D42, 0x65735546, 0x0BD00BD0, 0x00C36400])
def test_a_cold_file_of_a_network_file_system_is_read_buffered_and_wide(process, magic):
    script = f"""
        fault(magic={magic}, cold=1)
        report = read()
        assert report.resident == 0
        tell(report)
    """
    code, out, err = process(script, forbid="")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["method"] == {"buffered": NBYTES}
    assert "network file system: read through the page cache, wide" in report["notes"]


def test_a_file_system_that_does_not_answer_hangs_nobody_else(process, tmp_path):
    script = """
        hang = os.path.join(sys.argv[2], "hang")
        open(hang, "w").close()
        fault(statfs=hang)
        array = np.zeros(size, np.uint8)
        begun = time.monotonic()
        stuck = begin(array, timeout_s=0.3)
        # The mover's and the job's locks are free: other files are read, and every wait has its end.
        other = os.path.join(sys.argv[2], "other")
        np.arange(1 << 20, dtype=np.uint32).tofile(other)
        other_fd = os.open(other, os.O_RDONLY)
        target = np.zeros(1 << 20, np.uint32)
        batch = segments(1)
        batch[0] = (0, target.nbytes, target.ctypes.data, 0, 0)
        with MoverTransfer([other_fd], [other]) as transfer:
            transfer.add(batch, keepalive=target)
            transfer.wait()
        assert (target == np.arange(1 << 20)).all()
        assert not stuck.done()
        try:
            stuck.wait()
        except ReadTimeoutError:
            print("timed out")
        assert time.monotonic() - begun < 20
        os.unlink(hang)
        while mover._PROCESS.held:
            mover._PROCESS.sweep()
            time.sleep(0.01)
        assert not array.any()
        read()
    """
    code, out, err = process(script)
    assert (code, out, err) == (0, "timed out\n", "")


def test_a_file_whose_reads_hang_does_not_hold_all_threads(process, tmp_path):
    script = """
        hang = os.path.join(sys.argv[2], "hang")
        open(hang, "w").close()
        fault(hang=hang)
        array = np.zeros(size, np.uint8)
        stuck = begin(array, timeout_s=60.0)
        while stuck._counters().threads < 4:
            time.sleep(0.01)
        other = os.path.join(sys.argv[2], "other")
        np.arange(1 << 20, dtype=np.uint32).tofile(other)
        other_fd = os.open(other, os.O_RDONLY)
        for _ in range(3):  # the first waits for a thread of its own, the others find it
            target = np.zeros(1 << 20, np.uint32)
            batch = segments(1)
            batch[0] = (0, target.nbytes, target.ctypes.data, 0, 0)
            with MoverTransfer([other_fd], [other], timeout_s=30.0) as transfer:
                transfer.add(batch, keepalive=target)
                transfer.wait()
            assert (target == np.arange(1 << 20)).all()
        assert not stuck.done()
        os.unlink(hang)
        stuck.wait()
        assert array.tobytes() == expected
    """
    code, out, err = process(script)
    assert (code, out, err) == (0, "", "")


def test_the_interpreter_ends_while_a_read_hangs(process, tmp_path):
    script = """
        hang = os.path.join(sys.argv[2], "hang")
        open(hang, "w").close()
        fault(hang=hang)
        array = np.zeros(size, np.uint8)
        transfer = begin(array, timeout_s=0.2)
        try:
            transfer.wait()
        except ReadTimeoutError:
            print("timed out", flush=True)
    """
    code, out, err = process(script)
    assert (code, out, err) == (0, "timed out\n", "")


def test_close_while_a_read_hangs(process, tmp_path):
    script = """
        hang = os.path.join(sys.argv[2], "hang")
        open(hang, "w").close()
        fault(hang=hang)
        array = np.zeros(size, np.uint8)
        transfer = begin(array)
        while not transfer._counters().threads:
            time.sleep(0.001)
        mover.close()
        mover.close()
        assert not transfer.done()
        os.environ.pop("FAULTY_HANG")
        read()  # by new threads, while the old ones still hang
        os.unlink(hang)
        while not transfer.done():
            time.sleep(0.01)
        try:
            transfer.wait()
        except CancelledError:
            print("cancelled")
        read()
    """
    code, out, err = process(script)
    assert (code, out, err) == (0, "cancelled\n", "")


@pytest.mark.parametrize("last", ["", "sys.exit(0)", "transfer = None", "raise SystemExit", "signal.raise_signal(15)"])
def test_the_interpreter_ends_while_a_transfer_runs(process, last):
    script = f"""
        fault(slow_us=3000)
        array = np.zeros(size, np.uint8)
        transfer = begin(array)
        while not transfer.landed_nbytes:
            time.sleep(0.001)
        print("running", flush=True)
        {last}
    """
    code, out, err = process(script, chunk_nbytes=4096, threads=2)
    assert (code, out, err) == (-signal.SIGTERM if "15" in last else 0, "running\n", "")


def test_a_daemon_thread_waits_while_the_interpreter_ends(process):
    script = """
        fault(slow_us=3000)
        array = np.zeros(size, np.uint8)
        transfer = begin(array)
        threading.Thread(target=transfer.wait, daemon=True).start()
        threading.excepthook = lambda args: None
        while not transfer.landed_nbytes:
            time.sleep(0.001)
        print("running", flush=True)
    """
    code, out, _ = process(script, chunk_nbytes=4096, threads=2)
    assert (code, out) == (0, "running\n")


CTRL_C = """
fault(slow_us=10000)
array = np.zeros(size, np.uint8)
try:
    with begin(array) as transfer:
        while not transfer.landed_nbytes:
            time.sleep(0.001)
        print("reading", flush=True)
        while True:
            transfer.wait()
            raise SystemExit("it ended before the signal came")
except KeyboardInterrupt:
    before = array.copy()
    partly = np.count_nonzero(before) < 0.98 * size
    time.sleep(0.2)
    assert (array == before).all(), "written after the interrupt"
    print("interrupted", partly, flush=True)
os.environ.pop("FAULTY_SLOW_US")
read()
print("read again", flush=True)
"""


@pytest.mark.parametrize("forbid", [DIRECT, BUFFERED, PREAD])
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_in_the_middle_of_a_read(process, forbid, presses):
    child = process.start(CTRL_C, forbid=forbid, chunk_nbytes=4096, threads=1, slots=1)
    assert child.stdout.readline() == "reading\n"
    for _ in range(presses):
        child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    if presses == 1:
        assert (child.returncode, out) == (0, "interrupted True\nread again\n"), err
    else:
        # The second one may come anywhere; what matters is that it ends, and not by a crash.
        assert child.returncode in (0, 1, -signal.SIGINT), (child.returncode, err)
        assert "AssertionError" not in err


def test_a_fork_in_the_middle_of_slow_reads(process):
    script = """
        fault(slow_us=2000)
        array = np.zeros(size, np.uint8)
        transfer = begin(array)
        while not transfer.landed_nbytes:
            time.sleep(0.001)
        for _ in range(3):
            child = os.fork()
            if child == 0:
                os.environ.pop("FAULTY_SLOW_US")
                read()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        transfer.wait()
        assert array.tobytes() == expected
        print("both")
    """
    code, out, err = process("import warnings; warnings.simplefilter('ignore')\n" + textwrap.dedent(script))
    assert (code, out) == (0, "both\n"), err
