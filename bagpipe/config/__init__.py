"""The configuration of a job.

sections: dataclasses, one field per key ──keys──> Key: type, range, default, help
TOML file, flags ──load──> Config ──rules──> checked Config, or one InputError

optim_section, optim_rules: the section of optimizers and learning rates, and its rules.
row_optimizers: the row optimizers that it asks for, by table.
pipeline_section, pipeline_rules: the section of stages, the schedule that it asks for, and its rules.
pipeline_plan: its values from a plan file.
dense_section, dense_rules: the section of the dense part's memory, chunks and shares, and its rules.
model_section, model_rules: the section of the model, and rules of the keys that only some models have.
cacher_section, eval_section: the sections of the cacher and of evaluation.
stream_rules: rules of data that grows.
admission_rules, expiry_rules: rules of data.min_uses and data.expire_after, and what depends on them; row_rules: what
both share.
ranges: allowed values, as part of a field's type; data_format: the format of data.path, if it is not given.
"""
