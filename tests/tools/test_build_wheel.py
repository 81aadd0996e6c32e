"""Imports of the programs are renamed for the wheel, and nothing else is."""

from __future__ import annotations

import pytest

from tools.build_wheel import rewritten, write_programs

SOURCE = '''"""Reads é: from data.x import y."""
import data
import data as d, os, trainer.cli as cli
from data import formats
from   data.formats import (  # from data.formats
    open_source,
)
from database import x
from .data import z
if "é": from cacher.cli import main
data.path = "from data.x import y"
'''

EXPECTED = '''"""Reads é: from data.x import y."""
import bagpipe.programs.data as data
import bagpipe.programs.data as d, os, bagpipe.programs.trainer.cli as cli
from bagpipe.programs.data import formats
from   bagpipe.programs.data.formats import (  # from data.formats
    open_source,
)
from database import x
from .data import z
if "é": from bagpipe.programs.cacher.cli import main
data.path = "from data.x import y"
'''


def test_imports_of_every_form():
    assert rewritten(SOURCE) == EXPECTED
    assert rewritten(EXPECTED) == EXPECTED


def test_two_imports_on_one_line():
    assert rewritten("import data, cacher\n") == (
        "import bagpipe.programs.data as data, bagpipe.programs.cacher as cacher\n"
    )


def test_an_import_that_binds_the_package_is_refused():
    with pytest.raises(ValueError, match=r"a.py:2: expected `from data.x import …`, got `import data.x`"):
        rewritten("\nimport data.x\n", "a.py")


def test_files_of_an_earlier_build_are_removed(tmp_path):
    for program in ("cacher", "data", "trainer"):
        (tmp_path / program / "configs").mkdir(parents=True)
        (tmp_path / program / "configs" / "a.toml").write_bytes(b"\xff")
    home = tmp_path / "lib" / "programs"
    (home / "data").mkdir(parents=True)
    (home / "data" / "gone.py").write_text("")
    write_programs(home, tmp_path)
    assert not (home / "data" / "gone.py").exists()
    assert (home / "trainer" / "configs" / "a.toml").read_bytes() == b"\xff"
