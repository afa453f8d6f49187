"""NumPyro's own guides under our bound, and where they would draw the wrong rows."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import Trace_ELBO, autoguide

import numpyro_gpx as gpx

Y = jnp.array([0.3, 1.1, 0.4, 0.9])


def model(y=None):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(a, 1.0))
    with numpyro.plate("data", 4):
        numpyro.sample("y", dist.Normal(b, 0.5), obs=y)


def rows(y=None, *, batch_size=None):
    with numpyro.plate("data", 4, subsample_size=batch_size) as i:
        h = numpyro.sample("h", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(h, 0.5), obs=None if y is None else y[i])


GUIDES = {
    "AutoNormal": {},
    "AutoLowRankMultivariateNormal": {"rank": 1},
    "AutoIAFNormal": {"hidden_dims": [4], "num_flows": 1},
    "AutoBNAFNormal": {"hidden_factors": [2], "num_flows": 1},
    "AutoDAIS": {"K": 2},
}


@pytest.mark.parametrize("name", GUIDES)
def test_our_bound_is_numpyros(name):
    """Their means over draws of their own: 6 standard errors apart at most."""
    guide = getattr(autoguide, name)(model, **GUIDES[name])
    engine = gpx.engines.SVI(guide, num_steps=20)
    fit = gpx.fit(model, engine, Y, key=jr.key(0), progress=False)
    ours = fit.elbo(2000)
    theirs = [
        -Trace_ELBO(num_particles=1000).loss(jr.key(k), fit.params, model, guide, Y)
        for k in (1, 2)
    ]
    spread = max(ours.standard_error * np.sqrt(2.0), 1e-3)
    assert_allclose(np.mean(theirs), ours.value, atol=6.0 * spread)
    assert np.all(np.isfinite(fit.draws(20)["b"]))


def test_the_bound_of_minibatches_of_the_rows_own_sites_is_refused():
    engine = gpx.engines.SVI(autoguide.AutoNormal, num_steps=2, batch_size=2)
    with pytest.raises(ValueError, match=r"Sites \['h'\] live inside .* AutoNormal dr"):
        gpx.fit(rows, engine, Y, key=jr.key(0), progress=False)
    guide = autoguide.AutoNormal(rows)
    svi = numpyro.infer.SVI(rows, guide, numpyro.optim.Adam(0.1), Trace_ELBO())
    result = svi.run(jr.key(0), 2, Y, batch_size=2, progress_bar=False)
    with pytest.raises(ValueError, match="draws those of a minibatch alone"):
        gpx.Fit.from_svi(svi, result, Y, batch_size=2)
    # On all rows there is nothing to refuse.
    result = gpx.fit_svi(
        rows, autoguide.AutoNormal, Y, key=jr.key(0), num_steps=2, progress=False
    )
    assert result.draws(8)["h"].shape == (8, 4)
