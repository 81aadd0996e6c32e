"""The configuration of a job: sections and keys, their rules, and loading from TOML and flags."""
