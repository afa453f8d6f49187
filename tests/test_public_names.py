"""The public names and their signatures: what a change breaks, it breaks knowingly.

Names that belong to later work are reserved: absent, and taken by nothing else.
"""

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import numpyro_gpx as gpx

FACE = """
    gp observe exact propagate stack
    fit fit_svi fit_lbfgs fit_sites fit_nuts fit_guided fit_sghmc fit_mcmc
    fit_implicit
    Fit FitWarning load compare loo
    jitter standardise
    kernels means likelihoods links inducing inputs models guides infer engines
    optimizers cubature plots
    latent_space timeseries cache testing
"""

NAMESPACES = {
    "cache": """
        clear num_compiled to_disk
    """,
    "cubature": """
        Analytic GaussHermite MonteCarlo Nodes Rule SphericalRadial Unscented
        default_rule expectation gauss_hermite log_expectation_exp nodes peak
        tensor_nodes
    """,
    "engines": """
        Blackjax Engine Facts Guided HMC Implicit LBFGS MCMC NUTS Note NotFinite
        Outcome SGHMC SVI Sites Start Taking Watch taking
    """,
    "guides": """
        ConditionalGaussian Encoder Flow GaussianGuide Implicit OptimalGaussian
        SiteGuide UnscentedLatent WhitenedGaussian
    """,
    "inducing": """
        Data Inducing Kuf Kuu Points greedy_variance kmeans psi random_subset root
    """,
    "infer": """
        Blackjax ELBO ImportanceWeighted MonteCarloEM SGHMC predictive
    """,
    "inputs": """
        join
    """,
    "kernels": """
        ActiveDims ArcCosine Constant Cosine Custom Kernel Linear Matern12 Matern32
        Matern52 Periodic Polynomial Product RBF RationalQuadratic Scaled
        SpectralMixture Sum Warped White
    """,
    "latent_space": """
        pairwise_distances pca project row_model
    """,
    "likelihoods": """
        Bernoulli Beta Binomial Categorical Exponential From Gamma Gaussian
        HeteroscedasticGaussian Laplace Likelihood Moments NegativeBinomial Ordinal
        PerOutput Poisson RobustMax StudentT
    """,
    "links": """
        Exp Identity Link Logit PiecewiseConstant ProbabilityLink Probit Proportion
        Softplus WithFlips even_edges exp_error get_link interval_probabilities
        learnt_link lipschitz_error log_interval log_normal_cdf pieces_for_error
        places random_link step
    """,
    "means": """
        Constant Convolution Identity Linear Mean Projection Zero skip
    """,
    "models": """
        deep_gp exact_gp gplvm latent_gp priors svgp
    """,
    "optimizers": """
        natural
    """,
    "plots": """
        comparison latent_space link manifold posteriors predictions reconstructions
        relevance simulation styles
    """,
    "testing": """
        check_engine check_guide check_inducing check_kernel check_likelihood
    """,
    "timeseries": """
        lagged simulate simulate_paths
    """,
    "models.priors": """
        convolution gaussian_noise lengthscale resolve stationary
    """,
}

