"""Interim."""
import optax, jax.numpy as jnp, dataclasses
from numpyro_gpx.engines.svi import SVI
from numpyro_gpx.guides import ConditionalGaussian, WhitenedGaussian
from numpyro_gpx.results.fit import Fit
def trained_guide(program, key, start, watch):
    kind = ConditionalGaussian if program.structure.gps else (lambda m: WhitenedGaussian(m, theta="full"))
    engine = SVI(kind(program.model), num_steps=1000, optimizer=optax.adam(optax.cosine_decay_schedule(0.1,1000,0.01)))
    o = engine.run(program, key, start=start, watch=watch)
    return Fit(program, o.posterior, facts=engine.facts, params=o.params, info=o.info)
