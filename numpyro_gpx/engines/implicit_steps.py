"""Steps of the discriminator and of the generator (`engines.Implicit`)."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float
from numpyro import handlers

from numpyro_gpx.engines.tempering import tempered
from numpyro_gpx.program.batches import draw_batch
from numpyro_gpx.program.call import Call
from numpyro_gpx.program.structure import Structure

__all__ = ["Steps", "Networks", "Rules", "discriminator_loss"]

# Draws that the contrast's moments rest on, for each dimension of a block: the
# estimated Gaussian is then some 1/80 nat a dimension from the true one.
_DRAWS_A_DIMENSION = 20
# Draws that they rest on at least.
_CONTRAST_DRAWS = 2048
# Numbers that the discriminator sees in a step, if left to choose.
_NUMBERS_A_STEP = 2**14
# Draws made at once; more would fill the memory at large M.
_AT_ONCE = 256
# Less momentum than usual: the other network moves the target at each step.
_MOMENTUM = 0.5
# What the contrast's variances are raised by, relative to themselves, before they are
# factorised; taken off again before the next moments are mixed in.
_FLOOR = 1e-6
# Share of the generator's rates that is left in the last round.
_LAST_SHARE = 0.05


class Rules(NamedTuple):
    """Settings of `fit_implicit`, which says what they mean.

    Attributes:
        num_rounds: Rounds.
        num_draws: Draws that a step of the discriminator sees; `None` to choose.
        discriminator_steps: Steps of the discriminator in a round.
        rates: Learning rates of `discriminator`, `generator` and `theta`.
        temperature: What the log joint density is divided by at the start.
    """

    num_rounds: int
    num_draws: int | None
    discriminator_steps: int
    rates: dict[str, float]
    temperature: float


class Networks(NamedTuple):
    """Unconstrained parameters by what they belong to, and the optimisers' states."""

    discriminator: dict
    generator: dict  # and theta
    contrast: dict
    states: tuple

    @property
    def unconstrained(self) -> dict:
        return {**self.discriminator, **self.generator, **self.contrast}


