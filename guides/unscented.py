r"""Latent inputs: :math:`q(H) = \prod_n \mathcal N(m_n, S_n)` beside another guide."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_gpx import checks, cubature
from numpyro_gpx.guides.parts.encoders import Encoder
from numpyro_gpx.guides.parts.factors import dense_factor
from numpyro_gpx.guides.parts.gaussian import GaussianGuide
from numpyro_gpx.program.latent_inputs import LatentInput
from numpyro_gpx.program.structure import Plate, Structure, structure_of
from numpyro_gpx.sites.marks import as_infer
from numpyro_gpx.starting import pca
from numpyro_gpx.uncertain import InputBelief, join

__all__ = ["UnscentedLatent"]

# Standard deviation of q(h) before training (dissertation 3.4.1: variance 0.1).
_INITIAL_SCALE = 0.1**0.5


class UnscentedLatent(GaussianGuide):
    r"""Gaussian beliefs about the latent inputs of the rows, with any rule.

    .. math:: q(\theta, v, H) = q(\theta)\,q(v \mid \theta)
        \prod_n \mathcal N(h_n; m_n, S_n S_n^\top)

    The rule says how expectations over :math:`h_n` are taken: at its points, for any
    kernel and likelihood, or in closed form (`Analytic`). **With a rule of low order
    what is maximised is an objective and not a bound**; `Fit.elbo` draws instead, and
    is one.

    Args:
        inner: The guide of everything else, built on the model: `WhitenedGaussian`
            (minibatches, any likelihood), `OptimalGaussian` (collapsed, deterministic).
        rule: `gpx.cubature.Unscented()` (the default; `GaussHermite(5)` in one
            dimension), `GaussHermite`, `MonteCarlo`, `SphericalRadial`, or `Analytic`.
        encoder: Read the belief off the data by a network (`gpx.guides.Encoder()`)
            instead of giving each row its own parameters.
        covariance: `"diagonal"` or `"full"`, for each row.
        init: Where the means start: `"pca"`, `"targets"` (standardised), `"random"`, or
            an array `(N, Q)`. By default principal components if the targets have at
            least as many rows and columns as the latent input has columns, else the
            targets.

    References:
        Dissertation 3.2-3.4; Titsias & Lawrence (2010); tutorial 4.2.
    """

    # Latent inputs at 0.02 have long been trained well; 0.1 was not tried.
    learning_rate = 0.03
    # Latent inputs of rows have no place in the vector.
    can_transport = False

    def __init__(
        self, inner, *, rule=None, encoder=None, covariance="diagonal", init=None
    ):
        checks.instance(
            "inner", inner, GaussianGuide, "such as gpx.guides.WhitenedGaussian(model)"
        )
        if rule is not None:
            usual = "such as gpx.cubature.Unscented()"
            checks.instance("rule", rule, cubature.Rule, usual)
        if encoder is not None:
            checks.instance("encoder", encoder, Encoder, "gpx.guides.Encoder()")
        if covariance not in ("full", "diagonal"):
            raise ValueError(
                f"`covariance` must be 'full' or 'diagonal'; got {covariance!r}."
            )
        if covariance == "full" and isinstance(rule, cubature.Analytic):
            raise ValueError(
                "The analytic rule needs `covariance='diagonal'`; use another rule, "
                "such as `gpx.cubature.Unscented()`, for full covariances."
            )
        if isinstance(init, str) and init not in ("pca", "targets", "random"):
            raise ValueError(
                "`init` must be 'pca', 'targets', 'random' or an array (N, Q); got "
                f"{init!r}."
            )
        named = init is None or isinstance(init, str)
        if encoder is not None and (not named or init == "random"):
            raise ValueError(
                "With an encoder `init` must be 'pca' or 'targets': where a row starts "
                "must be a function of its data."
            )
        super().__init__(
            inner.model, theta=inner.theta, prefix=inner.prefix,
            init_loc_fn=inner.init_loc_fn,
        )  # fmt: skip
        self.inner = inner
        self.rule = rule
        self.encoder = encoder
        self.covariance = covariance
        self.init = init
        self._row_sites: dict[str, Any] = {}
        self._plates: dict[str, tuple[str, Plate]] = {}

    @property
    def config(self):
        fields = dataclasses.fields(self.rule)
        rule = {field.name: getattr(self.rule, field.name) for field in fields}
        return {
            "inner": {"name": type(self.inner).__name__, "config": self.inner.config},
            "rule": {"name": type(self.rule).__name__, "config": rule},
            "encoder": None if self.encoder is None else list(self.encoder.widths),
            "covariance": self.covariance,
        }

    @classmethod
    def rebuild(cls, model, config):
        inner = GaussianGuide.named(config["inner"]["name"])
        rule = getattr(cubature, config["rule"]["name"])(**config["rule"]["config"])
        widths = config["encoder"]
        return cls(
            inner.rebuild(model, config["inner"]["config"]), rule=rule,
            encoder=None if widths is None else Encoder(widths),
            covariance=config["covariance"],
        )  # fmt: skip

    def meaning(self, parameter):
        if any(
            parameter.startswith(f"{site}_{self.prefix}") for site in self._row_sites
        ):
            return "rows", parameter
        return self.inner.meaning(parameter)

    @property
    def can_be_rebuilt(self):
        known = type(self.rule).__name__ in cubature.__all__
        return known and (self.encoder is None or self.encoder.features is None)

    @property
    def factorised(self):  # type: ignore[override]
        return self.inner.factorised

    @property
    def row_sites(self) -> tuple[str, ...]:
        """Names of the rows' own sites, about which it has beliefs."""
        return tuple(self._row_sites)

    def adopt(self, program):
        structure, call = program.batched_structure, program.batched
        self._row_sites = {n: structure.latents[n] for n in structure.row_sites}
        if not self._row_sites:
            raise ValueError(
                "The model has no latent input of its rows: sample it inside the data "
                f"plate. Its sites are {list(structure.latents)}."
            )
        if self.rule is None:
            shapes = [s.unconstrained_shape[1:] for s in self._row_sites.values()]
            self.rule = cubature.default_rule(int(sum(map(np.prod, shapes))))
        self._plate(call, structure)
        self.learn(structure.without_rows(), call)
        self.inner.learn(structure.without_rows(), call)

    def natural_pairs(self):
        return self.inner.natural_pairs()

    def beliefs(self, theta, call):
        return self.inner.beliefs(theta, call)

    def held(self, theta, call, latents):
        return self.inner.held(theta, call, latents)

    def row_beliefs(self, params: dict, *args, **kwargs) -> dict[str, InputBelief]:
        """Means and scales of the rows' latent inputs, on the real line, by site."""
        call = self._recall(*args, **kwargs)
        with handlers.block(), handlers.seed(rng_seed=0):
            with handlers.substitute(data=params):
                maps = self._row_maps(call)
                return {site: belief(slice(None)) for site, belief in maps.items()}

    def quantiles(self, params, quantiles, *args, **kwargs):
        found = super().quantiles(params, quantiles, *args, **kwargs)
        steps = jax.scipy.special.ndtri(jnp.asarray(quantiles))[:, None, None]
        for name, belief in self.row_beliefs(params, *args, **kwargs).items():
            z = belief.mean + steps * jnp.sqrt(belief.var)
            found[name] = jax.vmap(lambda z, n=name: self._on_support(n, z))(z)
        return found

    def _sample_rows(self, call):
        name, plate = self._plate(call)
        maps = self._row_maps(call)
        values, latents = {}, {}
        with numpyro.plate(name, *plate, dim=-1) as i:
            # Where all rows are there, the gather and its scattered derivative are not.
            chosen = i if plate.subsample_size < plate.size else slice(None)
            rows = {site: belief(chosen) for site, belief in maps.items()}
            points, weights = self._points(rows)
            for site, belief in rows.items():
                latents[site] = LatentInput(
                    belief, points.get(site), weights,
                    random=self.rule.random,
                    signed=self.rule.has_negative_weights(self._num_columns(rows)),
                    unconstrained=self._row_sites[site].is_real,
                )  # fmt: skip
                fn = self._distribution(site, belief)
                mark = as_infer(latents[site])
                values[site] = numpyro.sample(site, fn, infer=mark)
        return values, latents

    def _points(self, rows):
        """The rule's points for all sites together, on their supports."""
        if isinstance(self.rule, cubature.Analytic):
            return {}, None
        key = numpyro.prng_key() if self.rule.random else None
        joint = join(*rows.values())
        points, weights = self.rule.nodes(joint, key)
        found, start = {}, 0
        for site, belief in rows.items():
            z = points[..., start : start + belief.shape[1]]
            found[site] = jax.vmap(lambda z, n=site: self._on_support(n, z))(z)
            start += belief.shape[1]
        return found, weights

    def _num_columns(self, rows):
        return sum(belief.shape[1] for belief in rows.values())

    def _on_support(self, site, z):
        """Values `(B, ...)` of a site from rows `(B, Q)` of the real line."""
        latent = self._row_sites[site]
        return latent.transform(z.reshape(z.shape[:1] + latent.unconstrained_shape[1:]))

    def _distribution(self, site, belief) -> dist.Distribution:
        """q(h) of the rows, batch `(B,)`."""
        latent = self._row_sites[site]
        if belief.is_diagonal:
            shape = belief.shape[:1] + latent.unconstrained_shape[1:]
            base = dist.Normal(belief.mean.reshape(shape), belief.scale.reshape(shape))
            base = base.to_event(len(shape) - 1)
        elif len(latent.unconstrained_shape) == 2:
            base = dist.MultivariateNormal(belief.mean, scale_tril=belief.scale)
        else:
            raise ValueError(
                f"`covariance='full'` needs a latent input with rows (Q,); site "
                f"`{site}` has {latent.shape[1:]}."
            )
        if latent.is_real:
            return base
        return dist.TransformedDistribution(base, latent.transform)

    def _row_maps(self, call) -> dict[str, Callable]:
        """By site a function of row numbers: the beliefs about these rows.

        Parameters are registered here, so that it must be called outside the plate.
        """
        _, plate = self._plate(call)
        make = self._free if self.encoder is None else self._encoded
        maps = {}
        for site in self._row_sites:

            def start(key, site=site):
                return self._initial_means(site, plate.size, call, key)

            maps[site] = make(site, jax.jit(start), plate.size, call)
        return maps

    def _free(self, site, start, num_rows, call) -> Callable:
        """Every row has parameters of its own."""
        loc = numpyro.param(f"{site}_{self.prefix}_loc", start)
        if loc.shape[0] != num_rows:
            raise ValueError(
                f"The guide has beliefs about {loc.shape[0]} rows of `{site}`; got "
                f"{num_rows} rows. For new rows use "
                "`gpx.latent_space.project(fit, ...)`."
            )
        if self.covariance == "full":
            eye = jnp.eye(loc.shape[1], dtype=loc.dtype)
            factors = jnp.broadcast_to(_INITIAL_SCALE * eye, (*loc.shape, loc.shape[1]))
            name = f"{site}_{self.prefix}_scale_tril"
            scale = numpyro.param(name, factors, constraint=dense_factor)
        else:
            scale = numpyro.param(
                f"{site}_{self.prefix}_scale",
                jnp.full_like(loc, _INITIAL_SCALE),
                constraint=constraints.softplus_positive,
            )
        return lambda rows: InputBelief(loc[rows], scale[rows])

    def _encoded(self, site, start, num_rows, call) -> Callable:
        """Beliefs that are functions of the rows' own data, starting near `start`."""
        num_dims = self._num_dims(site)
        num_outputs = num_dims + self._factor_size(num_dims)

        def features(rows):
            return self.encoder.inputs(call, num_rows, rows)

        skip = numpyro.param(
            f"{site}_{self.prefix}_skip",
            lambda key: _linear_map(features(slice(None)), start(key)),
        )
        weights = numpyro.param(
            f"{site}_{self.prefix}_encoder",
            lambda key: self.encoder.initial(key, skip.shape[0] - 1, num_outputs),
        )

        def belief(rows):
            x = features(rows)
            out = self.encoder(weights.astype(skip.dtype), x, num_outputs)
            loc = x @ skip[:-1] + skip[-1] + out[:, :num_dims]
            return InputBelief(loc, self._encoded_scale(out[:, num_dims:], num_dims))

        return belief

    def _encoded_scale(self, raw, num_dims):
        """Standard deviations, or lower factors, from the network's outputs."""
        scale = _INITIAL_SCALE * jnp.exp(raw[:, :num_dims])
        if self.covariance == "diagonal":
            return scale
        rows, columns = jnp.tril_indices(num_dims, -1)
        below = jnp.zeros((raw.shape[0], num_dims, num_dims), raw.dtype)
        below = below.at[:, rows, columns].set(raw[:, num_dims:])
        return scale[:, :, None] * (below + jnp.eye(num_dims))

    def _num_dims(self, site):
        return int(np.prod(self._row_sites[site].unconstrained_shape[1:]))

    def _factor_size(self, num_dims):
        return num_dims * (num_dims + 1) // 2 if self.covariance == "full" else num_dims

    def _initial_means(self, site, num_rows, call, key):
        latent = self._row_sites[site]
        num_dims = self._num_dims(site)
        if self.init is not None and not isinstance(self.init, str):
            means = jnp.asarray(self.init, latent.dtype)
            if means.shape != (num_rows, num_dims):
                raise ValueError(
                    f"`init` must have shape {(num_rows, num_dims)}; got {means.shape}."
                )
            return means
        y = self._targets(call)
        wide = y.ndim == 2 and min(y.shape) >= num_dims
        if self.init == "pca" and not wide:
            raise ValueError(
                f"`init='pca'` needs targets with at least {num_dims} rows and "
                f"columns; got shape {y.shape}. Use `init='random'`."
            )
        if wide and self.init in (None, "pca"):
            return pca(y, num_dims).astype(latent.dtype)
        random = jr.normal(key, (num_rows, num_dims), latent.dtype)
        if self.init == "random":
            return random
        return random.at[:, : min(num_dims, y[0].size)].set(_standard(y, num_dims))

    def _targets(self, call):
        """The targets of all rows."""
        name = self.structure.observed[0]
        with handlers.block():
            return call.batched(None).trace({}, jr.key(0))[name]["value"]

    def _plate(self, call, structure: Structure | None = None):
        """Name and size of the plate of rows in this call, cached by shapes."""
        signature = str(jax.tree.map(jnp.shape, (call.args, call.kwargs)))
        signature += str(call.batch_size)
        if signature not in self._plates:
            structure = structure or structure_of(call)
            if len(structure.row_plates) != 1:
                raise ValueError(
                    "Latent inputs must share one plate with the observed site; the "
                    f"model has {list(structure.row_plates)} around it."
                )
            (self._plates[signature],) = structure.row_plates.items()
        return self._plates[signature]


def _linear_map(features, start):
    """The linear map `(F + 1, Q)` of the features that comes nearest to `start`."""
    ones = jnp.ones((features.shape[0], 1), features.dtype)
    return jnp.linalg.lstsq(jnp.concatenate([features, ones], axis=1), start)[0]


def _standard(y, num_columns):
    """The first columns of the targets, with mean 0 and standard deviation 1."""
    y = y.reshape(y.shape[0], -1)[:, :num_columns].astype(float)
    y = jnp.nan_to_num(jnp.where(jnp.isnan(y), jnp.nanmean(y, axis=0), y))
    spread = jnp.std(y, axis=0)
    return (y - jnp.mean(y, axis=0)) / jnp.where(spread > 0.0, spread, 1.0)
