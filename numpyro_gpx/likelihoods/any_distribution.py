"""Any NumPyro distribution as a likelihood."""

__all__ = ["From"]

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import logsumexp

from numpyro_gpx.cubature import nodes, tensor_nodes
from numpyro_gpx.likelihoods.base import Likelihood, Moments
from numpyro_gpx.links import Identity, Link, PiecewiseConstant, get_link

# Nodes for each latent function, by their number: all combinations are visited.
_NODES = {1: 64, 2: 32, 3: 20}


class From(Likelihood):
    r"""A likelihood from a function that makes a NumPyro distribution.

    `From(lambda f: dist.Cauchy(f, 0.3))` for one latent function;
    `From(lambda f: dist.Gumbel(f[..., 0], jnp.exp(f[..., 1])), num_latent=2)` for two.

    Values that are sampled or learnt must not hide inside the function, since the
    likelihood outlives the call of the model; hand them over:
    `From(lambda f, scale: dist.Cauchy(f, scale), scale)`.

    Expectations use Gauss-Hermite nodes: 64 for one latent, all pairs of 32 for two,
    all triples of 20 for three. With piecewise-constant links they are exact instead,
    one term for each combination of pieces (Seitz, theorem 3).

    Args:
        fn: From latents, and `parameters`, to a distribution with scalar events and the
            latents' batch shape. For one latent it gets `f` of any shape, for several
            `f` of shape `(..., num_latent)`.
        parameters: Further arguments of `fn`.
        num_latent: Number of latent functions, 1 to 3.
        link: Applied to `f` before `fn`; for several latents a tuple with one for each,
            or one for all.
        num_nodes: Nodes for each latent function.
        log_concave: Whether the log density is concave in `f`, for one latent function:
            predictive densities then use nodes around the peak of their integrand, and
            are accurate also where the noise is narrow.
    """

    fn: Callable
    parameters: tuple
    latents: int = eqx.field(static=True)
    links: tuple[Link, ...]
    num_nodes: int = eqx.field(static=True)
    concave: bool = eqx.field(static=True)

    def __init__(
        self, fn: Callable, *parameters, num_latent: int = 1,
        link: Link | str | Sequence[Link | str] | None = None,
        num_nodes: int | None = None, log_concave: bool = False,
    ):  # fmt: skip
        if num_latent not in _NODES:
            raise ValueError(
                f"`num_latent` must be 1, 2 or 3; got {num_latent}. For more, write a "
                "likelihood with a rule of its own."
            )
        _refuse_hidden_values(fn)
        self.fn = jax.tree_util.Partial(fn)
        self.parameters = jax.tree.map(jnp.asarray, parameters)
        self.latents = num_latent
        links = (
            link
            if isinstance(link, Sequence) and not isinstance(link, str)
            else ((Identity() if link is None else link,) * num_latent)
        )
        if len(links) != num_latent:
            raise ValueError(
                f"`link` must be one link or {num_latent}; got {len(links)}."
            )
        self.links = tuple(get_link(one) for one in links)
        self.num_nodes = _NODES[num_latent] if num_nodes is None else num_nodes
        self.concave = log_concave

    @property
    def latent_ndim(self):  # type: ignore[override]
        return 0 if self.latents == 1 else 1

    @property
    def link(self):  # type: ignore[override]
        return self.links[0]

    @property
    def log_concave(self):  # type: ignore[override]
        return self.concave

    @property
    def num_latent(self):
        return self.latents

    @property
    def discontinuous(self):
        return any(link.discontinuous for link in self.links)

    @property
    def support(self):
        return self.distribution(jnp.zeros((self.latents,) * self.latent_ndim)).support

    def distribution(self, f):
        if self.latents == 1:
            made = self.fn(self.links[0](f), *self.parameters)
        else:
            columns = [link(f[..., i]) for i, link in enumerate(self.links)]
            made = self.fn(jnp.stack(columns, axis=-1), *self.parameters)
        if not isinstance(made, dist.Distribution) or made.event_shape != ():
            came = (
                f"events of shape {made.event_shape}"
                if isinstance(made, dist.Distribution)
                else type(made).__name__
            )
            raise ValueError(
                "`fn` must return a NumPyro distribution with scalar events; got "
                f"{came}."
            )
        return made

    def expected_log_prob(self, y, f_mean, f_var):
        if self.latents == 1:
            return super().expected_log_prob(y, f_mean, f_var)
        f, weights = self._tensor(f_mean, f_var)
        return jnp.sum(weights * self._log_probs(y, f), axis=0)

    def predictive_log_prob(self, y, f_mean, f_var):
        if self.latents == 1:
            return super().predictive_log_prob(y, f_mean, f_var)
        f, weights = self._tensor(f_mean, f_var)
        return logsumexp(self._log_probs(y, f), b=weights, axis=0)

    def predictive_cdf(self, y, f_mean, f_var):
        if self.latents == 1:
            return super().predictive_cdf(y, f_mean, f_var)
        f, weights = self._tensor(f_mean, f_var)
        return jnp.sum(weights * jax.vmap(lambda f: self.cdf(y, f))(f), axis=0)

    def predictive_moments(self, f_mean, f_var):
        if self.latents == 1:
            return super().predictive_moments(f_mean, f_var)
        f, weights = self._tensor(f_mean, f_var)
        means, variances = jax.vmap(
            lambda f: (self.distribution(f).mean, self.distribution(f).variance)
        )(f)
        mean = jnp.sum(weights * means, axis=0)
        spread = variances + (means - mean[None]) ** 2
        return Moments(mean, jnp.sum(weights * spread, axis=0))

    def _log_probs(self, y, f):
        return jax.vmap(lambda f: self.log_prob(y, f))(f)

    def _tensor(self, f_mean, f_var):
        """All combinations of the nodes of each latent, `(S, ..., L)`, and weights."""
        rules: list[tuple] = []
        for i, link in enumerate(self.links):
            marginal = f_mean[..., i], f_var[..., i]
            if isinstance(link, PiecewiseConstant):
                rules.append(link.pieces(*marginal))
            else:
                rules.append(nodes(*marginal, self.num_nodes))
        return tensor_nodes(*zip(*rules, strict=True))


def _refuse_hidden_values(fn):
    """Raise if `fn` closes over a value of the model that is being traced."""
    cells = getattr(fn, "__closure__", None) or ()
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, cells, strict=False):
        leaves = jax.tree.leaves(cell.cell_contents)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise ValueError(
                f"`fn` uses `{name}`, a value that the model samples or learns. Hand "
                f"it over: `From(lambda f, {name}: ..., {name})`."
            )
