"""Records that several rooms share: batches, schemas, model inputs."""
