"""Hand-written JAX, tuned, that our speed is measured against. Nothing of the library.

Tuned means: one BLAS thread; `W = L^-1` formed once under a derivative rule of three
M x M products, so that everything of size M x B is a product; squared distances by a
product; steps in one compiled loop; minibatches by `randint`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import optax

__all__ = ["collapsed_bound", "initial_params", "make_block"]

JITTER = 1e-8


@jax.custom_jvp
def inverse_factor(K):
    L = jnp.linalg.cholesky(K)
    return jax.scipy.linalg.solve_triangular(L, jnp.eye(K.shape[0]), lower=True)


@inverse_factor.defjvp
def _(primals, tangents):
    (K,), (dK,) = primals, tangents
    W = inverse_factor(K)
    G = jnp.tril(W @ dK @ W.T)
    return W, -(G - 0.5 * jnp.diag(jnp.diag(G))) @ W


def rbf(A, B, variance, lengthscale):
    A, B = A / lengthscale, B / lengthscale
    squares = jnp.sum(A**2, 1)[:, None] + jnp.sum(B**2, 1) - 2.0 * A @ B.T
    return variance * jnp.exp(-0.5 * squares)


def initial_params(num_inducing, num_dims):
    return {
        "mean": jnp.zeros(num_inducing),
        "scale_tril": jnp.eye(num_inducing),
        "log_variance": jnp.zeros(()),
        "log_lengthscale": jnp.zeros(num_dims),
        "log_noise": jnp.zeros(()),
    }


def negative_elbo(params, Z, X, y, num_data):
    variance = jnp.exp(params["log_variance"])
    lengthscale = jnp.exp(params["log_lengthscale"])
    noise_var = jnp.exp(2.0 * params["log_noise"])
    S = jnp.tril(params["scale_tril"])
    Kuu = rbf(Z, Z, variance, lengthscale) + JITTER * variance * jnp.eye(Z.shape[0])
    A = inverse_factor(Kuu) @ rbf(Z, X, variance, lengthscale)
    f_mean = A.T @ params["mean"]
    f_var = variance - jnp.sum(A**2, 0) + jnp.sum((S.T @ A) ** 2, 0)
    squares = ((y - f_mean) ** 2 + f_var) / noise_var
    log_lik = -0.5 * jnp.mean(squares + jnp.log(2.0 * jnp.pi * noise_var))
    log_det = 2.0 * jnp.sum(jnp.log(jnp.abs(jnp.diag(S))))
    kl = 0.5 * (jnp.sum(S**2) + jnp.sum(params["mean"] ** 2) - Z.shape[0] - log_det)
    return kl - num_data * log_lik


def make_block(Z, batch_size, optimizer):
    """A compiled loop of `number` steps on minibatches."""

    @functools.partial(jax.jit, donate_argnums=0)
    def block(state, number, key, X, y):
        def step(i, state):
            params, opt_state, _ = state
            rows = jr.randint(jr.fold_in(key, i), (batch_size,), 0, X.shape[0])
            loss, grads = jax.value_and_grad(negative_elbo)(
                params, Z, X[rows], y[rows], X.shape[0]
            )
            updates, opt_state = optimizer.update(grads, opt_state)
            return optax.apply_updates(params, updates), opt_state, loss

        return jax.lax.fori_loop(0, number, step, state)

    return block


def collapsed_bound(params, Z, X, y):
    """Titsias' bound with `Kuf Kfu` as the only product of size M x M x N."""
    variance = jnp.exp(params["log_variance"])
    lengthscale = jnp.exp(params["log_lengthscale"])
    noise_var = jnp.exp(2.0 * params["log_noise"])
    Kuu = rbf(Z, Z, variance, lengthscale) + JITTER * variance * jnp.eye(Z.shape[0])
    W = inverse_factor(Kuu)
    Kuf = rbf(Z, X, variance, lengthscale)
    C = W @ (Kuf @ Kuf.T) @ W.T / noise_var
    LB = jnp.linalg.cholesky(jnp.eye(Z.shape[0]) + C)
    c = jax.scipy.linalg.solve_triangular(LB, W @ (Kuf @ y), lower=True) / noise_var
    num_data = X.shape[0]
    return (
        -0.5 * num_data * jnp.log(2.0 * jnp.pi * noise_var)
        - jnp.sum(jnp.log(jnp.diag(LB)))
        - 0.5 * jnp.sum(y**2) / noise_var
        + 0.5 * jnp.sum(c**2)
        - 0.5 * (num_data * variance / noise_var - jnp.trace(C))
    )
