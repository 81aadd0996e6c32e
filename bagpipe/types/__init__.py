"""Records that several rooms share: batch, schema, model_inputs."""
