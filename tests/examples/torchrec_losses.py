"""A program: trains `examples/dlrm_swap/torchrec_train.py` from bagpipe's initial values; prints its losses as JSON.

A process of its own, because torchrec's pipeline needs a process group and warns about itself.

python -m tests.examples.torchrec_losses NUM_BATCHES BATCH_SIZE
"""

from __future__ import annotations

import contextlib
import json
import sys

from examples.dlrm_swap import torchrec_train
from tests.examples.plain import collections_of, initial_rows

__all__: list[str] = []


def main(num_batches: int, batch_size: int) -> None:
    model = torchrec_train.make_model()
    ((_, _, _, configs),) = collections_of(model)
    with contextlib.redirect_stdout(sys.stderr):
        pipeline = torchrec_train.make_pipeline(model)
        # Sharding draws rows of its own, whatever the model's were. The pipeline has no public name for its model.
        tables = pipeline._model.module.model.sparse_arch.embedding_bag_collection.embedding_bags
        for config in configs:
            tables[config.name].weight.data.copy_(initial_rows(config, 0, "float32"))
        losses = torchrec_train.train(pipeline, torchrec_train.make_batches(num_batches, batch_size, seed=0))
    sys.stdout.write(json.dumps(losses))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
