"""Which whole parameters ZeRO-3 holds: freed after their module unless read again within the reuse distance."""

from lumina_ft.parallel.gathering import Gathered, GatherPoint, Read, gathered_bytes

PARAMS = {"a": Gathered(10, 20), "b": Gathered(100, 200), "c": Gathered(5, 0)}
FORWARD_BACKWARD = [Read(("a",)), Read(("b",)), Read(("b",)), Read(("a",))]


def test_without_reuse_only_the_running_modules_weights_are_whole():
    points = gathered_bytes(FORWARD_BACKWARD, PARAMS, 0)
    assert points == [GatherPoint(20, 20), GatherPoint(200, 200), GatherPoint(200, 200), GatherPoint(20, 20)]


def test_a_weight_that_is_read_again_soon_stays():
    points = gathered_bytes(FORWARD_BACKWARD, PARAMS, 1)
    # b is the next module itself; a lies 200 elements further.
    assert points[1:] == [GatherPoint(200, 200), GatherPoint(200, 0), GatherPoint(20, 20)]
    assert gathered_bytes(FORWARD_BACKWARD, PARAMS, 201) == [
        GatherPoint(20, 20),
        GatherPoint(220, 200),
        GatherPoint(220, 0),
        GatherPoint(20, 0),
    ]


def test_the_distance_counts_the_modules_between():
    assert gathered_bytes(FORWARD_BACKWARD, PARAMS, 200)[1].live == 200


def test_weights_that_are_whole_anyway_cost_nothing_but_count_as_distance():
    reads = [Read(("a",)), Read(("c",)), Read(("a",))]
    assert gathered_bytes(reads, PARAMS, 5)[1] == GatherPoint(0, 0)
    assert gathered_bytes(reads, PARAMS, 6)[1] == GatherPoint(20, 0)


def test_a_copy_that_autograd_keeps_lies_beside_the_one_gathered_again():
    reads = [Read(("a",), keeps=("a",)), Read(("b",)), Read(("b",)), Read(("a",), drops=("a",)), Read(("c",))]
    lives = [point.live for point in gathered_bytes(reads, PARAMS, 0)]
    assert lives == [20, 220, 220, 40, 0]
    # Where DeepSpeed doesn't free it, there is one copy.
    assert [point.live for point in gathered_bytes(reads, PARAMS, 1000)] == [20, 220, 220, 20, 0]
