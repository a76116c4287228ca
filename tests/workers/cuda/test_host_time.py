"""The host's part of a step: what the check of a device will add its launches to."""

from tests.machine_speed import slowness
from trserve.workers.cuda.host_time import measure_host_time


def test_a_step_of_eight_rows_leaves_time_for_the_launches():
    """150 us, or as many times that as the machine is slower than it should be."""
    before = slowness()
    measured = measure_host_time(8, 300)
    assert measured.rows == 8 and measured.steps == 300
    assert measured.where == "empty graphs on the CPU"
    assert 1.0 < measured.p50_us <= measured.p99_us
    assert measured.p50_us < 150.0 * max(before, slowness())
