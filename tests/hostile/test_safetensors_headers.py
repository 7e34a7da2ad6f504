"""Hand-made bad files: each is refused with the right words, before any byte of data moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoint_files import entry, one, raw

from xds.checkpoint import load, open_checkpoint
from xds.errors import CheckpointError, TruncatedError


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write the bytes, load them, return the message of the error."""

    def moved(*args: object, **kwargs: object) -> None:
        raise AssertionError("a transfer was begun for a file that is not valid")

    monkeypatch.setattr("xds.direct.backend.DirectBackend.transfer", moved)

    def check(data: bytes, *words: str, error: type[CheckpointError] = CheckpointError, **options: object) -> str:
        path = tmp_path / "bad.safetensors"
        path.write_bytes(data)
        with pytest.raises(CheckpointError) as caught:
            load(path, device="cpu", **options)
        assert type(caught.value) is error
        message = str(caught.value)
        assert str(path) in message
        for word in words:
            assert word in message
        # The same file gives the same words every time.
        with pytest.raises(CheckpointError) as again:
            load(path, device="cpu", **options)
        assert str(again.value) == message
        return message

    return check


# --- length of the header ---


def test_empty_file(refuse):
    refuse(b"", "at least 8 bytes", "has 0", error=TruncatedError)


def test_seven_bytes(refuse):
    refuse(b"\x02\0\0\0\0\0\0", "at least 8 bytes", "has 7", error=TruncatedError)


def test_header_length_of_zero(refuse):
    refuse(raw(b"") + b"xx", "at least 2 bytes", "announces 0")


def test_header_length_of_one(refuse):
    refuse(raw(b"{") + b"}", "at least 2 bytes", "announces 1")


def test_header_longer_than_the_file(refuse):
    refuse(
        raw("{}", length=3),
        "header of 3 bytes",
        "at least 11 bytes",
        "has 10",
        "download it again",
        error=TruncatedError,
    )


def test_header_length_of_2_to_the_63(refuse):
    refuse(raw("{}", length=2**63), "not a safetensors file", str(2**63), str(2**63 + 8), "has 10")


def test_header_length_of_2_to_the_64_less_one(refuse):
    refuse(raw("{}", length=2**64 - 1), "not a safetensors file", str(2**64 + 7), "has 10")


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"PK\x03\x04\0\0\x08\x08", "zip archive, as torch.save"),
        (b"PK\x03\x04\x14\0\0\0", "zip archive"),
        (b"\x80\x02\x8a\nl\xfc\x9cF", "pickle"),
        (b"\x80\x04\x95\x34\x12\0\0\0", "pickle"),
        (b"GGUF\x03\0\0\0", "GGUF"),
    ],
)
def test_files_of_other_formats_are_named(refuse, start, words):
    refuse(start + b"x" * 100, words, "safetensors only")


