"""What likelihoods of classes share: labels, one latent function for each."""

__all__ = ["ClassLabels", "check_num_classes", "classes_beside", "label_advice", "pick"]

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped
from numpyro.distributions import constraints

from numpyro_gpx.likelihoods.base import Likelihood, label_moments


class ClassLabels(Likelihood):
    """Labels 0, ..., C-1 of unordered classes, each with a latent function."""

    latent_ndim: ClassVar[int] = 1
    classes: eqx.AbstractVar[int]

    @property
    def support(self):
        return constraints.integer_interval(0, self.classes - 1)

    @property
    def num_latent(self):
        return self.classes

    @property
    def num_classes(self):
        return self.classes

    @property
    def nominal(self):
        return True

    def predictive_cdf(self, y, f_mean, f_var):
        below = classes_beside(y, self.classes) <= jnp.asarray(y)[..., None]
        p = self.predictive_probabilities(f_mean, f_var)
        return jnp.sum(jnp.where(below, p, 0.0), axis=-1)

    def predictive_moments(self, f_mean, f_var):
        """Mean and variance of the label, as a number."""
        return label_moments(self.predictive_probabilities(f_mean, f_var))

    def expected(self):
        return f"classes 0, ..., {self.classes - 1}"

    def advice(self, y):
        return label_advice(y, self.classes)


def pick(
    values: Float[Array, "*shape C"], y: Shaped[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The entry of each row's class."""
    index = jnp.asarray(y).astype(int)[..., None]
    return jnp.take_along_axis(values, index, axis=-1)[..., 0]


def classes_beside(y, num_classes: int) -> Array:
    """The classes 0, ..., C-1 on an axis after those of `y`, `(1, ..., C)`."""
    return jnp.arange(num_classes).reshape((*(1,) * jnp.ndim(y), num_classes))


def check_num_classes(num_classes: int) -> int:
    """`num_classes`, once it is known to be a whole number above 1."""
    if not isinstance(num_classes, int) or num_classes < 2:
        raise ValueError(
            f"`num_classes` must be a whole number, at least 2; got {num_classes!r}."
        )
    return num_classes


def label_advice(y, num_classes: int) -> str:
    """The way out for labels outside 0, ..., C-1."""
    if y.size and y.min() == 1 and y.max() == num_classes:
        return "Classes are counted from 0: pass `y - 1`."
    return "Number the classes from 0, as in `np.unique(y, return_inverse=True)[1]`."
