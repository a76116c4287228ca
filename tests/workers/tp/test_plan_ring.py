"""The ring of plans: what is written is what is read, in place, and every wait ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.procfs import cpu_seconds
from tests.serverproc import wait_until
from tests.workers.tp.groups import grouped, together
from trserve.workers.step import StepInputs
from trserve.workers.tp.memory import PLANS, GroupLostError, Trouble
from trserve.workers.tp.plan_ring import CHECK_EVERY, PlanReader

SIZES = {"max_tokens": 64, "max_rows": 8, "width": 16}
READER = """
import sys
from trserve.workers.tp.memory import GroupLayout, GroupMemory
from trserve.workers.tp.plan_ring import PlanReader
fd, bell = int(sys.argv[1]), int(sys.argv[2])
reader = PlanReader(GroupMemory(fd, GroupLayout(2, 64, 8, 16), 1), bell, 8, {}, spin=10)
print("here", flush=True)
while (plan := reader.next()) is not None:
    step, also = plan
    assert (step.token_ids[: step.num_tokens] == step.num_tokens).all()
    reader.done()
print("ended", reader.late_wakeups, flush=True)
"""


def inputs(**changes: int) -> StepInputs:
    sizes = {"max_tokens": 64, "max_rows": 8, "max_blocks_per_row": 16, "block_size": 8}
    return StepInputs(**{**sizes, **changes})


def fill(step: StepInputs, rows: list[tuple[int, int]], seed: int) -> None:
    """Rows of (tokens, start), with blocks and ids drawn from ``seed``."""
    rng = np.random.default_rng(seed)
    step.clear()
    for tokens, start in rows:
        table = rng.integers(1000, size=16).astype(np.int32)
        step.add_row(rng.integers(1000, size=tokens), start, table)


def seen(step: StepInputs) -> list[object]:
    """All of a step that means anything."""
    tokens, rows = step.num_tokens, step.num_rows
    tables = [
        step.block_tables[row, : -(-int(step.kv_len[row]) // step.block_size)].tolist()
        for row in range(rows)
    ]
    by_token = (step.token_ids, step.positions, step.slots)
    arrays = [array[:tokens].tolist() for array in by_token]
    return [*arrays, step.query_start[: rows + 1].tolist(), step.kv_len[:rows].tolist(), tables]


@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(1, 8), st.integers(0, 100)), min_size=1, max_size=8),
            st.one_of(st.none(), st.lists(st.integers(0, 7), max_size=8)),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_what_is_read_is_what_was_written(steps):
    with grouped(3, **SIZES) as group:
        step, writer = inputs(), group.writer()
        readers = [group.reader(rank) for rank in (1, 2)]
        for seed, (rows, also) in enumerate(steps):
            fill(step, rows, seed)
            wanted = None if also is None else np.array(also, np.int64)
            writer.adopt(step)
            writer.publish(step, wanted)
            for reader in readers:
                found, further = reader.next()
                assert seen(found) == seen(step)
                assert found.decode_only == step.decode_only
                assert (further is None) == (also is None)
                assert further is None or further.tolist() == also
                reader.done()
        writer.end()
        assert [reader.next() for reader in readers] == [None, None]


def test_tables_are_read_where_rank_0_writes_them():
    """No copy: what a step changes in a row's blocks is seen without being sent."""
    with grouped(2, **SIZES) as group:
        step, writer, reader = inputs(), group.writer(), group.reader()
        fill(step, [(1, 20), (1, 40)], 0)
        writer.adopt(step)
        writer.publish(step, None)
        found, _ = reader.next()
        reader.done()
        step.advance_decode_rows(np.array([5, 6]))
        step.start_block(1, 5, 777)
        writer.publish(step, None)
        found, _ = reader.next()
        assert found.block_tables[1, 5] == 777
        assert np.shares_memory(step.block_tables, group.memories[0].tables)