SIGNATURES = {
    "gp": "(name, kernel, *, inducing, mean=None, num_outputs=None, whiten=True)",
    "observe": (
        "(name, latent, likelihood, obs=None, *, rows=None, offset=None, "
        "weights=None, mask=None, missing=False)"
    ),
    "exact": "(name, kernel, X, scale, *, obs=None, mean=None)",
    "propagate": "(name, latent)",
    "stack": "(*latents)",
    "fit_svi": (
        "(model, guide, *args, key, num_steps=2000, batch_size=None, optimizer=None, "
        "loss=None, temperature=1.0, tolerance=None, init=None, progress=True, "
        "time_limit=None, **kwargs)"
    ),
    "fit_lbfgs": (
        "(model, guide, *args, key, max_steps=2000, init=None, progress=True, "
        "time_limit=None, **kwargs)"
    ),
    "fit_nuts": (
        "(model, *args, key, num_warmup=500, num_samples=1000, num_chains=2, "
        "target_accept_prob=0.8, dense_mass=False, thinning=1, "
        "chain_method='sequential', init_strategy=None, step_size=1.0, "
        "adapt_step_size=True, adapt_mass_matrix=True, regularize_mass_matrix=True, "
        "find_heuristic_step_size=False, noise_sets=16, params=None, "
        "max_tree_depth=10, through=None, init=None, progress=True, "
        "time_limit=None, **kwargs)"
    ),
    "fit_sites": (
        "(model, *args, key, max_updates=100, init=None, progress=True, "
        "time_limit=None, **kwargs)"
    ),
    "fit_guided": (
        "(model, *args, key, guide=None, method='auto', num_samples=1000, "
        "num_chains=4, num_proposals=8000, noise_sets=16, init=None, progress=True, "
        "time_limit=None, **kwargs)"
    ),
    "fit_sghmc": (
        "(model, *args, key, guide=None, batch_size=None, num_warmup=500, "
        "num_samples=1000, num_chains=2, step_size=0.2, friction=None, "
        "num_integration_steps=None, em=None, params=None, chain_method='sequential', "
        "init=None, progress=True, time_limit=None, **kwargs)"
    ),
    "fit_mcmc": (
        "(kernel, *args, key, batch_size=None, num_warmup=500, num_samples=1000, "
        "num_chains=2, thinning=1, chain_method='sequential', engine=None, "
        "params=None, init=None, progress=True, time_limit=None, **kwargs)"
    ),
    "fit_implicit": (
        "(model, guide, *args, key, num_rounds=5000, batch_size=None, "
        "num_particles=16, num_draws=None, discriminator_steps=5, "
        "discriminator_rate=0.005, generator_rate=0.003, theta_rate=0.01, "
        "temperature=1.0, init=None, progress=True, time_limit=None, **kwargs)"
    ),
    "load": "(path, model, *, guide=None)",
    "compare": (
        "(fits, X_test=None, y_test=None, *, reference=None, site=None, "
        "num_draws=1000, summaries=None)"
    ),
    "loo": "(fit, *, num_draws=1000, site=None)",
    "jitter": "(relative)",
    "standardise": "(X, y=None, *, missing=False)",
    "inputs.join": "(*columns)",
    "latent_space.pairwise_distances": "(site='h', lengthscale=None)",
    "latent_space.pca": "(Y, num_dims)",
    "latent_space.project": (
        "(fit, *args, key, rule=None, num_starts=4, num_steps=300, "
        "learning_rate=0.05, **kwargs)"
    ),
    "latent_space.row_model": "(fit, *args, num_components=16, **kwargs)",
    "optimizers.natural": "(rate=0.1, rest=None, *, guide=None)",
    "timeseries.lagged": "(y, num_lags, exogenous=None)",
    "timeseries.simulate": (
        "(fit, history, num_steps, *, rule=None, exogenous=None, joint=True, "
        "site=None, num_components=None, key=None)"
    ),
    "timeseries.simulate_paths": (
        "(fit, history, num_steps, *, key, num_paths=1000, exogenous=None, site=None,"
        " num_components=None)"
    ),
    "models.deep_gp": (
        "(inducing, *, widths=(), num_outputs=None, kernel=None, mean=None, "
        "likelihood=None, num_latents=0, full_cov=False)"
    ),
    "models.exact_gp": "(*, kernel=None, mean=None)",
    "models.gplvm": (
        "(inducing, *, num_outputs, kernel=None, likelihood=None, prior=None, "
        "mean=None, missing=False)"
    ),
    "models.latent_gp": (
        "(inducing, *, num_latents=1, num_outputs=None, kernel=None, likelihood=None,"
        " prior=None, mean=None, missing=False)"
    ),
    "models.svgp": (
        "(inducing, *, kernel=None, likelihood=None, mean=None, num_outputs=None, "
        "whiten=True)"
    ),
    "infer.Blackjax": (
        "(model, algorithm, *, parameters=None, thinning=1, init_strategy=<function "
        "init_to_prior_median>, init_values=None, params=None)"
    ),
    "infer.ELBO": "(num_particles=1, *, draw_latents=False)",
    "infer.ImportanceWeighted": "(num_replicates, num_particles=1)",
    "infer.MonteCarloEM": (
        "(num_rounds=2000, learning_rate=0.01, window=300, num_integration_steps=5)"
    ),
    "infer.SGHMC": (
        "(model, *, step_size=0.2, friction=0.3, num_integration_steps=20, "
        "init_strategy=<function init_to_prior_median>, "
        "init_values=None, params=None)"
    ),
    "infer.predictive": "(model, draws, *, params=None)",
    "links.learnt_link": (
        "(name, link, *, num_pieces=20, lower=-3.0, upper=3.0, at='upper', "
        "penalty=0.0, towards=None, monotone=False)"
    ),
    "links.random_link": (
        "(name, link='identity', *, num_pieces=20, lower=-3.0, upper=3.0, at='upper',"
        " scale=1.0, monotone=False, integrate=False)"
    ),
    "models.priors.lengthscale": "(X, *, ard=True, max_rows=1000)",
    "inducing.Points": "(Z, learn=False)",
    "inducing.Data": "(X)",
    "Fit.predict": (
        "(self, *args, of=None, site=None, num_components=None, given=None, "
        "chunk_rows=1024, **kwargs)"
    ),
    "Fit.latent_inputs": "(self, site=None)",
    "Fit.to_arviz": (
        "(self, *, num_draws=None, log_likelihood=True, posterior_predictive=True)"
    ),
    "Fit.parts": "(self, *args, site=None, num_components=None, **kwargs)",
    "Fit.functions": "(self, key, num_draws, *, site=None)",
    "fit": (
        "(model, engine, *args, key, init=None, progress=True, time_limit=None, "
        "**kwargs)"
    ),
    "Fit.from_prior": "(model, *args, key, num_draws=1000, params=None, **kwargs)",
    "Fit.summary": "(self, sites=None, *, num_draws=None)",
    "Fit.full_cov": "(self, *args, site=None, num_components=None, **kwargs)",
    "Fit.elbo": "(self, num_particles=200, *, key=None, all_rows=False)",
    "Fit.check": "(self)",
    "engines.taking": "(model, *args, **kwargs)",
    "Fit.save": "(self, path)",
}

