"""Scripts called in this process."""

import sys

import pytest

from train.command_line import exit_with


@pytest.fixture
def call(monkeypatch, capsys):
    """A script and words to (exit status, what was printed)."""
    def command(script, *words):
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, words)])
        with pytest.raises(SystemExit) as end:
            exit_with(script.main)
        told = capsys.readouterr()
        return end.value.code, told.out + told.err

    return command
