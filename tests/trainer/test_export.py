"""`python -m trainer export` on a trained job's checkpoints."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from bagpipe.checkpoint.best import Best, write_best
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.config.sections import ModelConfig
from bagpipe.errors import InputError
from bagpipe.models.torchrec_models import build_model
from bagpipe.serving import RowClient, load
from bagpipe.types.schema import DataSchema
from tests.system.clicks import write_clicks, write_schemas
from tests.system.programs import run_forked
from trainer.export import apply, export

pytestmark = pytest.mark.multiproc


def trained(folder: Path, schema: str, *arguments: str) -> dict[str, str]:
    """Result of a job with checkpoints in ``folder/checkpoints``."""
    data = ["--data.path", str(write_clicks(folder / "clicks.parquet")), "--data.format", "parquet"]
    sizes = ["--data.batch_size", "12", "--cache.rows", "200", "--model.embedding_dim", "4", "--data.workers", "0"]
    checkpoints = ["--checkpoint.dir", str(folder / "checkpoints"), "--checkpoint.every", "10"]
    schemas = ["--data.schema", str(write_schemas(folder)[schema]), "--store.url", "memory://"]
    result = folder / "result.json"
    done = run_forked([*data, *schemas, *sizes, *checkpoints, *arguments, "--result", str(result)], folder)
    assert done.code == 0, done.err
    return json.loads(result.read_text())


def exported(folder: Path, *arguments: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and optimizer states."""
    out = folder / "out"
    export(["--checkpoint.dir", str(folder / "checkpoints"), "--out", str(out), *arguments])
    return load_file(out / "model.safetensors"), load_file(out / "optimizer.safetensors")


def test_exported_rows_are_the_trained_rows(tmp_path, capsys):
    """Exported rows and optimizer states, combined again, have the job's embedding digest."""
    result = trained(tmp_path, "weighted", "--model.bottom_mlp", "6", "--model.top_mlp", "5")
    weights, states = exported(tmp_path)
    assert capsys.readouterr().out.startswith(f"step {result['steps']}: ")
    prefix = "sparse_arch.embedding_bag_collection.embedding_bags."
    tables = sorted(name.removeprefix(prefix).removesuffix(".ids") for name in weights if name.endswith(".ids"))
    assert tables == ["items", "topic", "user"]
    sha = hashlib.sha256()
    for table in tables:
        ids = weights[f"{prefix}{table}.ids"].tolist()
        rows = torch.cat([weights[f"{prefix}{table}.weight"], states[f"{prefix}{table}.weight.sum"]], dim=1).numpy()
        for row_id, row in zip(ids, rows, strict=True):
            sha.update(table.encode() + b"\0" + row_id.to_bytes(8, "little", signed=True) + row.tobytes())
    assert sha.hexdigest() == result["embedding_digest"]
    # Everything except rows is loaded into the model unchanged.
    settings = CheckpointFolder(tmp_path / "checkpoints").newest(pytest.fail).manifest.settings
    config = ModelConfig(embedding_dim=4, bottom_mlp=(6,), top_mlp=(5,))
    model = build_model(DataSchema.from_json(settings["data columns"]), config)
    dense = {name: value for name, value in weights.items() if not name.startswith(prefix)}
    missing, unexpected = model.load_state_dict(dense, strict=False)
    assert not unexpected
    assert missing == [f"{prefix}table_{number}.weight" for number in range(3)]


def test_weighted_and_mean_tables_load_into_the_collections_of_the_model(tmp_path):
    trained(tmp_path, "weighted and mean", "--model.bottom_mlp", "6", "--model.top_mlp", "5")
    weights, states = exported(tmp_path)
    settings = CheckpointFolder(tmp_path / "checkpoints").newest(pytest.fail).manifest.settings
    model = build_model(
        DataSchema.from_json(settings["data columns"]), ModelConfig(embedding_dim=4, bottom_mlp=(6,), top_mlp=(5,))
    )
    collections = {
        name: [config.name for config in module.embedding_bag_configs()]
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingBagCollection)
    }
    bags = "sparse_arch.embedding_bag_collection"
    assert collections == {f"{bags}.weighted": ["items", "user"], f"{bags}.unweighted": ["topic", "queried"]}
    tables = {f"{path}.embedding_bags.{table}.weight" for path, names in collections.items() for table in names}
    assert {name for name in weights if ".embedding_bags." in name and name.endswith(".weight")} == tables
    assert all(f"{table}.sum" in states for table in tables)
    dense = {name: value for name, value in weights.items() if ".embedding_bags." not in name}
    missing, unexpected = model.load_state_dict(dense, strict=False)
    assert not unexpected
    assert all(".embedding_bags." in name for name in missing)


