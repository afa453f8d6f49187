"""The usual links by name."""

__all__ = ["get_link"]

from collections.abc import Callable

from numpyro_gpx.links.piecewise import step
from numpyro_gpx.links.smooth import Exp, Identity, Link, Logit, Probit, Softplus

_NAMED: dict[str, Callable[[], Link]] = {
    "exp": Exp,
    "identity": Identity,
    "logit": Logit,
    "probit": Probit,
    "robust": step,
    "softplus": Softplus,
}


def get_link(link: str | Link) -> Link:
    """The link of that name; a link object is returned as it is.

    Args:
        link: One of `"exp"`, `"identity"`, `"logit"`, `"probit"`, `"robust"`,
            `"softplus"`, or a `Link`.
    """
    if isinstance(link, Link):
        return link
    if isinstance(link, str) and link in _NAMED:
        return _NAMED[link]()
    names = ", ".join(f'"{name}"' for name in sorted(_NAMED))
    raise ValueError(
        f"`link` must be one of {names}, or a `numpyro_gpx.links.Link`; got {link!r}."
    )
