"""Every name of `bagpipe.__all__` is typed, documented and on a page; the examples in docstrings run."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import warnings

import pytest

import bagpipe
from tests.docs.pages import ROOT, read

#: The page of the library.
PAGE = "docs/own-loop.md"


@pytest.mark.parametrize("name", bagpipe.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(bagpipe, name))
    assert f"bagpipe.{name}" in read(PAGE)


def test_the_types_are_those_of_the_public_names() -> None:
    stub = ast.parse((ROOT / "bagpipe" / "__init__.pyi").read_text(encoding="utf-8"))
    imported = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == set(bagpipe.__all__)
    assert sorted(bagpipe.__all__) == list(bagpipe.__all__)


def test_every_call_of_a_pipeline_is_typed_documented_and_on_its_page() -> None:
    page = read(PAGE)
    for name, member in vars(bagpipe.TrainPipeline).items():
        call = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isfunction(call):
            continue
        signature = inspect.signature(call)
        parameters = list(signature.parameters.values())[1:]
        assert inspect.getdoc(call), name
        assert all(item.annotation is not item.empty for item in parameters), name
        assert signature.return_annotation is not signature.empty, name
        assert re.search(rf"`{name}\b", page), f"{PAGE} does not mention {name}"


def test_every_argument_of_a_pipeline_is_documented() -> None:
    text = inspect.getdoc(bagpipe.TrainPipeline) or ""
    listed = text[text.index("Args:") : text.index("Attributes:")]
    for name in list(inspect.signature(bagpipe.TrainPipeline.__init__).parameters)[1:]:
        assert f"    {name}: " in listed, name


@pytest.mark.parametrize("name", bagpipe.optim.__all__)
def test_the_public_names_of_the_row_optimizers_are_documented(name: str) -> None:
    found = getattr(bagpipe.optim, name)
    assert not (inspect.isclass(found) or inspect.isfunction(found)) or inspect.getdoc(found)


@pytest.mark.multiproc
@pytest.mark.parametrize("module", ["bagpipe.optim", "bagpipe.train_pipeline"])
def test_the_examples_in_docstrings_run(module: str) -> None:
    found = __import__(module, fromlist=["_"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        results = doctest.testmod(found)
    assert results.attempted
    assert not results.failed
