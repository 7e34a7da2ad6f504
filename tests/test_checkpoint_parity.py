"""Round trips through a tiny writer, and the same verdicts and bytes as the reference library."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import BITS, entry, nbytes_of, noise, raw, write
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from xds.checkpoint import load
from xds.checkpoint.safetensors import DTYPES, parse_header
from xds.errors import CheckpointError

reference = pytest.importorskip("safetensors", reason="the safetensors package is not installed")

NAMES = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name != "__metadata__")
quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
many = settings(quick, max_examples=500)


@st.composite
def tensors(draw):
    found = {}
    for seed, name in enumerate(draw(st.lists(NAMES, unique=True, max_size=8))):
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
        if int(np.prod(shape, dtype=int)) * BITS[dtype] % 8:
            shape = (*shape, 8)
        data = noise(nbytes_of(dtype, shape), seed)
        found[name] = (dtype, shape, bytes(byte & 1 for byte in data) if dtype == "BOOL" else data)
    return found


@quick
@given(tensors(), st.none() | st.dictionaries(NAMES, st.text(st.characters(codec="utf-8")), max_size=3))
def test_round_trip(content, metadata):
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "a.safetensors", content, metadata=metadata)
        loaded = load(path, device="cpu")
        stored = {name: bytes(tensor["data"]) for name, tensor in reference.deserialize(path.read_bytes())}
    assert loaded.metadata == (metadata or {})
    assert set(loaded) == set(content) == set(stored)
    for name, (dtype, shape, data) in content.items():
        assert loaded.dtypes[name] == dtype
        assert loaded[name].tobytes() == data == stored[name]
        assert name in loaded.raw or loaded[name].shape == shape


def ours(data: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    """The tensors as the header reader sees them, or ``None`` if it refuses."""
    if len(data) < 8:
        return None
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8 or length < 2:
        return None
    try:
        header = parse_header(np.frombuffer(data[8 : 8 + length], np.uint8), len(data) - 8 - length, "x")
    except CheckpointError:
        return None
    body = data[header.data_start :]
    return {
        name: (
            DTYPES[header.dtype[i]],
            header.shapes[int(header.shape_offset[i]) :][: header.ndim[i]].tolist(),
            body[int(header.begin[i]) : int(header.end[i])],
        )
        for i, name in enumerate(header.names)
    }


def theirs(data: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    try:
        found = reference.deserialize(data)
    except reference.SafetensorError:
        return None
    return {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in found}


NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, 2**64, -1, 1.0, 1e3, "1", None])
SHAPES = st.lists(NUMBERS, max_size=3)


@st.composite
def headers(draw):
    """Files of which most are wrong in some way, and some are right. No key stands twice: there the rules differ."""
    members: dict[str, object] = {}
    at = 0
    for name in draw(st.lists(st.sampled_from(["a", "b", "c", "é"]), unique=True, max_size=3)):
        if draw(st.integers(0, 3)):
            dtype = draw(st.sampled_from(sorted(BITS)))
            shape: object = draw(st.lists(st.integers(0, 4), max_size=2))
            size = int(np.prod(shape, dtype=int)) * BITS[dtype] // 8
        else:
            dtype = draw(st.sampled_from([*sorted(BITS), "f32", "", None, 1]))
            shape = draw(SHAPES | st.none())
            size = draw(st.sampled_from([0, 1, 4, 8]))
        begin = at + (0 if draw(st.integers(0, 5)) else draw(st.sampled_from([-1, 1, 4])))
        fields: dict[str, object] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, at + size]}
        if not draw(st.integers(0, 9)):
            del fields[draw(st.sampled_from(sorted(fields)))]
        if not draw(st.integers(0, 5)):
            fields["extra"] = draw(st.sampled_from([None, {"deep": [1, [2]]}, "x", 1.5]))
        members[name] = fields
        at += size
    if draw(st.booleans()):
        members["__metadata__"] = draw(st.sampled_from([None, {}, {"a": "b"}, {"a": 1}, [], "x"]))
    text = json.dumps(members, ensure_ascii=draw(st.booleans())).encode()
    text = (
        draw(st.sampled_from([b"", b" ", b"\n", b"\0"]))
        + text
        + draw(st.sampled_from([b"", b"  ", b"\0", b"{", b"\t"]))
    )
    extra = 0 if draw(st.integers(0, 4)) else draw(st.sampled_from([-1, 1]))
    return raw(text, noise(max(0, at + extra)))


def rules_differ(data: bytes) -> bool:
    """Where the reference accepts what no array can be: a zero beside a product that does not fit 64 bits."""
    accepted = theirs(data)
    return accepted is not None and any(0 in shape and max(shape) > 2**32 for _, shape, _ in accepted.values())


@many
@given(headers())
@example(raw("{}"))
@example(raw('{"__metadata__":null}'))
@example(raw(f'{{"a": {entry("F4", [2, 3], 0, 3)}}}', b"xyz"))
@example(raw(f'{{"a": {entry("F4", [3], 0, 2)}}}', b"xy"))
@example(raw(f'{{"a": {entry("F6_E2M3", [4], 0, 3)}}}', b"xyz"))
@example(
    raw(f'{{"a": {entry("F32", [0], 0, 0)}, "b": {entry("U8", [1], 0, 1)}, "c": {entry("F32", [0], 1, 1)}}}', b"x")
)
def test_the_same_verdict_as_the_reference(data):
    if not rules_differ(data):
        assert ours(data) == theirs(data)


@many
@given(tensors(), st.data())
def test_the_same_verdict_on_damaged_headers(content, data):
    members, at = {}, 0
    for name, (dtype, shape, stored) in content.items():
        members[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(stored)]}
        at += len(stored)
    text = bytearray(json.dumps(members).encode())
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place] = data.draw(st.sampled_from(b'{}[]",:\\ 0129-.eu\x00\x1f\x7f\x80\xff'))
    damaged = raw(bytes(text), b"".join(stored for _, _, stored in content.values()))
    mine, other = ours(damaged), theirs(damaged)
    # Ours is the stricter one where a damaged name is another's double, and where a tensor turned into a list.
    if mine is not None or not (_has_duplicates(bytes(text)) or rules_differ(damaged)):
        assert mine == other


def _has_duplicates(text: bytes) -> bool:
    twice = False

    def look(pairs):
        nonlocal twice
        twice = twice or len({name for name, _ in pairs}) != len(pairs)
        return dict(pairs)

    try:
        json.loads(text, object_pairs_hook=look)
    except ValueError:
        return False
    return twice
