"""Static rules: no wall clocks, expiry, pickles, evaluated text, plain prints or lasting temporary files."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.test_layout import ROOT, modules, name_of

#: Modules that write the time of an event into a log. (A followed folder compares it with the times of files.)
LOGS = ("cacher/logs.py", "trainer/observe/lines.py")
#: Reads the files of torch.distributed.checkpoint, by an unpickler that knows their records only, and weights_only.
FOREIGN_PICKLES = ("bagpipe/start_from/dcp_files.py",)
#: Call, as the last parts of its name -> modules where it is allowed.
WALL_CLOCKS = {"time.time": (*LOGS, "data/followed_folder.py"),
               "time.time_ns": (), "datetime.now": (), "datetime.utcnow": (), "datetime.today": (),
               "date.today": (), "time.localtime": (), "time.gmtime": LOGS,
               "clock_gettime": ()}  # fmt: skip
EXPIRY = {"expire": (), "pexpire": (), "expireat": (), "pexpireat": (), "setex": (), "psetex": ()}
CODE = {"eval": (), "exec": (), "torch.load": FOREIGN_PICKLES, "torch.save": (),
        "all_gather_object": (), "gather_object": (),
        "broadcast_object_list": (), "scatter_object_list": (), "send_object_list": (),
        "recv_object_list": (), "yaml.load": ()}  # fmt: skip
#: Text that is printed passes `bagpipe.util.printing`, which escapes control characters.
PRINTS = {"sys.stdout.write": ("bagpipe/util/printing.py", "bagpipe/cli/main.py"),
          "sys.stderr.write": ("bagpipe/util/printing.py",),
          "print": ("bagpipe/cli/progress.py",), "traceback.print_exc": (),
          "traceback.print_exception": ()}  # fmt: skip
#: JSON and TOML from outside pass `bagpipe.util.documents`, where too many brackets are an error of the text.
OWN_JSON = (
    "bagpipe/jobs/job_facts.py", "bagpipe/lookahead/ranked.py", "bagpipe/serving/delta.py",
    "bagpipe/distributed/failure.py", "bagpipe/distributed/control_channel.py", "bagpipe/distributed/error_line.py",
    "bagpipe/checkpoint/codec.py", "data/testing.py", "data/formats.py", "cacher/requests.py", "trainer/settings.py",
    "bagpipe/testing/local_peers.py",
    "trainer/scoring.py", "data/conversion.py", "data/conversion_manifest.py", "data/followed_folder.py",
)  # fmt: skip
DOCUMENTS = {"json.loads": (*OWN_JSON, "bagpipe/util/documents.py"), "json.load": (), "tomllib.load": (),
             "tomllib.loads": ("bagpipe/util/documents.py",)}  # fmt: skip
#: Files that a person writes pass `bagpipe.util.documents.file_text`, which knows byte order marks. These are our own,
#: the kernel's, or data.
TEXTS = {"read_text": (
    *(f"bagpipe/util/{name}.py" for name in ("documents", "host_memory", "machine", "processor_time",
                                             "temporary_folder")),
    "bagpipe/report/page.py", "bagpipe/store/server/embedded.py", "bagpipe/calibration/measured_job.py",
    "bagpipe/calibration/lanes.py", "trainer/process.py", "trainer/services.py", "cacher/process.py",
    "data/huggingface.py", "data/replay/report/page.py", "data/replay/trials.py", "data/avazu.py", "data/criteo.py",
    "data/csv.py", "data/movielens.py", "data/text_files.py",
)}  # fmt: skip
#: A named temporary file stays after a kill. Those of `temporary_folder` are removed by the next process, unnamed
#: ones by the kernel.
UNNAMED = ("bagpipe/util/temporary_folder.py", "data/spill_file.py")
TEMPORARY = {"tempfile.TemporaryDirectory": (), "tempfile.NamedTemporaryFile": (), "tempfile.mkstemp": (),
             "tempfile.SpooledTemporaryFile": (), "tempfile.mktemp": (), "tempfile.TemporaryFile": UNNAMED,
             "tempfile.mkdtemp": ("bagpipe/util/temporary_folder.py",)}  # fmt: skip
PICKLES = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")


#: The examined nodes; whole trees take too much memory.
Seen = ast.Call | ast.Import | ast.ImportFrom | ast.keyword


@cache
def nodes() -> tuple[tuple[str, Seen], ...]:
    return tuple(
        (name_of(path), node)
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, Seen)
    )


@cache
def calls() -> tuple[tuple[str, int, str], ...]:
    """Module, line and name of every call."""
    return tuple((name, node.lineno, ast.unparse(node.func)) for name, node in nodes() if isinstance(node, ast.Call))


@pytest.mark.parametrize(
    "rule",
    [WALL_CLOCKS, EXPIRY, CODE, PRINTS, TEMPORARY, DOCUMENTS, TEXTS],
    ids=["wall clocks", "expiry", "code", "prints", "temporary files", "documents", "texts"],
)
def test_forbidden_calls(rule: dict[str, tuple[str, ...]]) -> None:
    """Deadlines are monotonic, nothing in a store expires, no received data is executed, none is printed as it is,
    no temporary file stays, no JSON or TOML can end a program in a traceback, and no byte order mark is content.
    """
    wrong = []
    for name, line, called in calls():
        for call, allowed in rule.items():
            is_method = called.endswith(f".{call}") and call not in ("eval", "exec", "print")
            if (called == call or is_method) and name not in allowed:
                wrong.append(f"{name}:{line} {called}")
    assert not wrong


def test_no_module_unpickles() -> None:
    wrong = []
    for name, node in nodes():
        if name in FOREIGN_PICKLES:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            wrong += [f"{name}:{node.lineno} {module}" for module in found if module.partition(".")[0] in PICKLES]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            wrong.append(f"{name}:{node.value.lineno} allow_pickle")
    assert not wrong


def test_no_test_asserts_speed() -> None:
    """Timeouts bound hangs; a busy machine is as right as a quiet one."""
    compared = re.compile(r"assert .*(monotonic|perf_counter|process_time|\btime)\(\) - \w+ <")
    code = {name_of(path): path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    assert not [name for name, text in code.items() if compared.search(text)]
