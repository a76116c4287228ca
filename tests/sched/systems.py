"""Systems that several tests use, and a slow, plain solver that shares no code with the product."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np

from trserve.sched.algorithms import behaviour
from trserve.sched.system import System, make_system


def r2r(p, latency=(6.0, 27.9), **more) -> System:
    made = behaviour("r2r", [p])
    return make_system(made.routing.tolist(), made.tokens.tolist(), list(latency), **more)


def r_stitch(p, q, latency=(6.0, 27.9)) -> System:
    made = behaviour("r-stitch", [p, q])
    return make_system(made.routing.tolist(), made.tokens.tolist(), list(latency))


def mixture(weights=(0.5, 0.3, 0.2), latency=(6.0, 10.0, 28.0), **more) -> System:
    made = behaviour("me", list(weights))
    return make_system(made.routing.tolist(), made.tokens.tolist(), list(latency), **more)


def agrees(value: float, printed: str) -> bool:
    """Within half a unit of the last printed digit, plus 0.005."""
    digits = len(printed.partition(".")[2])
    return abs(value - float(printed)) <= 0.5 * 10**-digits + 0.005


def plain_throughput(p, c, quanta, delay, n, vector, delta_ms):
    """T(B) by dictionaries and a dense solve, one request outcome after the other.

    A state is (waiting, (running, left) per model, sorted (arrival, model, count) on the way).
    ``quanta[i][b]`` is the step time of model i.
    """
    models = len(p)

    def dispatch(waiting, running):
        waiting, running = list(waiting), list(running)
        for i in range(models):
            if running[i][0] == 0 and waiting[i] >= vector[i]:
                running[i] = (waiting[i], quanta[i][waiting[i]])
                waiting[i] = 0
        return tuple(waiting), tuple(running)

    def successors(state):
        waiting, running, way = state
        tau = min([left for b, left in running if b] + [left for left, _, _ in way])
        waiting, moved, reward = list(waiting), [], 0.0
        later = defaultdict(int)
        for left, j, count in way:
            if left == tau:
                waiting[j] += count
            else:
                later[left - tau, j] += count
        after = []
        for i, (b, left) in enumerate(running):
            if b and left == tau:
                moved += [i] * b
                reward += b * sum(p[i][j] * c[i][j] for j in range(models))
                after.append((0, 0))
            else:
                after.append((b, left - tau if b else 0))
        chances = defaultdict(float)
        for ends in itertools.product(range(models), repeat=len(moved)):
            chance = math.prod(p[i][j] for i, j in zip(moved, ends, strict=True))
            if chance == 0:
                continue
            now, on_way = list(waiting), dict(later)
            for i, j in zip(moved, ends, strict=True):
                if delay[i][j]:
                    on_way[delay[i][j], j] = on_way.get((delay[i][j], j), 0) + 1
                else:
                    now[j] += 1
            k, b = dispatch(now, after)
            chances[k, b, tuple(sorted((t, j, m) for (t, j), m in on_way.items()))] += chance
        return tau, reward, chances

    start = (*dispatch([n] + [0] * (models - 1), [(0, 0)] * models), ())
    index, todo, rows = {start: 0}, [start], []
    while todo:
        state = todo.pop()
        tau, reward, chances = successors(state)
        for following in chances:
            if following not in index:
                index[following] = len(index)
                todo.append(following)
        rows.append((index[state], tau, reward, {index[s]: x for s, x in chances.items()}))
    size = len(index)
    matrix, tau, reward = np.zeros((size, size)), np.zeros(size), np.zeros(size)
    for i, elapsed, earned, chances in rows:
        tau[i], reward[i] = elapsed, earned
        for j, chance in chances.items():
            matrix[i, j] = chance
    # The long-run average from the start, whatever the classes: a lazy chain, squared up.
    lazy = (matrix + np.eye(size)) / 2
    for _ in range(40):
        lazy = lazy @ lazy
        lazy /= lazy.sum(axis=1, keepdims=True)
    pi = lazy[0]
    return pi @ reward / (pi @ tau) * 1000 / delta_ms
