"""Load the notebook plugin, for tests/ and notebooks/ alike."""

pytest_plugins = ["tools.nbval_strict"]
