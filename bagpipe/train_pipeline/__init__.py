"""`TrainPipeline`: training of a user's model on batches of the user's own loader.

user's iterator ──user_batches──> ids ──batch_ids, bagpipe.lookahead──> plans ──> lanes of `bagpipe.training`
progress ──> the compute lane, one batch, in the caller's thread: the user's model, loss and optimizer

    >>> import bagpipe
    >>> import torch
    >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    >>> class Sums(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         table = EmbeddingBagConfig(num_embeddings=100, embedding_dim=4, name="item", feature_names=["item"])
    ...         self.bags = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    ...         self.scale = torch.nn.Parameter(torch.ones(4))
    ...     def forward(self, ids):
    ...         sums = self.bags(ids).values() @ self.scale
    ...         return (sums - 1).square().mean(), sums.detach()
    >>> model, lengths = Sums(), torch.tensor([2, 1])
    >>> ids = KeyedJaggedTensor(keys=["item"], values=torch.tensor([7, 8, 9]), lengths=lengths)
    >>> dense, rows = torch.optim.SGD(model.parameters(), lr=0.1), bagpipe.optim.Adagrad(lr=0.1)
    >>> with bagpipe.TrainPipeline(model, dense, rows=rows, store="memory://", cache_rows=10) as pipeline:
    ...     losses = [pipeline.loss.item() for sums in pipeline.train([ids] * 20)]
    ...     weights = pipeline.rows("item")[[7, 8, 9]]
    >>> losses[-1] < 0.1 * losses[0], list(weights.shape)
    (True, [3, 4])

pipeline        the public class        open_pipeline  everything it holds open
options         its settings            session        its runs, over iterators; failures
model_parts     the model, converted    optimizer      that of the dense part
user_batches    batches held            evaluation     a run beside the training, which rests
batch_ids       ids in a user's batch   rows           rows read in Python
transfer        batches to the device   saved_state    what a checkpoint keeps of it
export          weights for others      error_texts    errors in the words of its arguments
grad_scaler     the user's loss scale   device         that of a rank
loading         rows to begin with      row_sources    where they are
initial_rows    their way to the store  fingerprint    notices batches that change
plain_state     states as bytes         optimizer_rest what its state_dict has besides
lifetime        a program's end         loader_state   that of a user's loader
outputs         loops over a loader     torchrec_calls names of torchrec's
model_checks    what is refused         model_snapshot puts a refused model back
batch_graph     what a batch has in it  private_batch  batches without shared memory
"""