def test_tables_of_a_users_model_keep_their_names(tmp_path):
    """Two bag collections and a sequence collection; `topic` has nine rows, trained or not."""
    trained(tmp_path, "everything", "--model.factory", "tests.system.factory:build", "--optim.rows", "adam")
    weights, states = exported(tmp_path, "--step", "20")
    folder = CheckpointFolder(tmp_path / "checkpoints")
    generation = folder.at(20, pytest.fail).manifest.generation
    write_best(folder.path, Best(generation=generation, step=20, metric="auc", value=0.5))
    export(["--checkpoint.dir", str(folder.path), "--out", str(tmp_path / "best"), "--step", "best"])
    best = load_file(tmp_path / "best" / "model.safetensors")
    assert all(torch.equal(best[name], weights[name]) for name in weights)
    weight = next(name for name in weights if name.endswith(".embedding_bags.topic.weight"))
    assert weights[weight].shape == states[f"{weight}.exp_avg"].shape == states[f"{weight}.exp_avg_sq"].shape == (9, 5)
    history = next(name for name in weights if name.endswith(".embeddings.history.ids"))
    assert (np.diff(weights[history].numpy()) > 0).all()
    assert len(weights[history]) == len(weights[history.replace(".ids", ".weight")])


def test_a_delta_of_checkpoints_leads_to_the_full_export(tmp_path, capsys):
    """Since an export and since a step, over a full row file; with the program."""
    kept = ["--checkpoint.keep", "9", "--checkpoint.full_every", "2"]
    trained(tmp_path, "sum", "--model.bottom_mlp", "6", "--model.top_mlp", "5", *kept)
    checkpoints = ["--checkpoint.dir", str(tmp_path / "checkpoints")]
    before, full = tmp_path / "A", tmp_path / "B"
    export([*checkpoints, "--out", str(before), "--step", "10"])
    export([*checkpoints, "--out", str(full)])
    export([*checkpoints, "--out", str(tmp_path / "since"), "--since", str(before)])
    export([*checkpoints, "--out", str(tmp_path / "since step"), "--since", "10"])
    apply([str(before), str(tmp_path / "since"), str(tmp_path / "applied")])
    assert re.search(r"step 23: \d+ rows changed since step 10, 0\.0 MB in ", capsys.readouterr().out)

    def content(folder):
        return {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}

    assert content("applied") == content("B")
    assert set(content("B")) == {"manifest.json", "dense.pt2", "model.safetensors", "optimizer.safetensors"}
    assert content("since step") == content("since")


def test_rows_in_the_store_and_averages(tmp_path, capsys):
    """Without rows, and without states; averages only where a job has them."""
    trained(tmp_path, "everything", "--model.factory", "tests.system.factory:build")
    checkpoints = ["--checkpoint.dir", str(tmp_path / "checkpoints")]
    export([*checkpoints, "--out", str(tmp_path / "out"), "--rows", "store", "--weights-only"])
    assert capsys.readouterr().err == (
        "note: no program is exported: it reads sequences (EmbeddingCollection), and a program has pooled vectors for "
        "inputs\n"
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"manifest.json", "model.safetensors"}
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if ".embedding" in name]
    with pytest.raises(InputError, match="its rows are in the job's store"):
        RowClient.open(tmp_path / "out")
    with pytest.raises(InputError, match=r"out has no program: it reads sequences"):
        load(tmp_path / "out")
    for flags, words in (
        (["--averages"], "--averages: the checkpoint of step 23 has none"),
        (["--rows", "store", "--precision", "int8"], "--precision is about rows in files, and --rows is store"),
        (["--since", str(tmp_path / "out")], "its rows are in a store: a delta needs an export with rows"),
        (["--format", "dcp", "--since", "10"], "--since needs --format safetensors, got dcp"),
        (["--since", "7"], "has no whole checkpoint of step 7"),
    ):
        with pytest.raises(InputError, match=words):
            export([*checkpoints, "--out", str(tmp_path / "other"), *flags])
    assert not list(tmp_path.glob("other*"))


def test_export_errors_are_one_line(tmp_path):
    checkpoints = ["--checkpoint.dir", str(tmp_path / "none")]
    with pytest.raises(InputError, match=r"checkpoint\.dir .*none has no checkpoint"):
        export([*checkpoints, "--out", str(tmp_path / "out")])
    with pytest.raises(InputError, match="required: --out"):
        export(checkpoints)
    with pytest.raises(InputError, match="--step: expected a step number or best, got 'last'"):
        export([*checkpoints, "--out", "x", "--step", "last"])
    with pytest.raises(InputError, match="invalid choice: 'pickle'"):
        export([*checkpoints, "--out", "x", "--format", "pickle"])
    assert not (tmp_path / "out").exists()
