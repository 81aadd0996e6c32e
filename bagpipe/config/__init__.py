"""The configuration of a job.

sections: dataclasses, one field per key ──keys──> Key: type, range, default, help
TOML file, flags ──load──> Config ──rules──> checked Config, or one InputError

ranges: allowed values, as part of a field's type; data_format: the format of data.path, if it is not given.
"""
