"""The command line: file, then flags; every error is one line on stderr and exit code 2."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import bagpipe
from bagpipe.config.load import Option, parse_config
from bagpipe.config.sections import Config
from bagpipe.errors import InputError

CONFIGS = Path(__file__).parents[2] / "trainer" / "configs"
RESULT = Option(flag="--result", help="write the result JSON here")


def parse(*argv: str) -> Config:
    return parse_config(argv, "trainer", [RESULT]).config


def problem(*argv: str) -> str:
    with pytest.raises(InputError) as caught:
        parse(*argv)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_no_arguments_are_the_defaults():
    assert parse() == Config()


def test_flags_in_both_forms():
    config = parse("--data.path", "x.gz", "--data.format=criteo-tsv", "--model.top_mlp", "64,32", "--data.shuffle=true")
    assert (config.data.path, config.data.format, config.data.shuffle) == ("x.gz", "criteo-tsv", True)
    assert config.model.top_mlp == (64, 32)


def test_file_then_flags_then_the_last_flag_wins(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("[data]\nlimit = 5\nbatch_size = 8\n[model]\ntop_mlp = [4, 2]\n[optim]\neps = 1\n")
    config = parse("--config", str(file), "--data.batch_size", "16", "--data.batch_size", "32")
    assert (config.data.limit, config.data.batch_size, config.model.top_mlp) == (5, 32, (4, 2))
    assert config.optim.eps == 1.0
    assert isinstance(config.optim.eps, float)


def test_extra_options_come_beside_the_configuration():
    assert parse_config(["--result", "out.json"], "trainer", [RESULT]).options == {"result": "out.json"}
    assert parse_config([], "trainer", [RESULT]).options == {"result": ""}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--data.batchsize", "3"], "unknown option --data.batchsize; did you mean --data.batch_size?"),
        (["--lookahead", "3"], "unknown option --lookahead; did you mean --oracle.lookahead?"),
        (["--data.batch", "3"], "unknown option --data.batch; did you mean --data.batch_size?"),
        (["--optim.lr", "3"], "unknown option --optim.lr; did you mean --optim.rows_lr or --optim.dense_lr?"),
        (["--batch", "3"], "unknown option --batch; did you mean --data.batch_size or --model.batch_norm?"),
        (["--dir", "x"], "unknown option --dir; did you mean --checkpoint.dir or --run.dir?"),
        (["--reslt=x"], "unknown option --reslt; did you mean --result?"),
        (["--zzz"], "unknown option --zzz (--help lists them)"),
        (["train.tsv"], "expected flags such as --data.path FILE, got 'train.tsv'"),
        (["--data.path"], "argument --data.path: expected one argument (--help lists the options)"),
        (["--cache.rows", "1.5"], "--cache.rows must be an integer or auto, got '1.5'"),
        (["--data.shuffle", "yes"], "--data.shuffle must be true or false, got 'yes'"),
        (["--oracle.lookahead", "0"], "--oracle.lookahead must be at least 1, got 0"),
        (["--data.format", "parquet"], "--data.format parquet needs data.path, a file or folder, got none"),
    ],
)
def test_a_bad_flag_gets_one_line(argv, line):
    assert problem(*argv) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[data]\nbatch_size = "x"\n', ":2: data.batch_size must be an integer, got 'x'"),
        ("[data]\n\n# why\nbatch_size = 0\n", ":4: data.batch_size must be at least 1, got 0"),
        ("# hi\n[dta]\nx = 1\n", ":2: unknown section 'dta'; did you mean data?"),
        ("[data]\nlimit = 2\n\nlookahead = 3\n", ":4: unknown key data.lookahead; did you mean oracle.lookahead?"),
        ("data.limit = 2\ndata.limt = 3\n", ":2: unknown key data.limt; did you mean data.limit?"),
        ("[optim]\nlr = 1\n", ":2: unknown key optim.lr; did you mean optim.rows_lr or optim.dense_lr?"),
        ("batch_size = 3\n", ":1: unknown section 'batch_size'; did you mean data.batch_size?"),
        ("[run]\nseed = 1\n[data.limit]\nx = 1\n", ":3: data.limit must be an integer, got {'x': 1}"),
        ("\ndata = 3\n", ":2: data is a section, written [data], got 3"),
        ("[data]\nlimit = \n", ": not valid TOML: Invalid value (at line 2, column 9)"),
        ("[data]\nlimit = 1\nlimit = 2\n", ": not valid TOML: Cannot overwrite a value (at line 3, column 10)"),
    ],
)
def test_a_bad_file_gets_one_line_with_its_line_number(tmp_path, text, line):
    file = tmp_path / "job.toml"
    file.write_text(text)
    assert problem("--config", str(file)) == f"{file}{line}"


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    """Of the configuration, and of the schema by which the format is told."""
    schema, log, job = tmp_path / "schema.toml", tmp_path / "log.csv", tmp_path / "job.toml"
    schema.write_text("\ufefflabel = 'y'\nsparse = ['a']", encoding="utf-8")
    log.write_text("y,a\n1,2\n")
    job.write_text(f'\ufeff[run]\nseed = 7\n[data]\npath = "{log}"\nschema = "{schema}"\n', encoding="utf-8")
    config = parse("--config", str(job))
    assert (config.run.seed, config.data.format) == (7, "csv")
    job.write_text("\ufeff[run]\nsed = 1", encoding="utf-8")
    assert "job.toml:2: unknown key run.sed" in problem("--config", str(job))


def test_unreadable_files(tmp_path):
    assert problem("--config", str(tmp_path / "none.toml")).endswith("none.toml: No such file or directory")
    assert problem("--config", str(tmp_path)).endswith("Is a directory")
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    assert problem("--config", str(tmp_path / "latin.toml")).endswith("expected UTF-8 text, got byte 0xe9")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_shipped_configurations_are_valid(path):
    assert parse("--config", str(path), "--data.path", "somewhere") != Config()


def test_help_shows_every_section_with_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert "[data] Training data:" in text
    assert "--data.batch_size" in text
    assert "(widths of at least 1; default: 64,32)" in " ".join(text.split())
    assert "(one of stop, skip; default: stop)" in " ".join(text.split())
    assert "--result FILE" in text


def test_version(capsys):
    with pytest.raises(SystemExit):
        parse("--version")
    assert capsys.readouterr().out.strip() == f"trainer {bagpipe.__version__}"


def test_a_mistake_is_found_without_importing_numpy_or_torch():
    code = (
        "import sys; from bagpipe.config.load import parse_config; from bagpipe.util.program import run_program; "
        "code = run_program(lambda argv: parse_config(argv, 'trainer') and 0, ['--data.limit', 'x']); "
        "print(code, sorted({'torch', 'numpy', 'redis'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.strip() == "2 []"
    assert done.stderr == "error: --data.limit must be an integer, got 'x'\n"


def protected_file(folder: Path, text: str, mode: int) -> str:
    file = folder / "job.toml"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


PASSWORD_IN_FILE = '[store]\nnamespace = "n"\nurl = "redis://trainer:sesame@host"\n'


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o666])
def test_a_file_with_a_password_that_others_can_read(
    tmp_path: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = protected_file(tmp_path, PASSWORD_IN_FILE, mode)
    said = (
        f"{path}:3: store.url holds a password, and the file is open to other users: mode {mode:04o}; "
        "chmod o-rwx it, or use store.password_file"
    )
    config = parse_config(["--config", path], "bagpipe").config
    assert config.store.url == "redis://trainer:sesame@host"
    assert capsys.readouterr().err == f"note: {said}\n"
    with pytest.raises(InputError, match=f"^{re.escape(said)} \\(run.strict\\)$"):
        parse_config(["--config", path, "--run.strict", "true"], "bagpipe")


@pytest.mark.parametrize(
    ("text", "mode"),
    [(PASSWORD_IN_FILE, 0o600), (PASSWORD_IN_FILE, 0o640), ('[store]\nurl = "redis://a:1,redis://user@b:2"\n', 0o644)],
)
def test_private_files_and_those_without_a_password_are_silent(
    tmp_path: Path, text: str, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_config(["--config", protected_file(tmp_path, text, mode), "--run.strict", "true"], "bagpipe")
    assert capsys.readouterr().err == ""