def test_bytes_of_a_plan_do_not_grow_with_the_context():
    """The same arrays are written at position 5 and at position 120."""
    with grouped(2, **SIZES) as group:
        step, writer, reader = inputs(), group.writer(), group.reader()
        written = []
        for start in (5, 120, 5):
            for plan in group.memories[0].plans:
                for array in (plan.token_ids, plan.positions, plan.slots):
                    array[:] = -7
                plan.kv_len[:] = plan.query_start[:] = -7
            fill(step, [(1, start)] * 4, 1)
            writer.adopt(step)
            writer.publish(step, None)
            plan = group.memories[0].plans[len(written) % PLANS]
            arrays = (plan.token_ids, plan.positions, plan.slots, plan.kv_len, plan.query_start)
            written.append([int((array != -7).sum()) for array in arrays])
            reader.next()
            reader.done()
    assert written == [[4, 4, 4, 4, 5]] * 3


def test_the_writer_waits_for_the_slowest_reader_and_no_longer_than_it_may():
    with grouped(3, **SIZES) as group:
        step, writer = inputs(), group.writer(timeout_s=0.3)
        fast, slow = group.reader(1), group.reader(2)
        fill(step, [(1, 3)], 0)
        writer.adopt(step)
        for _ in range(PLANS):
            writer.publish(step, None)
            fast.next()
            fast.done()
        with pytest.raises(GroupLostError, match=r"rank 0 waited 0.3 s .* to come to a step"):
            writer.publish(step, None)
        with pytest.raises(GroupLostError, match="rank 0 waited in vain"):
            for _ in range(PLANS + 1):  # what was published before is read yet
                slow.next()
                slow.done()


def test_tables_are_not_written_again_before_all_have_taken_the_plan():
    """The step's sums are not waited for where the device computes while the host goes on."""
    with grouped(2) as group:
        writer, reader, step = group.writer(), group.reader(), inputs()
        fill(step, [(3, 5)], 1)
        late = []

        def first():
            writer.tell(step, None)
            writer.await_taken()
            late.append("rank 0 goes on")
            step.block_tables[:] = -1
            writer.end()

        def second():
            taken, _ = reader.next()
            time.sleep(0.2)
            assert (taken.block_tables[0, :1] >= 0).all()
            late.append("rank 1 has read")
            reader.done()

        together([first, second])
        assert late == ["rank 1 has read", "rank 0 goes on"]


def test_a_rank_that_does_not_take_the_plan_is_waited_for_no_longer_than_it_may():
    with grouped(2) as group:
        writer, step = group.writer(timeout_s=0.2), inputs()
        fill(step, [(1, 0)], 1)
        writer.tell(step, None)
        with pytest.raises(GroupLostError):
            writer.await_taken()


@pytest.mark.parametrize("array", ["token_ids", "positions", "slots", "kv_len", "query_start"])
def test_a_plan_that_is_not_what_was_written_ends_the_group(array):
    with grouped(2, **SIZES) as group:
        step, writer, reader = inputs(), group.writer(), group.reader()
        fill(step, [(2, 3), (1, 9)], 0)
        writer.adopt(step)
        writer.publish(step, None)
        getattr(group.memories[0].plans[0], array)[1] += 1
        with pytest.raises(GroupLostError, match="rank 1 read another plan of a step than rank 0"):
            reader.next()
        with pytest.raises(GroupLostError, match="rank 1 read another plan"):
            group.memories[0].check()


def test_every_column_of_the_tables_is_checked_in_its_turn():
    with grouped(2, max_tokens=8, max_rows=2, width=80) as group:
        step, writer = inputs(max_tokens=8, max_rows=2, max_blocks_per_row=80), group.writer()
        found = []
        for column in (0, 31, 32, 79):
            reader = group.reader()
            fill(step, [(1, 3)], 0)
            writer.adopt(step)
            for number in range(writer._number, writer._number + 3 * CHECK_EVERY):
                writer.publish(step, None)
                step.block_tables[0, column] += number % CHECK_EVERY == 0
                group.memories[0].words[group.memories[0].done_at(1)] = number + 1
                reader._number = number
                try:
                    reader.next()
                except GroupLostError:
                    found.append(column)
                    group.memories[1].words[group.memories[1].trouble_at(1)] = Trouble.NONE
    assert found == [0, 31, 32, 79]


