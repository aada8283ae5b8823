"""Stop requests: who hears them, and what the ranks agree on."""

import signal

import pytest

from lumina_ft.train.stop import StopRequest, agreed

SIGTERM, SIGINT = int(signal.SIGTERM), int(signal.SIGINT)


def test_only_a_loop_that_runs_hears_a_request_and_the_first_one_counts():
    stop = StopRequest()
    assert not stop.ask(SIGTERM), "nothing would be lost"
    assert stop.number == stop.vote == 0
    with stop.heeded():
        assert stop.ask(SIGINT) and stop.ask(SIGTERM)
    assert stop.number == SIGINT
    assert not stop.ask(SIGTERM), "the loop is over"
    assert stop.number == SIGINT


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([0, 0, 0], 0),
        ([0, SIGTERM, 0], SIGTERM),
        ([SIGINT, 0, 0], SIGINT),
        ([SIGINT] * 5000, SIGINT),
        ([SIGTERM] * 5000, SIGTERM),
        ([SIGINT, SIGTERM, 0], SIGTERM),
    ],
)
def test_a_sum_over_the_ranks_tells_every_rank_the_same_signal(asked: list[int], expected: int):
    votes = 0
    for number in asked:
        stop = StopRequest()
        with stop.heeded():
            assert not number or stop.ask(number)
        votes += stop.vote
    assert agreed(votes) == expected