class Steps:
    """How both networks move.

    Args:
        svi: Model, guide and bound; its optimiser is not used.
        structure: The model's sites under minibatches.
        rules: Settings.
        call: The model with its arguments, `batch_size` included.
    """

    def __init__(self, svi, structure: Structure, rules: Rules, call: Call):
        self.svi, self.guide, self.structure = svi, svi.guide, structure
        self.rules, self.call = rules, call
        self.of_discriminator = optax.adam(rules.rates["discriminator"], b1=_MOMENTUM)
        self.of_generator = optax.multi_transform(
            {name: self._falling(rules.rates[name]) for name in ("generator", "theta")},
            lambda params: {name: self.guide.part_of(name) for name in params},
        )

    @property
    def num_draws(self) -> int:
        """Draws that a step of the discriminator sees: fewer where each is large."""
        if self.rules.num_draws is not None:
            return self.rules.num_draws
        return min(max(_NUMBERS_A_STEP // self._size, 32), 256)

    def start(self, key, init_params) -> Networks:
        """The networks before the first round."""
        key_init, key_moments = jr.split(key)
        call = self.call
        state = self.svi.init(
            key_init, *call.args, init_params=init_params, **call.kwargs
        )
        params = self.svi.optim.get_params(state.optim_state)
        by_part: dict[str, dict] = {}
        for name, x in params.items():
            by_part.setdefault(self.guide.part_of(name), {})[name] = x
        generator = {**by_part["generator"], **by_part.get("theta", {})}
        discriminator = by_part["discriminator"]
        states = (
            self.of_discriminator.init(discriminator),
            self.of_generator.init(generator),
        )
        networks = Networks(discriminator, generator, by_part["contrast"], states)
        return self.refresh_contrast(networks, key_moments)

    def refresh_contrast(self, networks: Networks, key) -> Networks:
        """Set the contrast's moments to those of many draws."""
        number = max(_CONTRAST_DRAWS, 2 * _DRAWS_A_DIMENSION * self._largest)
        if self.guide.contrast == "prior":
            drawn = self._drawn_from_prior(networks, key, number)
        else:
            drawn = self._drawn(networks, self.noise(key, (number,)))
        return self._follow(networks, drawn, 1.0)

    def round(self, networks: Networks, key, number, moving):
        """Some steps of the discriminator, one of the generator; both losses.

        Args:
            networks: As they are.
            key: Random key.
            number: Which round it is.
            moving: Whether the generator moves, and the contrast with it.
        """
        key_noise, key_first, key_second = jr.split(key, 3)
        # Normal numbers for the whole round: compiling one call takes a second.
        noise = self.noise(
            key_noise, (self.rules.discriminator_steps + 1, self.num_draws)
        )
        if self.guide.contrast == "gaussian":
            needed = max(_CONTRAST_DRAWS, _DRAWS_A_DIMENSION * self._largest)
            share = jnp.where(moving, min(1.0, self.num_draws / needed), 0.0)
            networks = self._follow(networks, self._drawn(networks, noise[0]), share)
        networks, first = self._discriminate(networks, noise[1:], key_first)
        networks, second = self._generate(networks, key_second, number, moving)
        return networks, (second, first)

    def noise(self, key, shape) -> Float[Array, "*S K"]:
        """Normal numbers for draws of the guide and of a Gaussian contrast."""
        size = self.guide.noise_size + self._size
        return jr.normal(key, (*shape, size), self.guide.dtype)

    def draws(self, networks, noise: Float[Array, "S K"], key):
        """Standardised draws `(S, P, M)` of the guide and of the contrast, by block."""
        with self._set_to(networks):
            moments = self.guide.moments(self.call)

        def whiten(drawn):
            return {n: jax.vmap(moments[n].standardise)(x) for n, x in drawn.items()}

        drawn = whiten(self._drawn(networks, noise))
        if self.guide.contrast == "prior":
            return drawn, whiten(self._drawn_from_prior(networks, key, len(noise)))
        rest, normal = noise[:, self.guide.noise_size :], {}
        for name, (P, M) in self.guide.blocks.items():
            normal[name] = rest[:, : P * M].reshape(-1, P, M)
            rest = rest[:, P * M :]
        return drawn, normal

    def logits(self, networks, weights, draws):
        """`T` at draws of the guide and of the contrast, from `draws`."""
        with self._set_to(networks):
            inputs = self.guide.inputs(self.call)
        ratio = self.guide.discriminator(inputs)
        T = jax.vmap(lambda blocks: ratio(weights, blocks, inputs))
        return T(draws[0]), T(draws[1])

    def _discriminate(self, networks, noise, key):
        """Steps of the discriminator (algorithm 2), one for each set of draws."""

        def loss(weights, noise, key):
            draws = self.draws(networks, noise, key)
            return discriminator_loss(*self.logits(networks, weights, draws))

        def step(carry, given):
            weights, state = carry
            noise, i = given
            key_step = jr.fold_in(key, i)
            value, grads = jax.value_and_grad(loss)(weights, noise, key_step)
            updates, state = self.of_discriminator.update(grads, state, weights)
            return (optax.apply_updates(weights, updates), state), value

        start = (networks.discriminator, networks.states[0])
        given = (noise, jnp.arange(len(noise)))
        (weights, state), losses = jax.lax.scan(step, start, given)
        states = (state, networks.states[1])
        networks = networks._replace(discriminator=weights, states=states)
        return networks, jnp.mean(losses)

    def _generate(self, networks, key, number, moving):
        """A step of the generator (algorithm 3)."""
        key_batch, key_loss = jr.split(key)
        svi = self.svi
        batch = draw_batch(key_batch, self.structure)
        done = number / self.rules.num_rounds
        model = tempered(svi.model, self.rules.temperature, done)
        fixed = {**networks.discriminator, **networks.contrast}

        def loss(generator):
            params = svi.constrain_fn({**fixed, **generator})
            with handlers.substitute(data=batch):
                call = self.call.with_model(model)
                return -svi.loss.mean(key_loss, params, svi.guide, call)

        value, grads = jax.value_and_grad(loss)(networks.generator)
        updates, state = self.of_generator.update(
            grads, networks.states[1], networks.generator
        )
        updates = jax.tree.map(lambda x: jnp.where(moving, x, 0.0), updates)
        generator = optax.apply_updates(networks.generator, updates)
        states = (networks.states[0], state)
        return networks._replace(generator=generator, states=states), value

    def _falling(self, rate):
        schedule = optax.cosine_decay_schedule(rate, self.rules.num_rounds, _LAST_SHARE)
        return optax.adam(schedule, b1=_MOMENTUM)

    def _follow(self, networks, drawn, share):
        """Move the contrast's moments by this share towards those of draws."""
        with self._set_to(networks):
            old = self.guide.kept_moments()
            if self.guide.contrast == "gaussian":
                drawn = self.guide.before_affine(drawn, self.call)
        new = {
            name: _moved(old[name].mean, old[name].scale_tril, x, share)
            for name, x in drawn.items()
        }
        return networks._replace(contrast=self.guide.moment_params(new))

    @property
    def _largest(self) -> int:
        return max(M for _, M in self.guide.blocks.values())

    @property
    def _size(self) -> int:
        return sum(P * M for P, M in self.guide.blocks.values())

    def _drawn(self, networks, noise):
        """Blocks of the generator, `(S, P, M)`."""

        def one(noise):
            e = noise[: self.guide.noise_size]
            return self.guide.generate(e, self.call)

        with self._set_to(networks):
            if len(noise) <= _AT_ONCE:
                return jax.vmap(one)(noise)
            return jax.lax.map(one, noise, batch_size=_AT_ONCE)

    def _drawn_from_prior(self, networks, key, number):
        def one(key):
            return self.guide.prior_draw(key, self.call)

        with self._set_to(networks):
            return jax.vmap(one)(jr.split(key, number))

    @contextlib.contextmanager
    def _set_to(self, networks):
        """The guide's and the model's parameters at these values, unseen outside."""
        params = self.svi.constrain_fn(networks.unconstrained)
        with handlers.block(), handlers.substitute(data=params):
            yield


def _moved(
    mean: Float[Array, "P M"],
    root: Float[Array, "P M M"],
    draws: Float[Array, "K P M"],
    share: float | Array,
):
    """Mean and factors of the mixture of old moments with those of new draws.

    Args:
        mean: Old means.
        root: Old lower factors.
        draws: New draws.
        share: Weight of the new.
    """
    fresh = jnp.mean(draws, axis=0)
    centred = draws - fresh[None]
    cov = jnp.einsum("kpm,kpn->pmn", centred, centred) / draws.shape[0]
    gap = fresh - mean
    between = gap[:, :, None] * gap[:, None, :]
    raised = jnp.einsum("pmi,pni->pmn", root, root)
    old = raised - _diagonal(raised) * _FLOOR / (1.0 + _FLOOR)
    cov = share * cov + (1.0 - share) * (old + share * between)
    # Draws on a line have no density at all; the floor keeps the factor finite.
    raised = cov + _FLOOR * _diagonal(cov)
    return mean + share * gap, jnp.linalg.cholesky(raised)


def _diagonal(matrices):
    """The matrices without what is off their diagonals."""
    return matrices * jnp.eye(matrices.shape[-1], dtype=matrices.dtype)[None]


def discriminator_loss(
    logits_guide: Float[Array, " S"], logits_contrast: Float[Array, " S"]
) -> Float[Array, ""]:
    r"""Binary cross-entropy of draws of the guide and of the contrast.

    .. math:: -\mathbb E_q[\log\sigma(T)] - \mathbb E_r[\log(1 - \sigma(T))],

    least where :math:`T = \log q - \log r` (thesis eq. 4.3, 4.4); there
    :math:`2\log 2` if the two are alike.

    Args:
        logits_guide: `T` at draws of the guide.
        logits_contrast: `T` at draws of the contrast.
    """
    return jnp.mean(jax.nn.softplus(-logits_guide)) + jnp.mean(
        jax.nn.softplus(logits_contrast)
    )
