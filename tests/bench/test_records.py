import json

import pytest

import toolkit
from toolkit.bench import records
from toolkit.bench.records import RECORD_KEYS, RecordError, command_line, make_record, read_record, write_record


def test_record_has_the_keys_every_record_has(tmp_path):
    """Reports and outside checks read all records alike; one key less breaks them."""
    record = make_record("acceptance", ["toolkit", "bench"], {"seed": 0}, [{"task": "all"}], target={"name": "tiny"})
    assert list(record)[: len(RECORD_KEYS)] == list(RECORD_KEYS)
    assert record["command"] == "toolkit bench" and record["target"] == {"name": "tiny"}
    assert record["hardware"]["cores"] >= 1 and record["hardware"]["memory_bytes"] > 0
    assert {"torch", "transformers", "accelerate", "deepspeed", "safetensors", "datasets"} <= record["versions"].keys()
    assert record["versions"]["torch"] and record["versions"]["toolkit"] == toolkit.__version__
    write_record(tmp_path / "r.json", record)
    assert read_record(tmp_path / "r.json", "acceptance") == json.loads(json.dumps(record))


def test_commit_is_null_outside_a_checkout(tmp_path, monkeypatch):
    """An installed copy must not report the commit of whatever repository surrounds it."""
    monkeypatch.setattr(records, "__file__", str(tmp_path / "site" / "toolkit" / "bench" / "records.py"))
    assert records.git_commit() is None


def test_incomplete_and_foreign_records_are_refused(tmp_path):
    with pytest.raises(RecordError, match="versions"):
        write_record(tmp_path / "r.json", {key: None for key in RECORD_KEYS if key != "versions"})
    write_record(tmp_path / "k.json", make_record("kernels", "c", {}, []))
    with pytest.raises(RecordError, match="'kernels'; expected a record of 'acceptance'"):
        read_record(tmp_path / "k.json", "acceptance")


def test_the_command_of_a_record_names_no_folder(monkeypatch):
    """Records are published: the path of somebody's environment has no place in them."""
    monkeypatch.setattr("sys.argv", ["/home/somebody/.venv/bin/toolkit", "run", "my recipe.yaml"])
    assert command_line() == "toolkit run 'my recipe.yaml'"
