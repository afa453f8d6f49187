r"""The latent inputs of new rows as a model of their own, for every engine.

`gpx.latent_space.project` finds a Gaussian for each new row. Where few of its entries
were seen, the posterior

.. math:: p(h_* \mid y_*) \propto p(h_*)\, \mathbb E_q\big[p(y_* \mid f(h_*))\big]

may have several modes: the function here makes it an ordinary NumPyro model, so that
flows, implicit guides and samplers can be had as well.

References:
    Thesis 4.4.3 and C.4.3.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpyro
from jax.scipy.special import logsumexp

from numpyro_gpx.projection import latent_site, new_rows
from numpyro_gpx.results.fit import Fit
from numpyro_gpx.results.predict import row_densities

__all__ = ["row_model"]


def row_model(fit: Fit, *args, num_components: int = 16, **kwargs) -> Callable:
    """A model of the latent inputs of new rows; the rest stays as it was fitted.

    Args:
        fit: A variational fit of a model with one latent input of the rows.
        args: The model's arguments for the new rows, targets included: `y`, or `X, y`.
            Models of `gpx.models` take NaN in the targets for missing entries if
            called with `missing=True`.
        num_components: Draws of the fitted posterior that the density averages over;
            they are the same at every call. Gaussian beliefs are integrated: one layer
            with hyperparameters as points needs no draws, whatever this says.
        kwargs: Keyword arguments of the model.

    Returns:
        A NumPyro model without arguments, with the fit's latent site `(N, Q)` and a
        factor `rows`. Its rows are independent; one row at a time is easiest to infer.
    """
    site = latent_site(fit, "row_model")
    call = new_rows(fit, *args, **kwargs)
    view = fit.site_view()._replace(train=call)
    components = fit.global_components(num_components, (site,))
    count = jax.tree.leaves(components)[0].shape[0] if components else 1

    def model():
        h = numpyro.sample(site, _prior().to_event(1))
        everywhere = jnp.broadcast_to(h, (count, *h.shape))
        with numpyro.handlers.block():  # the fitted model's sites are not this one's
            found = row_densities(view, {**components, site: everywhere}, fit.key)
        numpyro.factor("rows", jnp.sum(logsumexp(found, axis=0) - jnp.log(count)))

    def _prior():
        first = jax.tree.map(lambda x: x[0], components)
        with numpyro.handlers.block():
            return call.trace({**view.params, **first}, fit.key)[site]["fn"]

    return model
