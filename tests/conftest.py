"""Settings that every test shares."""

import torch

# One thread: two workers share two cores, and last digits repeat.
torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter):
    """Print the lines that tests leave by record_property("line", ...), as the kill matrix does."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "line":
                    terminalreporter.write_line(value)
