"""Generate the code of the cacher's wire protocol: ``python -m tools.make_protos``.

bagpipe/client/cacher.proto ──protoc──> cacher_pb2.py, cacher_pb2.pyi, cacher_pb2_grpc.py, committed beside it
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTO = Path("bagpipe/client/cacher.proto")


def generate(out: Path) -> None:
    """Write the generated files below a folder. RuntimeError: the proto file is not valid."""
    from grpc_tools import protoc

    arguments: Sequence[str] = (
        "protoc",
        f"-I{ROOT}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        str(ROOT / PROTO),
    )
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc refused {PROTO}")


def main() -> int:
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
