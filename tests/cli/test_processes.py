"""SIGTERM and SIGHUP end a block like Ctrl-C does, even where Ctrl-C is ignored."""

import signal

import pytest

from kvtier.cli.processes import ENDING_SIGNALS, ended_like_interrupted


@pytest.mark.parametrize("number", ENDING_SIGNALS)
@pytest.mark.parametrize("interrupt_handler", [signal.default_int_handler, signal.SIG_IGN])
def test_an_ending_signal_raises_an_interrupt(
    number: signal.Signals, interrupt_handler: signal.Handlers
) -> None:
    previous = signal.signal(signal.SIGINT, interrupt_handler)
    try:
        with pytest.raises(KeyboardInterrupt), ended_like_interrupted():
            signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGINT, previous)


def test_an_ending_signal_waits_where_an_interrupt_does() -> None:
    noted = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: noted.append(number))
    try:
        with ended_like_interrupted():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, previous)

    assert noted == [signal.SIGINT]


def test_the_handlers_from_before_come_back() -> None:
    before = [signal.getsignal(number) for number in ENDING_SIGNALS]
    with ended_like_interrupted():
        pass

    assert [signal.getsignal(number) for number in ENDING_SIGNALS] == before