RESERVED = {
    "": """
        fit_cavi marginal observe_blocks integrable
        sparse diagnostics diagnose calibrate
    """,
    "inputs": "at linear layer",
    "inducing": "Fourier Basis Laplacian Patches",
}


def at(path):
    """What `gpx.path` is."""
    thing = gpx
    for part in filter(None, path.split(".")):
        thing = getattr(thing, part)
    return thing


def signature(thing):
    """As a string, without annotations and addresses."""
    empty = inspect.Signature.empty
    found = inspect.signature(thing)
    parameters = [p.replace(annotation=empty) for p in found.parameters.values()]
    words = str(found.replace(parameters=parameters, return_annotation=empty))
    return re.sub(r" at 0x\w+", "", words)


def test_the_names_of_the_face():
    assert sorted(gpx.__all__) == sorted(FACE.split())


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_names_of_a_namespace(namespace):
    names = at(namespace).__all__
    assert sorted(names) == sorted(NAMESPACES[namespace].split())
    assert all(hasattr(at(namespace), name) for name in names)


def test_every_namespace_and_every_function_is_held_here():
    modules = {name for name in gpx.__all__ if inspect.ismodule(at(name))}
    assert modules == {name for name in NAMESPACES if "." not in name}
    functions = {name for name in gpx.__all__ if inspect.isfunction(at(name))}
    assert functions == {n for n in SIGNATURES if "." not in n}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert signature(at(name)) == SIGNATURES[name]


@pytest.mark.parametrize(
    "name",
    [f"{space}.{n}" for space, names in RESERVED.items() for n in names.split()],
)
def test_reserved_names_are_absent(name):
    namespace, _, last = name.rpartition(".")
    assert not hasattr(at(namespace), last)
    # A file of that name would become an attribute once it is imported.
    assert last not in modules_of(at(namespace))


def modules_of(package):
    return {
        found.name for found in pkgutil.iter_modules(getattr(package, "__path__", []))
    }


def test_no_module_has_the_name_of_a_public_function():
    public = {name for name in gpx.__all__ if not inspect.ismodule(at(name))}
    assert not public & modules_of(gpx)
    assert {"inputs", "kernels", "results"} <= modules_of(gpx)


def test_namespaces_of_imports_hold_nothing_else():
    folder = Path(gpx.__file__).parent
    for name in ("cache", "inputs", "latent_space", "optimizers", "timeseries"):
        code = (folder / f"{name}.py").read_text().splitlines()
        allowed = ('"""', "from numpyro_gpx", "__all__ = ")
        assert all(line == "" or line.startswith(allowed) for line in code), name