def test_a_second_set_of_inputs_is_refused():
    with grouped(2, **SIZES) as group:
        writer = group.writer()
        writer.adopt(inputs())
        with pytest.raises(GroupLostError, match="one set of step inputs"):
            writer.adopt(inputs())
        with pytest.raises(GroupLostError, match="one set of step inputs"):
            group.writer().adopt(inputs(max_blocks_per_row=4))


def test_a_reader_leaves_with_the_launcher_and_when_it_is_told_to():
    with grouped(2, **SIZES) as group:
        parent, child = os.pipe()
        os.close(child)  # the other end is gone: readable for ever, as a dead launcher's pidfd
        memory, bell = group.memories[1], group.bells[0]
        reader = PlanReader(memory, bell, 8, {parent: lambda: False}, spin=0)
        assert reader.next() is None
        os.close(parent)
        told = group.reader()
        told.leaving = True
        began = time.monotonic()
        assert told.next() is None
        assert 0.5 < time.monotonic() - began < 3.0
        assert told.late_wakeups == 0


def test_a_process_follows_without_spinning_and_no_bell_is_lost():
    with grouped(2, **SIZES) as group:
        reader = start_reader(group)
        try:
            assert reader.stdout.readline() == "here\n"
            step, writer = inputs(), group.writer()
            for number in range(3000):
                fill_plainly(step, 1 + number % 8)
                writer.adopt(step)
                writer.publish(step, None)
                if number % 500 == 0:
                    time.sleep(0.01)  # long enough for it to fall asleep
            before = cpu_seconds(reader.pid)
            time.sleep(0.5)
            assert cpu_seconds(reader.pid) - before <= 0.05
            writer.end()
            assert reader.stdout.readline() == "ended 0\n"
            assert reader.wait(10) == 0
        finally:
            reader.kill()
            reader.wait(10)


def test_a_reader_that_is_killed_is_missed_at_the_plan_after_the_next():
    with grouped(2, **SIZES) as group:
        reader = start_reader(group)
        try:
            assert reader.stdout.readline() == "here\n"
            step, writer = inputs(), group.writer(timeout_s=0.5)
            fill_plainly(step, 2)
            writer.adopt(step)
            for _ in range(20):
                writer.publish(step, None)
            done = group.memories[0].done_at(1)
            wait_until(lambda: group.memories[0].words[done], lambda count: count == 20, 5.0)
            reader.send_signal(signal.SIGKILL)
            reader.wait(10)
            for _ in range(PLANS):
                writer.publish(step, None)
            with pytest.raises(GroupLostError, match="to come to a step"):
                writer.publish(step, None)
        finally:
            reader.kill()
            reader.wait(10)


def test_ranks_that_wait_for_each_other_at_the_start_give_up_together():
    from trserve.workers.tp.joining import join

    with grouped(3) as group:
        together([lambda rank=rank: join(group.memories[rank], 5.0) for rank in range(3)])
    with grouped(3) as group:
        with pytest.raises(GroupLostError, match="to load their shares"):
            join(group.memories[2], 0.1)
        with pytest.raises(GroupLostError, match="rank 2 waited in vain for the others to load"):
            join(group.memories[0], 5.0)


def start_reader(group) -> subprocess.Popen:
    fds = [group.fd, *group.bells]
    command = [sys.executable, "-c", READER, str(group.fd), str(group.bells[0])]
    return subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True)


def fill_plainly(step: StepInputs, tokens: int) -> None:
    step.clear()
    step.add_row(np.full(tokens, tokens), 0, np.arange(16, dtype=np.int32))
