import json

import toolkit
from toolkit.bench.records import (
    RECORD_KEYS,
    machine_name,
    make_record,
    read_record,
    write_record,
)


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


def test_machines_are_told_apart_by_their_instructions():
    """Two machines called AMD EPYC, one without AVX-512, differ by half in speed: one record must not replace the
    other's."""
    known = {"gpus": [], "cpu": "AMD EPYC"}
    flags = {"avx2": ["avx2"], "avx512": ["avx2", "avx512f", "avx512_bf16"], "amx": ["avx2", "avx512f", "amx_tile"]}
    for name, present in flags.items():
        assert machine_name({**known, "cpu_flags": present}) == f"amd-epyc-{name}"
    assert machine_name(known) == machine_name({**known, "cpu_flags": []}) == "amd-epyc"
    xeon = {"gpus": [], "cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "cpu_flags": ["amx_tile"]}
    assert machine_name(xeon) == "intel-xeon-platinum-8481c-amx"
    assert machine_name({**xeon, "gpus": ["NVIDIA H100 80GB HBM3"]}) == "nvidia-h100-80gb-hbm3"
