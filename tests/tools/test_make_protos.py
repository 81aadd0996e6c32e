"""The committed protobuf code equals the generated code."""

from __future__ import annotations

from pathlib import Path

from tools.make_protos import PROTO, ROOT, generate


def test_the_generated_files_are_up_to_date(tmp_path: Path) -> None:
    generate(tmp_path)
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    assert [path.name for path in generated] == ["cacher_pb2.py", "cacher_pb2.pyi", "cacher_pb2_grpc.py"]
    assert all(path.parent == PROTO.parent for path in generated)
    for path in generated:
        assert (tmp_path / path).read_bytes() == (ROOT / path).read_bytes(), f"run python -m tools.make_protos: {path}"
