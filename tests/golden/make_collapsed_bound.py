"""Remake `collapsed_bound.json`: `python tests/golden/make_collapsed_bound.py`.

Computes log N(y; 0, Q + s I) - tr(Kff - Q) / 2s from its definition in decimal
arithmetic with 60 digits, so that no digit of the result is lost to the conditioning
of `Kuu` (RBF with a long lengthscale, 30 points). Inputs are the float64 numbers in
the file, taken exactly; the jitter is 1e-8 times the variance.
"""

import json
from decimal import Decimal, getcontext
from pathlib import Path

import numpy as np

getcontext().prec = 60
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def decimals(values):
    return [Decimal(float(v)) for v in values]


def cholesky(K):
    L = [[Decimal(0)] * len(K) for _ in K]
    for i in range(len(K)):
        for j in range(i + 1):
            rest = K[i][j] - sum(L[i][k] * L[j][k] for k in range(j))
            L[i][j] = rest.sqrt() if i == j else rest / L[j][j]
    return L


def solve(L, b):
    x = []
    for i in range(len(L)):
        x.append((b[i] - sum(L[i][k] * x[k] for k in range(i))) / L[i][i])
    return x


def bound(X, Z, y, variance, lengthscale, noise):
    X, Z, y = decimals(X), decimals(Z), decimals(y)
    variance, lengthscale, noise = decimals([variance, lengthscale, noise])

    def k(a, b):
        return variance * (-(((a - b) / lengthscale) ** 2) / 2).exp()

    Kuu = [[k(a, b) for b in Z] for a in Z]
    for i in range(len(Z)):
        Kuu[i][i] += Decimal(1e-8) * variance
    Luu = cholesky(Kuu)
    A = [solve(Luu, [k(z, x) for z in Z]) for x in X]  # rows of A^T
    Q = [[sum(p * q for p, q in zip(a, b, strict=True)) for b in A] for a in A]
    trace = sum(variance - Q[i][i] for i in range(len(X))) / (2 * noise)
    for i in range(len(X)):
        Q[i][i] += noise
    L = cholesky(Q)
    c = solve(L, y)
    log_det = sum(L[i][i].ln() for i in range(len(X)))
    constant = len(X) * (2 * PI).ln() / 2
    return float(-constant - log_det - sum(x * x for x in c) / 2 - trace)


def main():
    X, Z = np.linspace(0.0, 3.0, 60), np.linspace(0.0, 3.0, 30)
    y = np.sin(2.0 * X) + 0.1 * np.cos(17.0 * X)
    cases = []
    for lengthscale, noise_var in ((0.7, 0.05), (2.5, 0.05), (2.5, 1e-4)):
        case = {"variance": 1.3, "lengthscale": lengthscale, "noise_var": noise_var}
        value = bound(X, Z, y, 1.3, lengthscale, noise_var)
        cases.append({**case, "bound": value})
    content = {"X": X.tolist(), "Z": Z.tolist(), "y": y.tolist(), "cases": cases}
    path = Path(__file__).with_name("collapsed_bound.json")
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
