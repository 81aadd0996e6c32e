"""`TrainPipeline`: training of a user's model on batches of the user's own loader.

user's iterator ──user_batches──> ids ──batch_ids, bagpipe.lookahead──> plans ──> lanes of `bagpipe.training`
progress ──> the compute lane, one batch, in the caller's thread: the user's model, loss and optimizer

pipeline        the public class        open_pipeline  everything it holds open
options         its settings            session        its runs, over iterators; failures
model_parts     the model, converted    optimizer      that of the dense part
user_batches    batches held            evaluation     a run beside the training, which rests
batch_ids       ids in a user's batch   rows           rows read in Python
transfer        batches to the device   saved_state    what a checkpoint keeps of it
export          weights for others      error_texts    errors in the words of its arguments
"""
