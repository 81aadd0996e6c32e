"""The model zoo: models by name, and a plain-torch DLRM."""
