"""Load the notebook plugin, for tests/ and notebooks/ alike, and share the work out evenly."""

from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["tools.nbval_strict"]

# Folders whose files run for minutes: their tests go to whichever worker is free.
SPREAD = ("tests/browser/", "tests/teaching/")


class ByFile(LoadScopeScheduling):
    """The cells of a notebook share a kernel, the tests of a file its fixtures: one worker each."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(SPREAD) else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
