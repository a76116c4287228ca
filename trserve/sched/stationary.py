"""Long-run averages of a finite chain: recurrent classes, their weights, their distributions.

Knows nothing of models, batches or requests.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import LinearOperator, bicgstab, gmres, splu

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Sparse = Any
"""A scipy CSR array; scipy ships no types."""

_DIRECT_BELOW: Final = 1500
"""States up to which a direct factorization is the faster way."""

_SWEEPS: Final = 10
"""Plain sweeps that give the iterative solution its start."""

# The first is cheap in memory traffic, the second never breaks down.
_SOLVERS: Final = ((bicgstab, {"maxiter": 400}), (gmres, {"restart": 80, "maxiter": 5}))

_RESIDUAL: Final = 1e-11
"""The iterative solution is taken when |pi P - pi|_1 is below it, else the direct one is."""


def long_run_distribution(matrix: Sparse, phase: Ints) -> Floats:
    """[S]: the share of steps that the chain which starts in state 0 spends in each state.

    ``matrix`` [S, S]: transition probabilities. ``phase`` [S]: an order in which most transitions
    go up (only the speed depends on it). Several recurrent classes are weighted by the probability
    of ending in each.
    """
    shares = np.zeros(matrix.shape[0])
    for states, chance in recurrent_classes(matrix):
        shares[states] = chance * stationary(matrix[states][:, states], phase[states])
    return shares


def recurrent_classes(matrix: Sparse) -> list[tuple[Ints, float]]:
    """The closed classes that state 0 can end in: their states, and the probability of each."""
    entries = matrix.tocoo()
    count, label = connected_components(matrix, directed=True, connection="strong")
    closed = np.ones(count, bool)
    leaving = label[entries.row] != label[entries.col]
    closed[label[entries.row[leaving]]] = False
    classes = [np.flatnonzero(label == which) for which in np.flatnonzero(closed)]
    if len(classes) == 1:
        return [(classes[0], 1.0)]
    if closed[label[0]]:
        return [(states, 1.0) for states in classes if label[states[0]] == label[0]]
    return _absorbed(matrix, np.flatnonzero(~closed[label]), classes)


def _absorbed(matrix: Sparse, transient: Ints, classes: list[Ints]) -> list[tuple[Ints, float]]:
    inner = matrix[transient][:, transient]
    # Row 0 of the inverse of I - inner: the expected visits of each transient state. State 0 is
    # the first of them.
    begin = np.zeros(len(transient))
    begin[0] = 1.0
    visits = splu((sparse.eye_array(len(transient)) - inner).T.tocsc()).solve(begin)
    chances = [float((visits @ matrix[transient][:, states]).sum()) for states in classes]
    total = sum(chances)
    return [(states, chance / total) for states, chance in zip(classes, chances, strict=True)]


def stationary(matrix: Sparse, phase: Ints) -> Floats:
    """[S]: the stationary distribution of an irreducible chain, to about 1e-12."""
    if matrix.shape[0] == 1:
        return np.ones(1)
    if matrix.shape[0] > _DIRECT_BELOW:
        distribution = _iterative(matrix, phase)
        if distribution is not None:
            return distribution
    return _direct(matrix)


def _direct(matrix: Sparse) -> Floats:
    """Fix the weight of state 0 and solve the balance of the others."""
    balance = (matrix.T - sparse.eye_array(matrix.shape[0])).tocsc()
    rest = splu(balance[1:, 1:].tocsc()).solve(-balance[1:, :1].toarray()[:, 0])
    distribution = np.concatenate([[1.0], rest])
    return np.asarray(distribution / distribution.sum())


def _iterative(matrix: Sparse, phase: Ints) -> Floats | None:
    """A Krylov method, preconditioned by one sweep in phase order; None if none converged.

    In a chain that goes through a cycle of phases almost every transition goes forward, so one
    triangular solve follows the probability round the whole cycle and little is left to iterate.
    """
    order = np.argsort(phase, kind="stable")
    size = len(order)
    balance = matrix[order][:, order].T.tocsr()
    forward = sparse.tril(balance, -1)
    back = sparse.csr_array(sparse.triu(balance, 0))
    sweep = splu(
        sparse.csc_array(sparse.eye_array(size) - forward),
        permc_spec="NATURAL",
        diag_pivot_thresh=0.0,
    )
    uniform = np.full(size, 1 / size)

    def apply(x: Floats) -> Floats:
        # The last term takes the singular direction out, and fixes the sum at 1.
        swept: Floats = x - sweep.solve(back @ x) + uniform * x.sum()
        return swept

    operator = LinearOperator((size, size), matvec=apply, dtype=np.float64)
    begin = uniform
    for _ in range(_SWEEPS):
        begin = sweep.solve(back @ begin)
        begin /= begin.sum()
    for solver, limits in _SOLVERS:
        solution, _ = solver(operator, uniform, x0=begin, rtol=1e-12, **limits)
        solution /= solution.sum()
        if np.abs(balance @ solution - solution).sum() < _RESIDUAL:
            break
    else:
        return None
    distribution = np.empty(size)
    distribution[order] = solution
    return distribution
