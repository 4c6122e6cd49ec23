"""Load the notebook plugin, for tests/ and notebooks/ alike, and share the work out evenly."""

from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["tools.nbval_strict"]

# What runs longest begins first, so that no worker waits for another at the end.
LONGEST = ("tests/browser/", "notebooks/", "tests/teaching/")
# Files whose tests run for a minute: each test goes to whichever worker is free.
SPREAD = ("tests/browser/test_course.py", "tests/teaching/test_explorables.py")


class ByFile(LoadScopeScheduling):
    """The cells of a notebook share a kernel, the tests of a file its fixtures: one worker each."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(SPREAD) else nodeid.split("::")[0]

    def _assign_work_unit(self, node):
        """Give out what begins with an earlier name of LONGEST, else what has most tests."""
        self.workqueue.move_to_end(min(self.workqueue, key=rank), last=False)
        super()._assign_work_unit(node)


def rank(scope: str) -> int:
    return next((i for i, name in enumerate(LONGEST) if scope.startswith(name)), len(LONGEST))


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
