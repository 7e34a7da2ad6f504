"""DuckDB queries ``xds://`` through a registered file system."""

from __future__ import annotations

import pytest

duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed")


@pytest.fixture
def connection(fs):
    with duckdb.connect() as connection:
        connection.execute("SET threads = 2")
        connection.register_filesystem(fs)
        yield connection


@pytest.fixture
def folder(tmp_path):
    with duckdb.connect() as plain:
        for number in range(3):
            select = (
                f"SELECT range AS id, range * 0.5 AS value, {number} AS part FROM range({number}000, {number + 1}000)"
            )
            plain.execute(f"COPY ({select}) TO '{tmp_path}/part.{number}.parquet'")
            plain.execute(f"COPY ({select}) TO '{tmp_path}/part.{number}.csv'")
    return tmp_path


@pytest.mark.parametrize("name", ["part.0.parquet", "part.*.parquet", "part.1.csv", "part.*.csv"])
def test_queries(connection, folder, moves, name):
    query = "SELECT count(*), sum(id), sum(value), max(part) FROM '{}/" + name + "'"
    with moves():
        got = connection.execute(query.format(f"xds://{folder}")).fetchall()
    with duckdb.connect() as plain:
        assert got == plain.execute(query.format(folder)).fetchall()


def test_a_scan_with_filter_and_filename(connection, folder, moves):
    query = "SELECT filename, id FROM read_parquet('xds://{}/*.parquet', filename=true) WHERE id = 1500"
    with moves():
        rows = connection.execute(query.format(folder)).fetchall()
    assert [(name.endswith("part.1.parquet"), number) for name, number in rows] == [(True, 1500)]


def test_a_missing_file(connection, folder):
    with pytest.raises(duckdb.IOException):
        connection.execute(f"SELECT * FROM 'xds://{folder}/no.parquet'")


def test_writing(connection, folder, moves):
    with moves(1, "write"):
        connection.execute(f"COPY (SELECT range AS id FROM range(5000)) TO 'xds://{folder}/out.parquet'")
        connection.execute(f"COPY (SELECT range AS id FROM range(5000)) TO 'xds://{folder}/out.csv'")
    with duckdb.connect() as plain:
        for name in ("out.parquet", "out.csv"):
            assert plain.execute(f"SELECT count(*), sum(id) FROM '{folder}/{name}'").fetchall() == [(5000, 12497500)]
