"""Sites that a guide integrates together, and values it averages over."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions.transforms import ReshapeTransform

from numpyro_gpx.beliefs import Belief, gaussian_base, kl_to_prior, not_gaussian

__all__ = ["Axis", "Group", "JointBelief"]


class JointBelief(Belief):
    r"""One of several sites that depend on each other: :math:`v = m + R_v e`.

    `e` is standard normal and the same for all sites of a `Group`.

    Attributes:
        mean: `(M,)` or `(P, M)`.
        rows: This site's rows of the group's root, `(M, R)` or `(P, M, R)`.
        group: Name of the group.
    """

    mean: Float[Array, "*P M"]
    rows: Float[Array, "*P M R"]
    group: str = eqx.field(static=True)

    def spread(self, A):
        return jnp.swapaxes(self.rows, -1, -2) @ A

    def push(self, w):
        return self.mean + self.rows @ w

    def pull(self, v):
        raise ValueError("A site that is held jointly with others has no vector alone.")

    def affine(self, shift, matrix):
        mean = shift + jnp.einsum("...ij,...j->...i", matrix, self.mean)
        return JointBelief(mean, matrix @ self.rows, self.group)

    def distribution(self):
        """Of this site alone; draws of the whole group are `Group.distribution`'s."""
        rows = self.rows.reshape(-1, self.rows.shape[-1])
        flat = _normal(self.mean.reshape(-1), rows)
        shape = self.mean.shape
        return dist.TransformedDistribution(
            flat, ReshapeTransform(shape, (rows.shape[0],))
        )

    def variances(self):
        return jnp.sum(self.rows**2, axis=-1)

    def log_determinant(self):
        raise ValueError("A site that is held jointly with others has no term alone.")


class Group(eqx.Module):
    """Sites integrated together: one divergence, one joint draw.

    Attributes:
        beliefs: What is believed of each site, by name. Several are `JointBelief`s.
    """

    beliefs: dict[str, Belief]

    @classmethod
    def alone(cls, name: str, belief: Belief) -> Group:
        """A site that depends on no other."""
        return cls({name: belief})

    @classmethod
    def joint(cls, means: dict[str, Array], root: Float[Array, "T R"]) -> Group:
        r"""Sites :math:`v = m + R e` with one root for all, of full row rank.

        Args:
            means: By site, `(M,)` or `(P, M)`.
            root: One row for each number, sites in the order of `means`.
        """
        total = sum(mean.size for mean in means.values())
        if root.shape[0] != total:
            raise ValueError(
                f"`root` must have a row for each of the {total} numbers of "
                f"{list(means)}; got shape {root.shape}."
            )
        name, start = "/".join(means), 0
        beliefs: dict[str, Belief] = {}
        for site, mean in means.items():
            rows = root[start : start + mean.size].reshape(*mean.shape, -1)
            beliefs[site] = JointBelief(mean, rows, name)
            start += mean.size
        return cls(beliefs)

    @property
    def is_joint(self) -> bool:
        """Whether its sites depend on each other."""
        return any(isinstance(b, JointBelief) for b in self.beliefs.values())

    def kl(self, priors: dict[str, dist.Distribution]) -> Array:
        """Divergence to the sites' independent priors, a scalar."""
        joint = {n: b for n, b in self.beliefs.items() if isinstance(b, JointBelief)}
        alone = {n: b for n, b in self.beliefs.items() if n not in joint}
        each = [kl_to_prior(b, priors[n]) for n, b in alone.items()]
        total = sum(each, start=jnp.zeros(()))
        if not joint:
            return total
        mean, root = _stacked(_whitened(b, priors[n]) for n, b in joint.items())
        log_det = jnp.linalg.slogdet(root @ root.T)[1]
        squares = jnp.sum(root**2) + jnp.sum(mean**2)
        return total + 0.5 * (squares - mean.size - log_det)

    def push(self, w: Float[Array, " T"]) -> tuple[dict[str, Array], Array]:
        """Values by site from one vector, and the log determinant of this map."""
        if self.is_joint:
            mean, root = _stacked(self.beliefs.values())
            return self.split(mean + root @ w), jnp.linalg.slogdet(root)[1]
        parts = self.split(w)
        values = {name: b.push(parts[name]) for name, b in self.beliefs.items()}
        log_dets = [jnp.sum(b.log_determinant()) for b in self.beliefs.values()]
        return values, 0.5 * sum(log_dets, start=jnp.zeros(()))

    def pull(self, values: dict[str, Array]) -> Float[Array, " T"]:
        """The vector whose `push` has these values."""
        if self.is_joint:
            mean, root = _stacked(self.beliefs.values())
            flat = jnp.concatenate([values[n].reshape(-1) for n in self.beliefs])
            return jnp.linalg.solve(root, flat - mean)
        each = [b.pull(values[name]).reshape(-1) for name, b in self.beliefs.items()]
        return jnp.concatenate(each)

    def distribution(self) -> dist.Distribution:
        """Of all sites as one vector, in their order; `split` takes it apart."""
        return _normal(*_stacked(self.beliefs.values()))

    def split(self, vector: Float[Array, " T"]) -> dict[str, Array]:
        """Values by site."""
        found, start = {}, 0
        for name, belief in self.beliefs.items():
            size = belief.mean.size
            found[name] = vector[start : start + size].reshape(belief.mean.shape)
            start += size
        return found


class Axis(eqx.Module):
    """Values that the model is averaged over, such as the nodes of latent inputs.

    Attributes:
        values: By site, with a leading axis of S.
        weights: `(S,)`; some may be negative.
    """

    values: dict[str, Array]
    weights: Float[Array, " S"]

    def average(self, terms) -> dict[str, Array]:
        """Averages of `terms(values)`, a dictionary of numbers."""
        every = jax.vmap(terms)(self.values)
        return {name: self.weights @ x for name, x in every.items()}

    def first(self) -> dict[str, Array]:
        """One set of values, for shapes."""
        return jax.tree.map(lambda x: x[0], self.values)


def _stacked(beliefs):
    """Mean `(T,)` and root `(T, R)` of sites, one after the other."""
    beliefs = list(beliefs)
    mean = jnp.concatenate([b.mean.reshape(-1) for b in beliefs])
    rows = [b.rows.reshape(-1, b.rows.shape[-1]) for b in beliefs]
    return mean, jnp.concatenate(rows)


def _normal(mean, root):
    return dist.MultivariateNormal(mean, root @ root.T, validate_args=False)


def _whitened(belief: JointBelief, prior: dist.Distribution) -> JointBelief:
    """The belief in units of a Gaussian prior of mean 0 and covariance I."""
    base = gaussian_base(prior)
    if isinstance(base, dist.Normal):
        scale = jnp.broadcast_to(base.scale, belief.mean.shape)
        mean = (belief.mean - base.loc) / scale
        return JointBelief(mean, belief.rows / scale[..., None], belief.group)
    if isinstance(base, dist.MultivariateNormal):
        eye = jnp.eye(belief.mean.shape[-1], dtype=belief.mean.dtype)
        L = jnp.broadcast_to(base.scale_tril, belief.mean.shape + eye.shape[-1:])
        solve = jax.scipy.linalg.solve_triangular
        W = solve(L, jnp.broadcast_to(eye, L.shape), lower=True)
        return belief.affine(-jnp.einsum("...ij,...j->...i", W, base.loc), W)
    raise not_gaussian(prior)