def test_a_real_file_of_torch(refuse, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for new in (True, False):
        torch.save({"a": torch.ones(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
        refuse((tmp_path / "a.pt").read_bytes(), "torch.save writes it")


def test_header_over_the_cap_says_how_to_raise_it(refuse):
    data = raw("{}" + " " * 98)
    refuse(data, "has 100 bytes", "at most 99", "max_header_nbytes=100", max_header_nbytes=99)


def test_header_of_just_the_cap(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(raw("{}" + " " * 98))
    assert load(tmp_path / "a.safetensors", device="cpu", max_header_nbytes=100) == {}


# --- JSON ---


def test_header_that_is_no_json(refuse):
    refuse(raw("nonsense"), "expected '{'", "found 'n'", "at byte 0")


def test_header_of_spaces(refuse):
    refuse(raw("    "), "the header is empty")


def test_header_that_is_an_array(refuse):
    refuse(raw("[]"), "expected '{'", "found '['")


def test_header_cut_inside_a_name(refuse):
    refuse(raw('{"weig'), "a string that does not end", "at byte 1")


def test_header_cut_inside_a_tensor(refuse):
    refuse(raw('{"t":{"dtype":"F32","shape":[1],'), "found the end of the header", "at byte 32")


def test_comma_before_the_closing_brace(refuse):
    refuse(raw("{" + f'"t": {entry("U8", [1], 0, 1)},' + "}", b"x"), "expected a string", "found '}'")


def test_no_comma_between_tensors(refuse):
    refuse(raw(f'{{"a": {entry("U8", [1], 0, 1)} "b": {entry("U8", [1], 1, 2)}}}', b"xy"), "expected ','")


def test_no_colon_after_a_name(refuse):
    refuse(raw('{"t" {}}'), "expected ':'", "at byte 5")


def test_text_after_the_object(refuse):
    refuse(raw("{}{}"), "text after the end", "at byte 2")


def test_nul_padding(refuse):
    refuse(raw(b"{}\0\0\0\0"), "padded with NUL bytes", "at byte 2", "spaces")


def test_nul_padding_after_spaces(refuse):
    refuse(raw(b"{}  \0"), "padded with NUL bytes", "at byte 4")


def test_byte_order_mark(refuse):
    refuse(raw("\ufeff{}"), "expected '{'", "at byte 0")


def test_bytes_that_are_not_utf8(refuse):
    refuse(raw(b'{"a\xff": 1}'), "not UTF-8", "at byte 3")


def test_utf8_that_is_cut(refuse):
    refuse(raw(b'{"a\xe2\x82'), "not UTF-8", "at byte 3")


def test_utf8_that_is_too_long_for_its_character(refuse):
    refuse(raw(b'{"\xc0\x80": 1}'), "not UTF-8", "at byte 2")


def test_utf8_of_a_surrogate(refuse):
    refuse(raw(b'{"\xed\xa0\x80": 1}'), "not UTF-8", "at byte 2")


def test_utf8_beyond_unicode(refuse):
    refuse(raw(b'{"\xf4\x90\x80\x80": 1}'), "not UTF-8", "at byte 2")


def test_control_character_in_a_name(refuse):
    refuse(raw(b'{"a\nb": 1}'), "control character", "'\\x0a'", "at byte 3")


def test_escape_that_json_does_not_have(refuse):
    refuse(raw(r'{"a\x41": 1}'), "escape that JSON does not have", "at byte 3")


def test_unicode_escape_without_four_digits(refuse):
    refuse(raw(r'{"a\u00g0": 1}'), "four hexadecimal digits", "at byte 3")


def test_high_surrogate_alone(refuse):
    refuse(raw(r'{"a\ud83d": 1}'), "high surrogate without", "at byte 3")


def test_high_surrogate_before_no_low_one(refuse):
    refuse(raw(r'{"a\ud83dA": 1}'), "high surrogate without")


def test_low_surrogate_alone(refuse):
    refuse(raw(r'{"a\ude00": 1}'), "low surrogate without")


def test_leading_zero(refuse):
    refuse(raw('{"t":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}}', b"x"), "leading zero")


def test_nan(refuse):
    refuse(raw('{"t":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"x"), "whole number in shape", "found 'N'")


def test_single_quotes(refuse):
    refuse(raw("{'t': 1}"), "expected a string", "found '''")


def test_a_million_open_brackets(refuse):
    refuse(raw('{"t":{"extra":' + "[" * 1_000_000), "more than 128 levels of nesting")


def test_a_million_open_braces(refuse):
    refuse(raw('{"t":{"extra":' + '{"a":' * 1_000_000), "more than 128 levels of nesting")


# --- keys ---


def test_duplicate_tensor(refuse):
    both = f'{{"a": {entry("U8", [1], 0, 1)}, "a": {entry("U8", [1], 0, 1)}}}'
    refuse(raw(both, b"x"), "duplicate key 'a'")


def test_duplicate_tensor_that_tiles_the_file(refuse):
    both = f'{{"a": {entry("U8", [1], 0, 1)}, "b": {entry("U8", [1], 1, 2)}, "a": {entry("U8", [1], 0, 1)}}}'
    refuse(raw(both, b"xy"), "duplicate key 'a'")


def test_duplicate_tensor_spelled_with_an_escape(refuse):
    both = f'{{"a": {entry("U8", [1], 0, 1)}, "\\u0061": {entry("U8", [1], 1, 2)}}}'
    refuse(raw(both, b"xy"), "duplicate key 'a'")


def test_duplicate_key_in_a_tensor(refuse):
    text = '{"t":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    refuse(raw(text, b"x"), "duplicate key 'dtype'", "tensor 't'")


def test_duplicate_unknown_key_in_a_tensor(refuse):
    text = '{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1,"x":1}}'
    refuse(raw(text, b"x"), "duplicate key 'x'", "tensor 't'")


def test_duplicate_metadata(refuse):
    refuse(raw('{"__metadata__":{},"__metadata__":{}}'), "duplicate key '__metadata__'")


def test_duplicate_key_in_metadata(refuse):
    refuse(raw('{"__metadata__":{"k":"1","k":"1"}}'), "duplicate key 'k' in '__metadata__'")


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_missing_key(refuse, key):
    fields = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    del fields[key]
    refuse(raw(json.dumps({"t": fields}), b"x"), f"tensor 't' has no {key}")


# --- types of values ---


def test_tensor_that_is_no_object(refuse):
    refuse(raw('{"t":["U8",[1],[0,1]]}', b"x"), "tensor 't'", "expected an object", "found '['")


def test_metadata_that_is_no_object(refuse):
    refuse(raw('{"__metadata__":"x"}'), "expected an object of strings")


@pytest.mark.parametrize("value", ["1", "null", "true", "[]", "{}"])
def test_metadata_value_that_is_no_string(refuse, value):
    refuse(raw(f'{{"__metadata__":{{"epoch":{value}}}}}'), "'epoch'", "must be a string")


def test_dtype_that_is_no_string(refuse):
    refuse(raw('{"t":{"dtype":1,"shape":[1],"data_offsets":[0,1]}}', b"x"), "tensor 't'", "dtype must be a string")


@pytest.mark.parametrize("dtype", ["F16_X", "f32", "", "F128", "F8_E4M3FN"])
def test_unknown_dtype(refuse, dtype):
    refuse(one(dtype, [1], b"x"), "tensor 't'", f"unknown dtype '{dtype}'")


def test_shape_that_is_no_array(refuse):
    refuse(raw('{"t":{"dtype":"U8","shape":1,"data_offsets":[0,1]}}', b"x"), "tensor 't'", "whole numbers as shape")


@pytest.mark.parametrize("offsets", ["[0]", "[]", "[0,1,2]", "0"])
def test_data_offsets_that_are_not_two(refuse, offsets):
    refuse(raw(f'{{"t":{{"dtype":"U8","shape":[1],"data_offsets":{offsets}}}}}', b"x"), "tensor 't'", "data_offsets")


@pytest.mark.parametrize("dim", ["-1", "-0"])
def test_negative_dimension(refuse, dim):
    text = f'{{"t":{{"dtype":"U8","shape":[{dim}],"data_offsets":[0,1]}}}}'
    refuse(raw(text, b"x"), "tensor 't'", f"{dim} in shape is negative")


@pytest.mark.parametrize("dim", ["1.0", "1e0", "0.5", "1E+2"])
def test_dimension_that_is_no_whole_number(refuse, dim):
    text = f'{{"t":{{"dtype":"U8","shape":[{dim}],"data_offsets":[0,1]}}}}'
    refuse(raw(text, b"x"), "tensor 't'", f"{dim} in shape is not written as a whole number")


def test_dimension_of_2_to_the_64(refuse):
    text = f'{{"t":{{"dtype":"U8","shape":[{2**64}],"data_offsets":[0,1]}}}}'
    refuse(raw(text, b"x"), "tensor 't'", f"{2**64} in shape does not fit 64 bits", str(2**64 - 1))


def test_offset_of_a_thousand_digits(refuse):
    text = f'{{"t":{{"dtype":"U8","shape":[1],"data_offsets":[0,{"9" * 1000}]}}}}'
    refuse(raw(text, b"x"), "tensor 't'", "in data_offsets does not fit 64 bits")


def test_negative_offset(refuse):
    refuse(raw('{"t":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}}', b"x"), "-1 in data_offsets is negative")


def test_more_dimensions_than_arrays_have(refuse):
    refuse(one("U8", [1] * 65, b"x"), "tensor 't'", "more than 64 dimensions")


# --- sizes ---


def test_shape_that_needs_more_than_its_range(refuse):
    refuse(one("F32", [3], b"x" * 8), "tensor 't'", "[3] of F32", "needs 12 bytes", "[0, 8] hold 8")


def test_shape_that_needs_less_than_its_range(refuse):
    refuse(one("F32", [1], b"x" * 8), "tensor 't'", "needs 4 bytes", "hold 8")


def test_scalar_of_the_wrong_size(refuse):
    refuse(one("F64", [], b"x" * 4), "tensor 't'", "[] of F64", "needs 8 bytes", "hold 4")


def test_empty_tensor_with_bytes(refuse):
    refuse(one("F32", [0, 4], b"x" * 16), "tensor 't'", "needs 0 bytes", "hold 16")


def test_product_over_64_bits(refuse):
    refuse(one("U8", [2**32, 2**32], b""), "tensor 't'", f"[{2**32}, {2**32}] of U8", str(2**64 - 1), "hold 0 bytes")


def test_product_that_wraps_to_the_right_size(refuse):
    # 2^62 + 1 values of 4 bytes are 4 modulo 2^64.
    refuse(one("F32", [2**62 + 1], b"x" * 4), "tensor 't'", "is more than", "hold 4 bytes")


def test_count_of_bits_over_64_bits(refuse):
    refuse(one("F4", [2**62], b""), "tensor 't'", "F4 is more than", "bits")


def test_product_over_64_bits_beside_a_zero(refuse):
    refuse(one("U8", [2**40, 2**40, 0], b""), "tensor 't'", "is more than")


def test_fp4_with_an_odd_count(refuse):
    refuse(one("F4", [3], b"xx"), "tensor 't'", "3 values of F4 are 12 bits", "no whole number of bytes")


def test_fp4_scalar(refuse):
    refuse(one("F4", [], b"x"), "1 values of F4 are 4 bits")


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_fp6_that_ends_inside_a_byte(refuse, dtype):
    refuse(one(dtype, [5], b"xxxx"), f"5 values of {dtype} are 30 bits")


# --- layout ---


def test_range_that_runs_backwards(refuse):
    refuse(raw(f'{{"t": {entry("U8", [1], 1, 0)}}}', b"x"), "tensor 't'", "[1, 0] end before they begin")


def test_gap_at_the_start(refuse):
    refuse(raw(f'{{"t": {entry("U8", [1], 4, 5)}}}', b"xxxxx"), "gap of 4 bytes", "'t'", "begin at 0")


def test_gap_between_tensors(refuse):
    text = f'{{"a": {entry("U8", [1], 0, 1)}, "b": {entry("U8", [1], 3, 4)}}}'
    refuse(raw(text, b"xxxx"), "gap of 2 bytes", "'b'", "[3, 4]", "begin at 1")


def test_overlap(refuse):
    text = f'{{"a": {entry("U8", [4], 0, 4)}, "b": {entry("U8", [4], 2, 6)}}}'
    refuse(raw(text, b"x" * 6), "tensor 'b' overlaps", "[2, 6]", "'a' at 4")


def test_alias(refuse):
    text = f'{{"b": {entry("U8", [4], 0, 4)}, "a": {entry("U8", [4], 0, 4)}}}'
    refuse(raw(text, b"x" * 4), "tensor 'b' is an alias", "[0, 4]", "'a'")


def test_many_faults_blame_the_first_tensor_of_the_file(refuse):
    text = ",".join(
        f'"{name}": {entry("F32", [9], at, at + 4)}' for name, at in [("z", 8), ("y", 0), ("x", 4), ("w", 0)]
    )
    refuse(raw(f"{{{text}}}", b"x" * 12), "tensor 'w'", "needs 36 bytes")


def test_trailing_bytes(refuse):
    refuse(one("U8", [4], b"xxxxyyy", end=4), "3 trailing bytes", "expected a file of 72 bytes, it has 75")


def test_trailing_bytes_after_no_tensor(refuse):
    refuse(raw("{}", b"x"), "1 trailing bytes", "expected a file of 10 bytes, it has 11")


def test_truncated_data(refuse):
    data = one("U8", [4], b"xxxx")
    refuse(data[:-1], f"expected {len(data)} bytes, has {len(data) - 1}", "'t'", error=TruncatedError)


def test_truncated_data_blames_the_first_tensor_that_is_not_whole(refuse):
    names = {name: entry("U8", [4], at, at + 4) for name, at in [("c", 0), ("b", 4), ("a", 8)]}
    data = raw("{" + ",".join(f'"{name}": {text}' for name, text in names.items()) + "}", b"x" * 12)
    refuse(data[:-6], f"expected {len(data)} bytes, has {len(data) - 6}", "'b'", error=TruncatedError)


def test_range_near_2_to_the_64(refuse):
    text = f'{{"t": {entry("U8", [2**60], 0, 2**60)}}}'
    refuse(raw(text), f"expected {2**60 + 8 + len(text)} bytes", error=TruncatedError)


def test_name_with_control_characters_is_shown_escaped(refuse):
    message = refuse(one("U8", [2], b"x", name="a\n\x1b[31m"), "tensor 'a\\x0a\\x1b[31m'")
    assert "\x1b" not in message


def test_long_name_is_shown_short(refuse):
    assert len(refuse(one("U8", [2], b"x", name="é" * 100_000), "...'")) < 1500


# --- what is accepted all the same ---


@pytest.mark.parametrize(
    "text", ["{}", " {}", "\n\t\r {}", "{}        ", '{"__metadata__":null}', '{"__metadata__":{}}']
)
def test_headers_without_tensors(tmp_path, text):
    (tmp_path / "a.safetensors").write_bytes(raw(text))
    with open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
        assert checkpoint.names == ()
        assert checkpoint.metadata == {}
        assert checkpoint.load(device="cpu") == {}


def test_unknown_keys_of_a_tensor(tmp_path):
    other = '"x":[1,{"y":[null,true,-1.5e+3,"\\ud83d\\ude00"]}],"z":{}'
    text = f'{{"t":{{{other},"dtype":"U8","shape":[2],"data_offsets":[0,2]}}}}'
    (tmp_path / "a.safetensors").write_bytes(raw(text, b"\1\2"))
    assert load(tmp_path / "a.safetensors", device="cpu")["t"].tolist() == [1, 2]


def test_nesting_up_to_the_limit(tmp_path):
    text = '{"t":{"x":' + "[" * 128 + "]" * 128 + ',"dtype":"U8","shape":[],"data_offsets":[0,1]}}'
    (tmp_path / "a.safetensors").write_bytes(raw(text, b"\7"))
    assert load(tmp_path / "a.safetensors", device="cpu")["t"] == 7


def test_names_of_all_kinds(tmp_path):
    names = ["", " ", "a\nb", "é", "\U0001f600", 'quote"', "back\\slash", "nul\0", "dtype", "日本"]
    text = "{" + ",".join(f"{json.dumps(name)}: {entry('U8', [], i, i + 1)}" for i, name in enumerate(names)) + "}"
    (tmp_path / "a.safetensors").write_bytes(raw(text, bytes(range(len(names)))))
    loaded = load(tmp_path / "a.safetensors", device="cpu")
    assert list(loaded) == names
    assert [int(array) for array in loaded.values()] == list(range(len(names)))
